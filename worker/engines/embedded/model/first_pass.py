"""A model's first forward pass, before the worker is registered."""

from __future__ import annotations

from pathlib import Path

import torch

from worker.engines.embedded.host import in_own_thread
from worker.engines.embedded.model.hf_model import HfModel
from worker.engines.embedded.plan import Chunk, Plan, Request
from worker.errors import StartupError
from worker.sampling import SamplingParams

_PROMPT_TOKENS = 4


def check_first_pass(model: HfModel, path: str | Path) -> None:
    """Compute a prompt of few tokens and one token behind it.

    Weights that are finite one by one may still overflow together, and what a kernel or a thread
    pool needs for its first call takes its time here, not in the first request.

    Args:
        model: Model with a KV store.
        path: Path of the checkpoint, for the error.

    Raises:
        StartupError: its logits are not finite numbers, or it cannot be computed.
    """
    try:
        rows = in_own_thread(lambda: _logits(model))
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:
        raise StartupError(f"--model-path {path}: its first forward pass failed: {error}") from error
    if not all(row.shape == (1, model.vocab_size) and row.isfinite().all() for row in rows):
        dtype = str(model.dtype).removeprefix("torch.")
        raise StartupError(
            f"--model-path {path}: its first forward pass in {dtype} gives logits that are infinite or not a number: "
            "its weights are damaged, or too large for this --dtype"
        )


def _logits(model: HfModel) -> list[torch.Tensor]:
    most = min(model.kv_store.keys[0].shape[2], model.context_length) - 1
    tokens = [number * model.vocab_size // _PROMPT_TOKENS for number in range(min(_PROMPT_TOKENS, most))]
    request = Request(
        *("first pass", 0, SamplingParams(), tokens, len(tokens), len(tokens) + 1, frozenset(), 0), pages=[0]
    )
    with model.spare_store():
        rows = [model.forward(Plan((), (Chunk(request, 0, len(tokens)),), (request,))).clone()]
        request.tokens.append(int(rows[0].argmax()))
        return [*rows, model.forward(Plan((request,), (), (request,)))]
