"""What both engines put into a request's chain: its callables and its dense bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adapters.chain import ProcessorChain
from adapters.contract import Processor
from adapters.trtllm import ChainAdapter
from adapters.trtllm.native_controls import EmbeddingBias, ThirdPartyCallable
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams


def chain_of(params: SamplingParams, prompt: list[int], generated: Sequence[int] = ()) -> ProcessorChain | None:
    """The chain among the logits processors, out of its callable, begun after the prompt.

    If it has been given all of ``generated`` already, it stays so.
    """
    chains = [each.chain for each in params.logits_processors if isinstance(each, ChainAdapter)]
    if len(chains) > 1:
        raise InvalidRequest("sampling_params.logits_processor", "must hold at most one chain of processors")
    if chains and chains[0].tokens not in (prompt, [*prompt, *generated]):
        chains[0].start(prompt)
    return chains[0] if chains else None


def other_members(
    params: SamplingParams, number: int, vocab_size: int, device: torch.device | None = None
) -> list[Processor]:
    """The dense bias and the third-party callables, which are called with the id ``number``.

    Raises:
        InvalidRequest: the bias is none.
    """
    bias = dense_bias(params, vocab_size, device)
    dense: list[Processor] = [] if bias is None else [EmbeddingBias(bias)]
    callables = [each for each in params.logits_processors if not isinstance(each, ChainAdapter)]
    return [*dense, *(ThirdPartyCallable(each, number) for each in callables)]


def dense_bias(params: SamplingParams, vocab_size: int, device: torch.device | None = None) -> torch.Tensor | None:
    """``embedding_bias``, float32 ``[vocab_size]``, or None.

    Raises:
        InvalidRequest: it is no bias of that width, or not finite or -inf.
    """
    values: Any = params.embedding_bias
    if values is None:
        return None
    field = "sampling_params.embedding_bias"
    try:
        bias = torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(field, f"must be numbers, got {type(values).__name__}") from error
    if bias.shape != (vocab_size,):
        raise InvalidRequest(field, f"must have shape ({vocab_size},), got {tuple(bias.shape)}")
    if bool(bias.isnan().any()) or bool(bias.isposinf().any()):
        raise InvalidRequest(field, "must be finite or -inf")
    return bias if device is None else bias.to(device)
