"""A request's `SamplingParams` as native fields and one callable.

The order law decides. Without processors, controls that this engine honours with the worker's own
meaning stay native. With any processor, bias, penalties and bans join its chain; with one that
shapes late, temperature and truncation too. What a version would ignore runs as our processor. A
seed is never left to TensorRT-LLM, whose kernels read it for one row of a batch: the chain then
samples, and so it does where log probabilities are asked for beside processors.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.seeded_sampler import SeededSampler
from adapters.sampling.truncation import GREEDY_BELOW
from adapters.trtllm import ChainAdapter
from adapters.vocabulary import Vocabulary
from worker.engines.chain_members import begin, dense_bias, library_chain, refuse_embedded_only
from worker.engines.refusals import REFUSED_EVERYWHERE, check_refused
from worker.engines.request import EngineRequest
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import check_values, is_sampled, processor_controls

REFUSED = {
    **REFUSED_EVERYWHERE,
    "apply_batched_logits_processor": "the PyTorch backend does not call batched logits processors",
    "lookahead_config": "the PyTorch backend does not look ahead",
    "prompt_logprobs": "TensorRT-LLM scores a prompt's tokens without those of a prefix hit, and pairs the scores with "
    "the wrong tokens then; the embedded engine serves log probabilities of the prompt",
}
"""Fields that are not served, with the reason; refused when they differ from their default."""

ALWAYS_NATIVE = frozenset({"temperature", "top_k", "top_p"})
"""Controls that every version honours with the worker's own meaning; `probes` finds the others."""


@dataclass(frozen=True, slots=True)
class Served:
    """Controls and fields of the installed TensorRT-LLM.

    Attributes:
        sampling_fields: Fields that the version's ``SamplingParams`` has.
        honoured: Controls that it honours (`probes`).
        vocab_size: Width of a row.
        eos_token_ids: Ids that end an answer unless ``ignore_eos``.
        lagged: The engine shows processors an old history.
    """

    sampling_fields: Collection[str]
    honoured: Collection[str]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    lagged: bool = False


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """One request for TensorRT-LLM.

    Attributes:
        fields: Fields of its ``SamplingParams``; a fresh object is made of them, because the engine
            changes it.
        end_token_ids: Ids that end the answer.
        chain: Processors that run as a callable, begun after the prompt; None if none do.
        chain_logprobs: The chain reports log probabilities, of this many most likely tokens; None
            if it does not.
        guide: Argument of ``GuidedDecodingParams``, None without one.
        watched: Chain of the grammar that the guide is, begun after the prompt, None without one.
    """

    fields: dict[str, Any]
    end_token_ids: frozenset[int]
    chain: ProcessorChain | None = None
    chain_logprobs: int | None = None
    guide: dict[str, str] | None = None
    watched: ProcessorChain | None = None


def native_request(request: EngineRequest, number: int, served: Served) -> NativeRequest:
    """A request in TensorRT-LLM's own fields, and the chain of what it does not honour exactly.

    The answer so far of a migrated request is prompt to the engine, so every control that tells
    them apart runs in the chain.

    Args:
        request: The request.
        number: Id that third-party callables are called with.
        served: Controls and fields of the installed version.

    Raises:
        InvalidRequest: a field cannot be served here; it is named.
    """
    params, chain = request.params, request.chain
    generated = request.generated_token_ids
    check_refused(params, REFUSED)
    ends = params.ends_with(served.eos_token_ids)
    has_processors = chain is not None or bool(params.logits_processors)
    cold = is_cold(params)
    is_native = not (generated or has_processors or cold)
    native, rest = _native(params, len(request.prompt_token_ids), served) if is_native else ({}, params)
    if chain is not None:
        begin(chain, request)
        refuse_embedded_only(chain, "TensorRT-LLM")
    random = is_sampled(params, chain)
    chain_samples = _must_sample_in_chain(rest, random, has_processors or cold, served)
    seed = request.seed if params.seed is None else params.seed
    context = Context(Vocabulary(served.vocab_size), ends, seed, request.choice, max_tokens=params.max_tokens)
    late = random and (chain_samples or cold)
    if native:
        check_values(params, context)
    sampler = SeededSampler(seed if random else None, request.choice) if chain_samples else None
    rest, chain = library_chain(
        request, rest, context, number, "TensorRT-LLM", by_sampler=ALWAYS_NATIVE, late=late, sampler=sampler
    )
    check_choices(params, chain)
    drawn = sampling(rest, served.vocab_size) if random and not chain_samples else greedy()
    fields = fields_of(params, ends, served, len(generated)) | native | drawn
    chain_logprobs = params.logprobs if chain is not None else None
    if chain is None and params.logprobs is not None:
        fields |= _logprobs(params, served)
    return NativeRequest(fields, ends, chain, chain_logprobs)


def callable_of(native: NativeRequest, end_id: int | None, *, lagged: bool) -> ChainAdapter | None:
    """The chain as a callable; its reports are the caller's to set.

    Raises:
        InvalidRequest: it needs a history that this engine does not show.
    """
    if native.chain is None:
        return None
    try:
        adapter = ChainAdapter(native.chain, end_id=0 if end_id is None else end_id, lagged=lagged)
    except ValueError as error:
        raise InvalidRequest("sampling_params.logits_processor", f"{error}; the worker runs --history lagged") from None
    adapter.num_logprobs = native.chain_logprobs
    return adapter


