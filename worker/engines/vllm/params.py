"""A request in vLLM's own fields, and the chain of what vLLM does not honour exactly.

vLLM applies its own fields where a request has no chain. One with a chain has everything but the
draw of a request without a seed in it: fields join it as processors, in the order law.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.interrupts import is_interrupt
from adapters.processors.seeded_sampler import SeededSampler
from adapters.vocabulary import Vocabulary
from worker.engines.chain_members import begin, library_chain, refuse_embedded_only
from worker.engines.refusals import REFUSED_EVERYWHERE, check_refused
from worker.engines.request import EngineRequest
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import is_sampled, late_controls, processor_controls

SHIPPED = "dlw_chain"
"""Key in ``extra_args`` of `Shipped`, which the worker's own logits processor class alone reads."""

REFUSED = {
    **REFUSED_EVERYWHERE,
    "apply_batched_logits_processor": "vLLM does not call batched logits processors of TensorRT-LLM",
    "lookahead_config": "this engine does not look ahead",
}
"""Fields that are not served, with the reason; refused when they differ from their default."""

SAMPLER = frozenset({"temperature", "top_k", "top_p", "min_p"})
"""Controls that vLLM's sampler applies behind the chain, with the worker's own meaning."""

EARLY = frozenset({"repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens"})
"""Controls that vLLM applies, with the worker's own meaning, to requests without a chain."""

LEAST_TEMPERATURE = 0.01
"""vLLM samples at no temperature below, except 0."""

MOST_TEMPERATURE = 2.0
"""vLLM refuses temperatures above."""

MOST_KEPT_AWAY = 128
"""Stop tokens that ``min_tokens`` of vLLM's second model runner has room for; at more its engine
ends.
"""


class Shipped(NamedTuple):
    """A chain as a request's parameters carry it into the engine's process.

    Attributes:
        chain: The chain, pickled; it stands at the end of the prompt that vLLM has.
        end_id: Token that ends the answer when the chain fails.
        report: Name of the failure and the receipt.
        suspects: Names of the processors that may prove to be impossible to load.
    """

    chain: bytes
    end_id: int
    report: str
    suspects: str


