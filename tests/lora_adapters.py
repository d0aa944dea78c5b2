"""Random LoRA adapters in peft's form, and the checkpoints that they make of a model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

ALPHA = 16
RANK = 8
TARGETS = ("q_proj", "v_proj")
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = RANK,
    targets: Sequence[str] = TARGETS,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    layers: Mapping[str, tuple[int, ...]] | None = None,
    **config: Any,
) -> Path:
    """An adapter that changes what the model says, by default of queries and values.

    Args:
        directory: Directory to make.
        model: Checkpoint that it changes.
        seed: Seed of its matrices.
        rank: Rank where ``rank_pattern`` says nothing.
        targets: Linear layers that it changes.
        size: Standard deviation of the elements of B.
        dtype: Data type of the matrices.
        layers: Shapes ``[N, K]`` of the model's linear layers, if they are not those of the
            checkpoint's tensors; all of them are changed, and `targets` are for the settings.
        config: More settings of peft.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in (_targets(model, targets) if layers is None else layers).items():
        layer = name.removesuffix(".weight")
        own = _matching(config.get("rank_pattern", {}), layer, rank)
        a, b = torch.randn(own, columns, generator=generator), torch.randn(rows, own, generator=generator)
        tensors[f"base_model.model.{layer}.lora_A.weight"] = (a / columns**0.5).to(dtype)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = (b * size).to(dtype)
    directory.mkdir(parents=True)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    known = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(known), encoding="utf-8")
    return directory


def merged(directory: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter's weights added to its own, in float32."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in _targets(model, config["target_modules"]):
        layer = name.removesuffix(".weight")
        a, b = (tensors[f"base_model.model.{layer}.lora_{side}.weight"].double() for side in "AB")
        alpha = _matching(config.get("alpha_pattern", {}), layer, config["lora_alpha"])
        scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        weights[name] = (weights[name].double() + scale * (b @ a)).float()
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def linear_layers(module: Any, name: str = "") -> dict[str, tuple[int, int]]:
    """Shapes ``[N, K]`` of all linear layers in a module of transformers but those of routers, by
    their names after `name`.
    """
    found = {}
    if type(module).__name__.endswith(("Router", "Gate")):
        return {}
    for part, child in module.named_children():
        if isinstance(child, (torch.nn.Linear, Conv1D)):
            rows, columns = child.weight.shape[:: -1 if isinstance(child, Conv1D) else 1]
            found[name + part] = rows, columns
        else:
            found |= linear_layers(child, f"{name}{part}.")
    return found


@contextmanager
def merged_into(network: Any, adapter: Path) -> Iterator[None]:
    """transformers' network with the adapter's weights added to its own, in float32."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    kept = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            change = tensors[key.replace("lora_A", "lora_B")].double() @ a.double() * (config["lora_alpha"] / len(a))
            module = network.get_submodule(layer)
            module.weight.data += (change.T if isinstance(module, Conv1D) else change).float()
    try:
        yield
    finally:
        for name, weight in network.named_parameters():
            weight.data.copy_(kept[name])


def _matching(patterns: dict[str, Any], layer: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if re.search(rf"(^|\.)({pattern})$", layer)), default)


def _targets(model: Path, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    weights = load_file(model / "model.safetensors")
    return {
        name: tuple(weight.shape)
        for name, weight in weights.items()
        if name.endswith(".weight") and name.split(".")[-2] in targets
    }
