"""Writes a quantised checkpoint, in the form of `worker.models.quantised`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from worker.engines.embedded.model.quantisation import quantise
from worker.errors import StartupError
from worker.models.quantised import CODES, MODEL_TYPES, OFFSETS, SCALES, quantization_config

_LAYERS = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_quantised(source: Path, to: str, directory: Path) -> None:
    """Write the checkpoint `source`, its linear layers quantised, into `directory`, a new one.

    The LM head has 8 bits in any case; so does the embedding if it is tied to it.

    Raises:
        StartupError: `source` is of an architecture that is not served in this form, or is
            quantised already; or `directory` is there.
        OSError: a file cannot be read or written.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") not in MODEL_TYPES:
        raise StartupError(
            f"{source}: only models of type {', '.join(MODEL_TYPES)} can be written, not {config.get('model_type')!r}; "
            f"--quantization {to} serves it"
        )
    if config.get("quantization_config"):
        raise StartupError(f"{source}: it is quantised already")
    if directory.exists():
        raise StartupError(f"--output {directory}: it is there already")
    directory.mkdir(parents=True)
    heads = {_EMBEDDING, _HEAD} if config.get("tie_word_embeddings") else {_HEAD}
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            save_file(_quantised(load_file(path), to, heads), directory / path.name, {"format": "pt"})
        elif path.is_file() and not path.name.endswith(".safetensors.index.json"):
            shutil.copyfile(path, directory / path.name)
    config["quantization_config"] = quantization_config(to)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _quantised(tensors: dict[str, torch.Tensor], to: str, heads: set[str]) -> dict[str, torch.Tensor]:
    written: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in heads and not _LAYERS.fullmatch(name):
            written[name] = tensor
            continue
        weight = quantise(tensor, "int8" if name in heads else to)
        parts = ((CODES, weight.codes), (SCALES, weight.scales), (OFFSETS, weight.offsets))
        written |= {name + suffix: part.contiguous() for suffix, part in parts if part is not None}
    return written
