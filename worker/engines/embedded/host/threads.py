"""How many threads of the CPU a step is worth."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

SMALL_CHECKPOINT = 32 * 2**20
"""Bytes of a checkpoint up to which one thread computes a step as fast as two do. Where the
frontend or a client needs the other processor, two take ten times as long: each operation then ends
when the scheduler lets the second one run."""


def limit_threads(model_path: str | Path, environ: Mapping[str, str] = os.environ) -> None:
    """Let torch compute with one thread if the checkpoint is small, unless ``OMP_NUM_THREADS`` says
    how many.

    It holds for this thread and for all that begin after it.
    """
    size = sum(path.stat().st_size for path in Path(model_path).glob("*.safetensors"))
    if size <= SMALL_CHECKPOINT and not environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)