@dataclass(frozen=True, slots=True)
class Served:
    """Facts about the loaded engine that decide what runs where.

    Attributes:
        vocab_size: Width of a row of logits.
        eos_token_ids: Ids that end an answer unless ``ignore_eos``.
        tokenizer_end: The tokenizer's own end token, None if it has none.
        is_parallel: Whether several processes apply the same chain: their clocks differ.
        native: Controls that vLLM applies with the worker's own meaning; others run in the chain.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_end: int | None = None
    is_parallel: bool = False
    native: frozenset[str] = EARLY | SAMPLER

    def native_with(self, ends: frozenset[int]) -> frozenset[str]:
        """Names of the controls that vLLM applies, as the worker means them, to an answer that
        these ids end.

        The ``min_tokens`` of vLLM keeps the end tokens of model and tokenizer away too, whether or
        not they end the answer.
        """
        others = {*self.eos_token_ids, self.tokenizer_end} - {None}
        return self.native if others <= ends and len(ends) <= MOST_KEPT_AWAY else self.native - {"min_tokens"}


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """One request for vLLM.

    Attributes:
        fields: Fields of its ``SamplingParams``.
        end_token_ids: Ids that end the answer.
        chain: Processors that run in the engine's process, begun; None if none do.
    """

    fields: dict[str, Any]
    end_token_ids: frozenset[int]
    chain: ProcessorChain | None = None


def native_request(request: EngineRequest, served: Served) -> NativeRequest:
    """A request in vLLM's fields, with the chain that goes with it.

    The answer so far of a migrated request is prompt to the engine, so every control that tells
    them apart runs in the chain.

    Raises:
        InvalidRequest: a field cannot be served here; it is named.
    """
    params, chain = request.params, request.chain
    generated = request.generated_token_ids
    check_refused(params, REFUSED)
    if params.logprobs_mode != "raw":
        raise InvalidRequest("sampling_params.logprobs_mode", "vLLM reports raw ones only, as it is started here")
    if params.n > 1 or params.best_of != params.n:
        raise InvalidRequest("sampling_params.n", "must be 1: each answer is a request of its own")
    ends = params.ends_with(served.eos_token_ids)
    random = is_sampled(params, chain)
    is_drawn = random and params.seed is not None
    is_beyond = random and bool(params.temperature) and not _is_vllms(params.temperature)
    fields = _fields(params, ends, len(generated))
    if (
        chain is None
        and not generated
        and not is_drawn
        and not is_beyond
        and _is_native(params, served.native_with(ends))
    ):
        return NativeRequest(fields | _native(params, random), ends)
    if chain is not None:
        begin(chain, request)
        refuse_embedded_only(chain, "vLLM")
    context = Context(Vocabulary(served.vocab_size), ends, params.seed or 0, max_tokens=params.max_tokens)
    sampler = SeededSampler(params.seed, request.choice) if is_drawn else None
    by_sampler, late = SAMPLER & served.native, is_drawn or is_beyond
    rest, chain = library_chain(request, params, context, 0, "vLLM", by_sampler=by_sampler, late=late, sampler=sampler)
    if chain is not None and served.is_parallel:
        chain.failures.step_budget_s = float("inf")
    return NativeRequest(fields | _sampling(rest, random), ends, chain)


def of_prompt() -> dict[str, Any]:
    """Fields of a request that computes its prompt; vLLM samples a token, which nobody sees."""
    return {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}


def shipped(native: NativeRequest, report: str, eos_token_ids: Sequence[int]) -> Shipped | None:
    """The record that the parameters carry, None without a chain.

    Raises:
        InvalidRequest: a processor cannot be pickled.
    """
    if native.chain is None:
        return None
    end_id = min(native.end_token_ids, default=min(eos_token_ids, default=0))
    try:
        packed = pickle.dumps(native.chain)
    except BaseException as error:  # of any class: third parties' processors
        if is_interrupt(error):
            raise
        problem = f"{native.chain.unpicklable()} cannot be sent to vLLM's process: {type(error).__name__}: {error}"
        raise InvalidRequest("sampling_params.logits_processor", problem) from error
    return Shipped(packed, end_id, report, native.chain.suspects)


def _is_vllms(temperature: float | None) -> bool:
    """Whether vLLM samples at this temperature as it is given."""
    return temperature is not None and LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE


def _is_native(params: SamplingParams, known: frozenset[str]) -> bool:
    """Whether vLLM applies all that is asked for."""
    if params.logits_processors or params.embedding_bias is not None:
        return False
    return all(
        one.name in known for one in processor_controls(type(params)) if one.refused is None and one.is_active(params)
    )


def _native(params: SamplingParams, random: bool) -> dict[str, Any]:
    """All controls in vLLM's own fields."""
    early = {name: value for name in EARLY if (value := getattr(params, name)) is not None}
    return early | _sampling(params, random)


def _sampling(params: SamplingParams, random: bool) -> dict[str, Any]:
    """Temperature and truncation, those that are left to the sampler."""
    if not random:
        return {"temperature": 0.0}
    late = {one.name: getattr(params, one.name) for one in late_controls(type(params)) if one.name in SAMPLER}
    return {"temperature": 1.0} | {name: value for name, value in late.items() if value is not None}


def _fields(params: SamplingParams, ends: frozenset[int], num_replayed: int) -> dict[str, Any]:
    """Fields beside the controls. All end tokens are stop tokens: vLLM then says which it was.

    Log probabilities of the prompt came with the first token of the answer.
    """
    return {
        "max_tokens": None if params.max_tokens is None else params.max_tokens - num_replayed,
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,
        "logprobs": params.logprobs,
        "prompt_logprobs": None if num_replayed else params.prompt_logprobs,
        "detokenize": False,
    }
