"""LoRA adapters in vLLM: its arguments, and requests for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.engines.lora_adapters import Adapter
from worker.engines.vllm.package import Package
from worker.errors import StartupError, one_line

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


async def load_adapters(llm: Any, package: Package, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """A ``LoRARequest`` for each adapter, by name, once vLLM has loaded it.

    Raises:
        StartupError: vLLM refuses one.
    """
    found = {}
    for number, adapter in enumerate(adapters, 1):
        found[adapter.name] = package.lora_request(
            lora_name=adapter.name, lora_int_id=number, lora_path=str(adapter.path)
        )
        try:
            await llm.add_lora(found[adapter.name])
        except Exception as error:  # the start-up boundary
            problem = f"vLLM {package.version}: {one_line(error)}"
            raise StartupError(f"--lora-modules: {adapter.name}: {problem}") from error
    return found
