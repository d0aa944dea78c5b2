"""vLLM's arguments for LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.engines.lora_adapters import Adapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""


def arguments_for(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """vLLM's arguments for adapters, where the operator gives none."""
    if not adapters:
        return {}
    rank = max(adapter.rank for adapter in adapters)
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": next(size for size in RANKS if size >= rank),
    }
