"""Writes a quantised checkpoint, in the form of `worker.models.quantised`."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from worker.engines.embedded.config import resolve_dtype
from worker.engines.embedded.model.checkpoint_files import checkpoint_dtype, read_settings
from worker.engines.embedded.model.checkpoint_gate import read_checked
from worker.engines.embedded.model.quantisation import quantise
from worker.errors import StartupError
from worker.models.chat_template import TEMPLATES
from worker.models.config_json import read_config
from worker.models.model_table import LLAMA_LIKE
from worker.models.problems import ModelFileError
from worker.models.quantised import CODES, OFFSETS, SCALES, quantization_config
from worker.models.weight_files import WeightFiles

_LAYERS = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PREFIXES = ("model.", "lm_head.")


def write_quantised(source: Path, to: str, directory: Path) -> None:
    """Write the checkpoint `source`, its linear layers quantised, into `directory`, a new one.

    The LM head has 8 bits in any case; so does the embedding if it is tied to it. The directory is
    there once it is complete.

    Raises:
        StartupError: `source` is of an architecture that is not served in this form, would be
            refused by the worker, or is quantised already; or `directory` is there.
        OSError: a file cannot be read or written.
        ValueError: a file has been damaged meanwhile.
    """
    try:
        config = read_config(source) or {}
        files = _checked(source, config, to)
    except ModelFileError as error:
        raise StartupError(f"{source}: {error}") from None
    check_is_new(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=directory.parent) as work:
        written = Path(work) / directory.name
        written.mkdir()
        _write(files, to, written, config)
        written.rename(directory)


def check_is_new(directory: Path) -> None:
    """Raises `StartupError` if the directory to write is there."""
    if directory.exists():
        raise StartupError(f"--output {directory}: it is there already")


def _checked(source: Path, config: dict[str, Any], to: str) -> WeightFiles:
    """The files of weights of a checkpoint that can be written, and has passed the gate of those
    that are served.
    """
    if config.get("model_type") not in LLAMA_LIKE:
        raise StartupError(
            f"{source}: only models of type {', '.join(LLAMA_LIKE)} can be written, not {config.get('model_type')!r}; "
            f"--quantization {to} serves it"
        )
    if config.get("quantization_config"):
        raise StartupError(f"{source}: it is quantised already")
    try:
        settings = read_settings(source)
        read_checked(source, settings, resolve_dtype("auto", checkpoint_dtype(settings)))
    except StartupError as error:
        raise StartupError(str(error).removeprefix("--model-path ")) from None
    return WeightFiles(source)


def _write(files: WeightFiles, to: str, directory: Path, config: dict[str, Any]) -> None:
    heads = {_EMBEDDING, _HEAD} if config.get("tie_word_embeddings") else {_HEAD}
    for file in files.files:
        target = directory / file.replace("/", "-")
        quantised = _quantised(_tensors(files.directory / file), to, heads)
        try:
            save_file(quantised, target, {"format": "pt"})
        except SafetensorError as error:  # of the system's, too
            raise OSError(f"{target.name}: {error}") from None
    for path in sorted(files.directory.iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(path, directory / path.name)
    if (templates := files.directory / TEMPLATES).is_dir():
        shutil.copytree(templates, directory / TEMPLATES)
    config["quantization_config"] = quantization_config(to)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None


def _quantised(tensors: dict[str, torch.Tensor], to: str, heads: set[str]) -> dict[str, torch.Tensor]:
    written: dict[str, Any] = {}
    for stored, tensor in tensors.items():
        name = stored if stored.startswith(_PREFIXES) else f"model.{stored}"  # one of a model without a head
        if name not in heads and not _LAYERS.fullmatch(name):
            written[name] = tensor
            continue
        try:
            weight = quantise(tensor, "int8" if name in heads else to)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        parts = ((CODES, weight.codes), (SCALES, weight.scales), (OFFSETS, weight.offsets))
        written |= {name + suffix: part.contiguous() for suffix, part in parts if part is not None}
    return written
