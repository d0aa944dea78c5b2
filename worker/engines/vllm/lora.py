"""LoRA adapters in peft's form, checked before vLLM loads them, and the arguments they need."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from adapters.strict_json import read_object
from worker.errors import ConfigurationError
from worker.models.problems import ModelFileError, shown
from worker.models.weight_files import StoredTensor, read_header

FLAG = "--lora-modules"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""

_PART = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>A|B)\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that requests may choose.

    Attributes:
        name: Name of it as a model.
        path: Directory.
        rank: Largest rank of its matrices.
        digest: Digest of its files, 128 bits as hexadecimal digits.
    """

    name: str
    path: Path
    rank: int
    digest: str


def read_adapters(modules: Sequence[tuple[str, str]], model_path: str) -> list[Adapter]:
    """The adapters of ``--lora-modules``, checked against the checkpoint that they change.

    vLLM copies matrices of another model's size where they fit, and says nothing.

    Raises:
        ConfigurationError: a directory is missing, is no LoRA adapter, or is one of another model.
    """
    if not modules:
        return []
    model = Path(model_path)
    if not model.is_dir():
        raise ConfigurationError(f"{FLAG}: needs a checkpoint directory as --model-path, got {model_path}")
    try:
        base = {
            name: tensor
            for path in sorted(model.glob("*.safetensors"))
            for name, tensor in read_header(path, path.name).items()
        }
    except ModelFileError as error:
        raise ConfigurationError(f"--model-path: {error}") from None
    found = []
    for name, directory in modules:
        try:
            found.append(_read(name, Path(directory), base))
        except ModelFileError as error:
            raise ConfigurationError(f"{FLAG}: {name}: {error}") from None
    return found


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


def _read(name: str, directory: Path, base: Mapping[str, StoredTensor]) -> Adapter:
    if not directory.is_dir():
        raise ModelFileError(f"must be the directory of an adapter, got {directory}")
    try:
        text = (directory / CONFIG).read_bytes()
        config = read_object(text)
    except OSError as error:
        raise ModelFileError(f"{CONFIG} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelFileError(f"{CONFIG}: {error}") from None
    if config.get("peft_type") != "LORA":
        raise ModelFileError(f"{CONFIG}: peft_type must be LORA, got {shown(config.get('peft_type'))}")
    if not (directory / WEIGHTS).is_file():
        raise ModelFileError(f"must have {WEIGHTS}")
    rank = max((_rank_of(key, one, base) for key, one in read_header(directory / WEIGHTS, WEIGHTS).items()), default=0)
    if not 1 <= rank <= RANKS[-1]:
        raise ModelFileError(f"its rank must be 1 to {RANKS[-1]}, got {rank}")
    digest = blake2b(text, digest_size=16)
    digest.update((directory / WEIGHTS).read_bytes())
    return Adapter(name, directory, rank, digest.hexdigest())


def _rank_of(key: str, tensor: StoredTensor, base: Mapping[str, StoredTensor]) -> int:
    """Rank of one matrix, A ``[r, in]`` or B ``[out, r]``; its layer must be the checkpoint's."""
    part = _PART.fullmatch(key)
    if part is None or len(tensor.shape) != 2:
        raise ModelFileError(f"{WEIGHTS}: {key} is no matrix of a LoRA adapter")
    layer, is_input = part["layer"], part["side"] == "A"
    weight = base.get(f"{layer}.weight")
    if weight is None and f"{layer}.qweight" not in base:
        raise ModelFileError(f"is an adapter of another model: {layer} is no layer of --model-path")
    rank, size = tensor.shape if is_input else tensor.shape[::-1]
    if weight is not None and size != weight.shape[1 if is_input else 0]:
        raise ModelFileError(f"is an adapter of another model: {key} does not fit {layer} {list(weight.shape)}")
    return rank
