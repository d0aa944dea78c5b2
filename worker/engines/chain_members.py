"""Chains as engines take them: what they add to a request's own, and what a library refuses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.contract import Context, Processor
from adapters.processors.seeded_sampler import SeededSampler
from adapters.trtllm.native_controls import EmbeddingBias, ThirdPartyCallable
from worker.engines.request import EngineRequest
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import empty_chain, with_field_processors


def begin(chain: ProcessorChain, request: EngineRequest) -> None:
    """Start a chain after the prompt, unless it stands there or after the answer so far."""
    prompt = list(request.prompt_token_ids)
    if chain.tokens not in (prompt, request.token_ids):
        chain.start(prompt)


def refuse_embedded_only(chain: ProcessorChain, library: str) -> None:
    """Raises `InvalidRequest` for a chain that the embedded engine alone can serve."""
    problem = None
    if chain.backtracks:
        names = ", ".join(member.name for member in chain.members if member.record.rollbacks is not None)
        problem = f"holds {names}, which takes tokens back, and {library} cannot"
    elif chain.companion is not None:
        problem = f"holds {chain.companion.name}, which needs a second row of logits, and {library} computes one"
    if problem is not None:
        raise InvalidRequest("sampling_params.logits_processor", f"{problem}; use the embedded engine")


def resume(chain: ProcessorChain, request: EngineRequest, library: str) -> None:
    """Replay the answer so far of a migrated request, of which the library computes no logits.

    Raises:
        InvalidRequest: a processor's state is made of logits.
        ProcessorFailed: a processor raised on the history.
    """
    if chain.observes_logits:
        names = ", ".join(member.name for member in chain.members if member.processor.observes_logits)
        problem = f"{names} cannot go on after a migration: {library} shows no logits to replay on"
        raise InvalidRequest("sampling_params.logits_processor", problem)
    if chain.receipt.mode != "migrated" or chain.tokens != request.token_ids:
        chain.start(request.prompt_token_ids, request.generated_token_ids, mode="migrated")


def library_chain(
    request: EngineRequest,
    params: SamplingParams,
    context: Context,
    number: int,
    library: str,
    *,
    by_sampler: Collection[str],
    late: bool,
    sampler: SeededSampler | None,
) -> tuple[SamplingParams, ProcessorChain | None]:
    """The parameters that are left to a ``library``, and the chain with everything else, which
    stands behind the answer so far; ``sampler``, if any, is its last member and takes the token.

    See `other_members` for ``number``, `with_field_processors` for ``by_sampler`` and ``late``.

    Raises:
        InvalidRequest: a processor, or a field that runs as one, cannot be served.
    """
    prompt = list(request.prompt_token_ids)
    try:
        extra = other_members(params, number, context.vocabulary.size)
        params, chain = with_field_processors(
            params, request.chain, prompt, context, extra, by_sampler=by_sampler, late=late
        )
        if sampler is not None:
            chain = chain or empty_chain(context, prompt)
            chain.add([sampler], last=True)
        if chain is not None and request.generated_token_ids:
            resume(chain, request, library)
    except ProcessorFailed as error:
        raise InvalidRequest("sampling_params.logits_processor", str(error)) from error
    return params, chain


def other_members(params: SamplingParams, number: int, vocab_size: int) -> list[Processor]:
    """The dense bias and the third-party callables, which are called with the id ``number``.

    Raises:
        InvalidRequest: the bias is none.
    """
    bias = dense_bias(params, vocab_size)
    dense = [] if bias is None else EmbeddingBias.members(bias)
    return [*dense, *(ThirdPartyCallable(each, number) for each in params.logits_processors)]


def dense_bias(params: SamplingParams, vocab_size: int) -> torch.Tensor | None:
    """``embedding_bias``, float32 ``[vocab_size]`` on the CPU, or None.

    Raises:
        InvalidRequest: it is no bias of that width, or not finite or -inf.
    """
    values: Any = params.embedding_bias
    if values is None:
        return None
    field = "sampling_params.embedding_bias"
    try:
        bias = torch.as_tensor(values, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(field, f"must be numbers, got {type(values).__name__}") from error
    if bias.shape != (vocab_size,):
        raise InvalidRequest(field, f"must have shape ({vocab_size},), got {tuple(bias.shape)}")
    if bool(bias.isnan().any()) or bool(bias.isposinf().any()):
        raise InvalidRequest(field, "must be finite or -inf")
    return bias
