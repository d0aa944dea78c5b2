"""Processors that no request can name: dense biases and third-party callables in a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adapters.chain import ProcessorFailed
from adapters.contract import (
    ALWAYS,
    Ban,
    Edit,
    Processor,
    ProcessorArgs,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    check_in_place,
)
from adapters.third_party import ThirdPartyShaping
from adapters.trtllm.adapter import Failure


class EmbeddingBias(ShapingProcessor):
    """Adds TensorRT-LLM's ``embedding_bias``, a dense bias over the whole vocabulary.

    Args:
        bias: float32 ``[V]``, finite or -inf.
    """

    name = "embedding_bias"
    stage = Stage.BIAS
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    @classmethod
    def members(cls, bias: torch.Tensor) -> list[Processor]:
        """The bias and, where it is -inf, a mask: another processor must not force such a token."""
        ruled_out = (bias == -torch.inf).nonzero()[:, 0].tolist()
        return [cls(bias), EmbeddingMask(ruled_out)] if ruled_out else [cls(bias)]

    def shape(self, logits: torch.Tensor) -> None:
        if self._bias.device != logits.device:
            self._bias = self._bias.to(logits.device)  # known from the first row on, in the engine's process
        logits.add_(self._bias)


class EmbeddingMask(SteeringProcessor):
    """Masks the tokens whose entry of ``embedding_bias`` is -inf."""

    name = EmbeddingBias.name
    stage = Stage.MASK
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ban = Ban.of(token_ids)

    def edit(self) -> Edit | None:
        return self._ban

    def same_until(self) -> int:
        return ALWAYS


class ThirdPartyCallable(ThirdPartyShaping):
    """A TensorRT-LLM callable: ``(req_id, [1, 1, V], [ids], None, None)``, in place.

    It is called once per sampled token, and reports failures through an attribute ``failure``, if
    it has one. The list of ids is a new one at each call, as from TensorRT-LLM.

    Args:
        processor: The callable.
        request_number: The id it is called with.
    """

    name = "callable"
    stage = Stage.SOFT

    def __init__(self, processor: Callable[..., None], request_number: int) -> None:
        self.name = _name_of(processor)  # type: ignore[misc]  # each instance is named after its own callable
        self._processor = processor
        self._request_number = request_number

    def shape(self, logits: torch.Tensor) -> None:
        shown = logits.view(1, 1, -1)
        result: object = self._processor(self._request_number, shown, [self.shown_ids()], None, None)
        check_in_place(result, shown, logits)
        failure = getattr(self._processor, "failure", None)
        if isinstance(failure, Failure):
            raise ProcessorFailed(failure.processor, failure.reason, failure.message)
        if failure is not None:
            raise ProcessorFailed(self.name, "raised", str(failure))


def _name_of(processor: Callable[..., None]) -> str:
    named = getattr(processor, "name", None) or getattr(processor, "__qualname__", None)
    return str(named or type(processor).__qualname__)
