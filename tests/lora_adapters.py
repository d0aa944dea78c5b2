"""Random LoRA adapters in peft's form, and the checkpoints that they make of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ALPHA = 16
RANK = 8
TARGETS = ("q_proj", "v_proj")


def write_adapter(directory: Path, model: Path, *, seed: int = 0, rank: int = RANK) -> Path:
    """An adapter of the attention's queries and values that changes what the model says."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in _targets(model).items():
        prefix = "base_model.model." + name.removesuffix(".weight")
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
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
        "target_modules": list(TARGETS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(known), encoding="utf-8")
    return directory


def merged(directory: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter's weights added to its own, in float32."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in _targets(model):
        prefix = "base_model.model." + name.removesuffix(".weight")
        a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
        weights[name] = weights[name].float() + ALPHA / a.shape[0] * (b @ a)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _targets(model: Path) -> dict[str, tuple[int, ...]]:
    weights = load_file(model / "model.safetensors")
    return {name: tuple(weight.shape) for name, weight in weights.items() if any(each in name for each in TARGETS)}