def _native(params: SamplingParams, prompt_length: int, served: Served) -> tuple[dict[str, Any], SamplingParams]:
    """Fields left to the engine, and the parameters without them: all or none of them."""
    names = set(_early(params))
    if not params.is_greedy:
        names.update(_active(params, late=True))
    if _must_sample_in_chain(params, not params.is_greedy, False, served):
        return {}, params
    if not names <= set(served.honoured):
        return {}, params
    native = {name: getattr(params, name) for name in names}
    if names & {"presence_penalty", "frequency_penalty"}:
        native["prompt_ignore_length"] = prompt_length
    if "embedding_bias" in native:
        native["embedding_bias"] = dense_bias(params, served.vocab_size)
    cleared: dict[str, Any] = dict.fromkeys(names)
    return native, replace(params, **cleared)


def _active(params: SamplingParams, *, late: bool) -> list[str]:
    """Controls that are asked for and that not every version honours."""
    return [
        control.name
        for control in processor_controls(type(params))
        if control.refused is None
        and control.name not in ALWAYS_NATIVE
        and any(runs_as.is_late == late for runs_as in control.runs_as)
        and control.is_active(params)
    ]


def _early(params: SamplingParams) -> list[str]:
    """Active controls that act before temperature; the dense bias is one."""
    return _active(params, late=False) + ([] if params.embedding_bias is None else ["embedding_bias"])


def _must_sample_in_chain(params: SamplingParams, random: bool, has_chain: bool, served: Served) -> bool:
    """Whether the chain itself takes the token."""
    seeded = params.seed is not None and random
    if params.logprobs_mode == "train":
        raise InvalidRequest("sampling_params.logprobs_mode", "train is for the embedded engine alone")
    if params.logprobs is None:
        return seeded
    if params.logprobs_mode == "processed" and "logprobs_mode" not in served.sampling_fields:
        raise InvalidRequest("sampling_params.logprobs_mode", "this version of TensorRT-LLM reports raw ones only")
    if seeded or has_chain or _early(params) or _active(params, late=True):
        if params.logprobs_mode == "processed":
            problem = "beside processors, penalties, a seed or a temperature near 0 this engine reports raw ones only"
            raise InvalidRequest("sampling_params.logprobs_mode", problem)
        return True
    return False


def check_choices(params: SamplingParams, chain: ProcessorChain | None) -> None:
    """Raises `InvalidRequest` for choices that are not streamed, or that would share a chain."""
    if params.best_of != params.n:
        raise InvalidRequest("sampling_params.best_of", "must be n: every choice is streamed")
    if params.n > 1 and chain is not None:
        problem = "must be 1 beside processors, seeds and controls that run as processors: choices would share them"
        raise InvalidRequest("sampling_params.n", problem)


_NO_END = -1
"""TensorRT-LLM's ``end_id`` for none."""


def default_end(params: SamplingParams, served: Served) -> int | None:
    """The end token that TensorRT-LLM is told to end this answer with, beside stop tokens."""
    return None if params.ignore_eos or not served.eos_token_ids else served.eos_token_ids[0]


def fields_of(params: SamplingParams, ends: frozenset[int], served: Served, num_replayed: int) -> dict[str, Any]:
    """Fields of length, ends and choices.

    ``end_id`` is given: where it is not, TensorRT-LLM ends answers with its tokenizer's end token
    too, which may be none of the model's.

    Args:
        params: Sampling parameters of the request.
        ends: Ids that end the answer.
        served: Controls and fields of the installed version.
        num_replayed: Tokens of a migrated request's answer so far.
    """
    end_id = default_end(params, served)
    return {
        "end_id": _NO_END if end_id is None else end_id,
        "max_tokens": None if params.max_tokens is None else params.max_tokens - num_replayed,
        "stop_token_ids": None if params.ignore_eos else sorted(ends) or None,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "ignore_eos": params.ignore_eos,
        "n": params.n,
        "best_of": params.n,
        "detokenize": False,
    }


def greedy() -> dict[str, Any]:
    """Fields of greedy sampling: in every version none is set."""
    return {"temperature": None, "top_k": None, "top_p": None}


def is_cold(params: SamplingParams) -> bool:
    """Whether the temperature is greedy in the worker's law, and not in the library's: logits that
    it divides by such a number may not be finite, which ends the executor.
    """
    return params.temperature is not None and 0 < params.temperature < GREEDY_BELOW


def sampling(params: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Fields of random sampling by temperature, top-k and top-p.

    A top-k of the whole vocabulary is left out: that keeps all, and more than all is no number that
    the library promises to take.

    Args:
        params: Sampling parameters.
        vocab_size: Width of a row of logits.
    """
    return {
        "temperature": 1.0 if params.temperature is None else params.temperature,
        "top_k": params.top_k if params.top_k and params.top_k < vocab_size else None,
        "top_p": params.top_p,
    }


def _logprobs(params: SamplingParams, served: Served) -> dict[str, Any]:
    """Log probabilities left to the engine. One that reports none for 0 is asked for one more."""
    count = params.logprobs or (0 if "logprobs_of_sampled" in served.honoured else 1)
    mode = {"logprobs_mode": params.logprobs_mode} if "logprobs_mode" in served.sampling_fields else {}
    return {"logprobs": count, **mode}
