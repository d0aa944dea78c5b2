"""LoRA adapters in vLLM: its arguments for them, and their loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from worker.engines.lora_adapters import Adapter
from worker.engines.vllm.package import Package
from worker.errors import StartupError, one_line

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""


def arguments_for(adapters: Sequence[Adapter], *, is_cpu: bool = False) -> dict[str, Any]:
    """vLLM's arguments for adapters, where the operator gives none.

    Args:
        adapters: The adapters.
        is_cpu: Whether vLLM computes on a CPU: one place more than adapters stays empty.
    """
    if not adapters:
        return {}
    rank = max(adapter.rank for adapter in adapters)
    return {
        "enable_lora": True,
        "max_loras": len(adapters) + int(is_cpu),
        "max_lora_rank": next(size for size in RANKS if size >= rank),
    }


def check_empty_place(arguments: Mapping[str, Any], adapters: Sequence[Adapter]) -> None:
    """Check that the last place for adapters stays empty, for vLLM on a CPU.

    Its kernels there take the place -1 of a request without an adapter for the last one, and add
    what is in it, wherever an adapter's request is in the same batch.

    Raises:
        StartupError: an adapter may come there.
    """
    given, least = arguments.get("max_loras"), len(adapters) + 1
    if adapters and isinstance(given, int) and given < least:
        problem = "vLLM's CPU kernels give requests without an adapter what is in the last place, which must be empty"
        raise StartupError(f"max_loras: must be at least {least} for {len(adapters)} adapters, got {given}: {problem}")


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
