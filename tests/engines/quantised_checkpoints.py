"""Checkpoints in the form of `worker.models.quantised`, of any of its types."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from worker.engines.embedded.model.requantisation import requantised
from worker.models.quantised import CODES, OFFSETS, SCALES, quantization_config
from worker.models.weight_files import SINGLE

K_TYPES = {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "_proj": "Q4_K"}
"""Types of llama.cpp's mixture Q4_K_M, by a part of the name."""

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
"""Sizes of whole super-blocks."""


def stored_in(source: Path, directory: Path, types: Mapping[str, str]) -> Path:
    """The checkpoint `source` with matrices in the types of the first of `types` that they have."""
    shutil.copytree(source, directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / SINGLE).items():
        kind = next((kind for part, kind in types.items() if part in name and tensor.ndim == 2), "F32")
        if kind == "F32":
            tensors[name] = tensor
            continue
        found = requantised(tensor, kind)
        tensors |= {name + CODES: found.codes, name + SCALES: found.scales}
        tensors |= {} if found.offsets is None else {name + OFFSETS: found.offsets}
    save_file(tensors, directory / SINGLE)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization_config(", ".join(sorted(set(types.values()) - {"F32"})))
    (directory / "config.json").write_text(json.dumps(config))
    return directory
