"""What a request may ask of the embedded engine, and the `Request` made of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any

import torch

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import Context, Processor
from adapters.trtllm import ChainAdapter
from adapters.trtllm.native_controls import EmbeddingBias, ThirdPartyCallable
from adapters.vocabulary import Vocabulary
from worker.engines.embedded.plan import Model, Request
from worker.engines.refusals import REFUSED_EVERYWHERE, check_refused
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.sampling.controls import with_field_processors

HONOURED = frozenset(
    {
        "end_id",
        "max_tokens",
        "bad_token_ids",
        "stop_token_ids",
        "include_stop_str_in_output",
        "embedding_bias",
        "logits_processor",
        "logprobs_mode",
        "top_k",
        "top_p",
        "seed",
        "temperature",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_p",
        "no_repeat_ngram_size",
        "logprobs",
        "ignore_eos",
    }
)

IRRELEVANT = frozenset(
    {"pad_id", "detokenize", "add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens"}
)
"""Fields about text or padding: token ids go in and come out, whatever they say."""

REFUSED = {
    "n": "the embedded engine answers once per request",
    "best_of": "the embedded engine answers once per request",
    **REFUSED_EVERYWHERE,
    "apply_batched_logits_processor": "the embedded engine has no batched logits processor",
    "lookahead_config": "the embedded engine does not look ahead",
}
"""Fields that are not served, with the reason; refused when they differ from their default."""


def admit(
    request_id: str,
    number: int,
    prompt: Sequence[int],
    params: SamplingParams,
    model: Model,
    context_length: int,
    *,
    choice: int = 0,
    allowed: AbstractSet[str] = frozenset(),
) -> Request:
    """Check a request and make the engine's own record of it.

    Args:
        request_id: The caller's id.
        number: The engine's own.
        prompt: Token ids.
        params: What is asked for.
        model: Which will answer.
        context_length: Longest prompt + answer, in tokens.
        choice: Which of several answers to one prompt this is.
        allowed: Fields of `REFUSED` that the caller takes care of itself.

    Raises:
        InvalidRequest: naming the first field that cannot be served, and why.
    """
    check_refused(params, REFUSED, allowed)
    tokens = _check_prompt(prompt, model.vocab_size, context_length)
    end_ids = end_ids_of(params, model)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    context = Context(Vocabulary(model.vocab_size), end_ids, seed, choice)
    bias = _bias(params.embedding_bias, model)
    dense: list[Processor] = [] if bias is None else [EmbeddingBias(bias)]
    try:
        chain = _chain(params, tokens)
        foreign = [
            ThirdPartyCallable(each, number) for each in params.logits_processors if not isinstance(each, ChainAdapter)
        ]
        sampled, chain = with_field_processors(params, chain, tokens, context, [*dense, *foreign])
    except ProcessorFailed as error:
        raise InvalidRequest("sampling_params.logits_processor", str(error)) from error
    if chain is not None:
        chain.receipt.numerics = model.numerics
    return Request(
        id=request_id,
        number=number,
        params=sampled,
        tokens=tokens,
        prompt_length=len(tokens),
        limit=context_length if params.max_tokens is None else min(len(tokens) + params.max_tokens, context_length),
        end_ids=end_ids,
        seed=seed,
        chain=chain,
        choice=choice,
    )


def _chain(params: SamplingParams, prompt: list[int]) -> ProcessorChain | None:
    """The chain among the logits processors, taken out of its callable, at the end of the
    prompt.
    """
    chains = [each.chain for each in params.logits_processors if isinstance(each, ChainAdapter)]
    if len(chains) > 1:
        raise InvalidRequest("sampling_params.logits_processor", "must hold at most one chain of processors")
    if chains and chains[0].tokens != prompt:
        chains[0].start(prompt)
    return chains[0] if chains else None


def _check_prompt(prompt: Sequence[int], vocab_size: int, context_length: int) -> list[int]:
    tokens = list(prompt)
    if not tokens:
        raise InvalidRequest("prompt_token_ids", "must hold at least one token")
    if len(tokens) >= context_length:
        raise InvalidRequest(
            "prompt_token_ids", f"must be shorter than the context of {context_length} tokens, got {len(tokens)}"
        )
    _check_ids("prompt_token_ids", tokens, vocab_size)
    return tokens


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            problem = f"must be token ids from 0 to {vocab_size - 1}, got {token!r} at index {position}"
            raise InvalidRequest(name, problem)


def end_ids_of(params: SamplingParams, model: Model) -> frozenset[int]:
    """The ids named by the request; without ``end_id`` the model's own, as in TensorRT-LLM,
    unless ``ignore_eos``.
    """
    _check_ids("sampling_params.stop_token_ids", params.stop_token_ids or (), model.vocab_size)
    if params.end_id is not None and params.end_id != -1:
        _check_ids("sampling_params.end_id", (params.end_id,), model.vocab_size)
    named = params.end_token_ids - {-1}
    if params.end_id is None and not params.ignore_eos:
        return named | frozenset(model.eos_token_ids)
    return named


def _bias(values: Any, model: Model) -> torch.Tensor | None:
    if values is None:
        return None
    field = "sampling_params.embedding_bias"
    try:
        bias = torch.as_tensor(values, dtype=torch.float32).to(model.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(field, f"must be numbers, got {type(values).__name__}") from error
    if bias.shape != (model.vocab_size,):
        raise InvalidRequest(field, f"must have shape ({model.vocab_size},), got {tuple(bias.shape)}")
    if bool(bias.isnan().any()) or bool(bias.isposinf().any()):
        raise InvalidRequest(field, "must be finite or -inf")
    return bias


def unclassified_fields() -> set[str]:
    """Fields of `SamplingParams` that no table of this file mentions; empty, or requests lose a
    control in silence.
    """
    return {one.name for one in fields(SamplingParams)} - HONOURED - IRRELEVANT - set(REFUSED)
