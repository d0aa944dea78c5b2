"""Calls logits processors under TensorRT-LLM's contract, one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.engines.embedded.plan import Request


def run_processors(logits: torch.Tensor, request: Request) -> str | None:
    """Let the request's processors edit its row in place, in order; once per sampled token.

    Each is called as ``processor(req_id, logits[1, 1, V], [token_ids], None, None)`` with float32 logits and the
    prompt and generated ids. One that carries an attribute ``failure`` reports through it: any text there after the
    call ends the request.

    Args:
        logits: float32 ``[V]``, contiguous.
        request: Whose row it is.

    Returns:
        Why the request has to end, naming the processor, or None.
    """
    row = logits.view(1, 1, -1)
    for processor in request.processors:
        try:
            processor(request.number, row, [request.tokens.copy()], None, None)
        except Exception as error:  # foreign code; its request alone must end
            return f"logits processor {processor_name(processor)} raised {type(error).__name__}: {error}"
        failure = getattr(processor, "failure", None)
        if failure is not None:
            return str(failure)
    return None


def processor_name(processor: Callable[..., None]) -> str:
    """The processor's own name, for a function, or its class's."""
    return getattr(processor, "__qualname__", None) or type(processor).__qualname__
