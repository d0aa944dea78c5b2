"""LoRA adapters of one `LLM`: the argument that makes room for them, and requests to them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from worker.engines.lora_adapters import FLAG, Adapter
from worker.engines.trtllm.capabilities import Package
from worker.errors import ConfigurationError, StartupError, one_line

MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
    "gate_up_proj": "mlp_gate_up",
}
"""TensorRT-LLM's names of layers, by their names in a checkpoint (its ``lora_helper.py``). Those of
experts are left out: they have matrices for each expert.
"""

_TOGETHER = frozenset({"attn_q", "attn_k", "attn_v"})
"""Layers of which TensorRT-LLM adapts all or none; it fills up what an adapter lacks."""


def target_modules(adapters: Sequence[Adapter]) -> list[str]:
    """TensorRT-LLM's names of all the layers that the adapters change.

    It skips what is not among its ``lora_target_modules`` with no more than a warning.

    Raises:
        ConfigurationError: an adapter changes a layer that has no such name.
    """
    found = set()
    for adapter in adapters:
        for layer in sorted(adapter.layers):
            name = MODULES.get(layer.rpartition(".")[2])
            if name is None or ".experts." in layer:
                problem = f"TensorRT-LLM adapts {', '.join(MODULES)} alone, and this adapter changes {layer}"
                raise ConfigurationError(f"{FLAG}: {adapter.name}: {problem}")
            found.add(name)
    return sorted(found | _TOGETHER if found & _TOGETHER else found)


def lora_argument(adapters: Sequence[Adapter], package: Package) -> dict[str, Any]:
    """The ``lora_config`` of ``LLM``, without which it ignores the adapters of requests.

    Raises:
        StartupError: this version has no adapters.
    """
    if not adapters:
        return {}
    if "lora_config" not in package.llm_fields or "lora_request" not in package.generate_arguments:
        raise StartupError(f"{FLAG}: TensorRT-LLM {package.version} has no LoRA adapters")
    values = {
        "lora_target_modules": target_modules(adapters),
        "max_lora_rank": max(adapter.rank for adapter in adapters),
        "max_loras": len(adapters),
        "max_cpu_loras": len(adapters),
    }
    return {"lora_config": _class("tensorrt_llm.lora_helper", "LoraConfig")(**values)}


def lora_requests(adapters: Sequence[Adapter]) -> Mapping[str, Any]:
    """A ``LoRARequest`` for each adapter, by name."""
    if not adapters:
        return {}
    request = _class("tensorrt_llm.executor.request", "LoRARequest")
    return {
        adapter.name: request(adapter.name, number, str(adapter.path)) for number, adapter in enumerate(adapters, 1)
    }


def _class(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise StartupError(f"{FLAG}: this version of TensorRT-LLM has no {module}.{name}: {one_line(error)}") from error
