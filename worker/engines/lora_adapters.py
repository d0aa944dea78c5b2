"""LoRA adapters in peft's form, checked before a library loads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from adapters.strict_json import read_object
from worker.errors import ConfigurationError
from worker.models.problems import ModelFileError, shown
from worker.models.weight_files import StoredTensor, read_header

FLAG = "--lora-modules"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

MAX_RANK = 512
"""Largest rank that vLLM takes."""

_PER_LAYER = ("rank_pattern", "alpha_pattern")
"""Settings of peft with which layers differ in their scale; vLLM and TensorRT-LLM ignore them."""

_PART = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>A|B)\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that requests may choose.

    Attributes:
        name: Name of it as a model.
        path: Directory.
        rank: Largest rank of its matrices.
        digest: Digest of its files, 128 bits as hexadecimal digits.
        layers: Names of the checkpoint's layers that it changes.
    """

    name: str
    path: Path
    rank: int
    digest: str
    layers: frozenset[str] = frozenset()


def read_adapters(modules: Sequence[tuple[str, str]], model_path: str) -> list[Adapter]:
    """The adapters of ``--lora-modules``, checked against the checkpoint that they change.

    vLLM copies matrices of another model's size where they fit, and TensorRT-LLM skips layers that
    it does not know; neither says a word.

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
    for setting in _PER_LAYER:
        if config.get(setting):
            raise ModelFileError(f"{CONFIG}: {setting} must be empty: all layers are scaled alike")
    if not (directory / WEIGHTS).is_file():
        raise ModelFileError(f"must have {WEIGHTS}")
    ranks = {key: _rank_of(key, one, base) for key, one in read_header(directory / WEIGHTS, WEIGHTS).items()}
    rank = max(ranks.values(), default=0)
    if not 1 <= rank <= MAX_RANK:
        raise ModelFileError(f"its rank must be 1 to {MAX_RANK}, got {rank}")
    unlike = next((key for key, found in ranks.items() if found != config.get("r")), None)
    if unlike is not None:
        raise ModelFileError(f"{CONFIG}: r must be the rank of {unlike}, {ranks[unlike]}, got {shown(config.get('r'))}")
    digest = blake2b(text, digest_size=16)
    digest.update((directory / WEIGHTS).read_bytes())
    layers = frozenset(part["layer"] for part in map(_PART.fullmatch, ranks) if part is not None)
    return Adapter(name, directory, rank, digest.hexdigest(), layers)


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
