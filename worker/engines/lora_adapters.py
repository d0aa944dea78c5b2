"""LoRA adapters in peft's form, checked before an engine or its library loads them.

peft's names and formulas: https://huggingface.co/docs/peft/package_reference/lora.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

from adapters.strict_json import read_object
from worker.engines.lora_config import LoraConfig, read_config
from worker.errors import ConfigurationError, InvalidRequest
from worker.models.problems import ModelFileError, shown
from worker.models.regular_files import read_regular, unchanged
from worker.models.weight_files import StoredTensor, header_of, read_header

FLAG = "--lora-modules"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

MAX_RANK = 512
"""Largest rank that vLLM takes."""

_PART = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>A|B)\.weight")

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shapes ``[N, K]`` of a checkpoint's linear layers, by their names without ``.weight``; None where
the checkpoint packs the weight in a way of its own.
"""


class AdapterRefused(InvalidRequest):
    """An adapter cannot be loaded.

    Args:
        name: Name of it as a model.
        problem: Reason.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"LoRA adapter {name}", problem)


class UnknownAdapter(InvalidRequest):
    """There is no adapter of a name."""

    def __init__(self, name: str) -> None:
        super().__init__("lora_name", f"there is no LoRA adapter {shown(name)}")


@runtime_checkable
class LoadsAdapters(Protocol):
    """An engine that may load and unload adapters while it serves."""

    @property
    def serves_adapters(self) -> bool:
        """Whether its kernels compute any."""

    async def load_adapter(self, name: str, directory: Path) -> str:
        """Load an adapter, in place of one of this name; returns its digest.

        Requests that compute with another one of this name go on with it. `EngineInfo.adapters` has
        the adapter from now on.

        Raises:
            AdapterRefused: it cannot be read, or not be served.
            NotSupported: this engine serves none.
        """

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter; requests that compute with it go on. Raises `UnknownAdapter`."""


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


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of an adapter, in `AdapterFiles.content`.

    Attributes:
        stored: Type and shape: A ``[r, K]`` or B ``[N, r]``.
        start: First of its bytes.
        stop: Past the last of them.
    """

    stored: StoredTensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's files, read once: it is what the digest is of.

    Attributes:
        adapter: Description of it.
        config: Settings of the adapter.
        content: Bytes of its safetensors file.
        pairs: A and B of each layer that it changes, by the layer's name in the checkpoint.
    """

    adapter: Adapter
    config: LoraConfig
    content: memoryview = field(repr=False)
    pairs: Mapping[str, tuple[Matrix, Matrix]]

    def scale(self, layer: str) -> float:
        """Factor of ``B @ A`` of a layer: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA
        (Kalajdzievski, 2023).
        """
        return self.config.scale(layer)


def read_adapters(modules: Sequence[tuple[str, str]], model_path: str) -> list[Adapter]:
    """The adapters of ``--lora-modules``, checked against the checkpoint that they change.

    vLLM copies matrices of another model's size where they fit, and TensorRT-LLM skips layers that
    it does not know; neither says a word. Both scale all layers of an adapter alike.

    Raises:
        ConfigurationError: a directory is missing, is no LoRA adapter, or is one of another model.
    """
    if not modules:
        return []
    model = Path(model_path)
    if not model.is_dir():
        raise ConfigurationError(f"{FLAG}: needs a checkpoint directory as --model-path, got {model_path}")
    try:
        base = _shapes(model)
    except ModelFileError as error:
        raise ConfigurationError(f"--model-path: {error}") from None
    found = []
    for name, directory in modules:
        try:
            files = read_files(name, Path(directory), base)
            _check_alike(files)
        except ModelFileError as error:
            raise ConfigurationError(f"{FLAG}: {name}: {error}") from None
        found.append(files.adapter)
    return found


def _shapes(model: Path) -> Shapes:
    shapes: dict[str, tuple[int, ...] | None] = {}
    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in read_header(path, path.name).items():
            layer, _, part = name.rpartition(".")
            if part in ("qweight", "weight_packed") or (part == "weight" and tensor.dtype == "U8"):
                shapes[layer] = None  # of GPTQ and AWQ, of compressed-tensors, of NVFP4 and bitsandbytes
            elif part == "weight":
                shapes[layer] = tensor.shape
    return shapes


def read_files(name: str, directory: Path, base: Shapes, transposed: AbstractSet[str] = frozenset()) -> AdapterFiles:
    """The files of an adapter, checked against the linear layers of the model that it changes.

    Args:
        name: Name of it as a model.
        directory: Directory of ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: Linear layers of the model.
        transposed: Names of layers whose weights are stored as ``[K, N]``, as GPT-2's are.

    Raises:
        ModelFileError: a file is missing, damaged or no LoRA adapter's; or it is an adapter of
            another model; or it asks for what is not LoRA alone.
    """
    if not os.path.isdir(directory):  # pathlib raises where this user may not look
        raise ModelFileError(f"must be the directory of an adapter, got {directory}")
    if os.path.isfile(directory / CONFIG) and not os.path.isfile(directory / WEIGHTS):
        raise ModelFileError(f"must have {WEIGHTS}")
    text, content = _contents(directory, (CONFIG, WEIGHTS))
    try:
        config = read_config(read_object(text))
    except ValueError as error:
        raise ModelFileError(f"{CONFIG}: {error}") from None
    header = header_of(io.BytesIO(content), len(content), WEIGHTS)
    pairs = _pairs({key: Matrix(stored, *part) for key, (stored, part) in header.items()}, base)
    ranks = [pair[0].stored.shape[0] for pair in pairs.values()]
    rank = max(ranks, default=0)
    if not 1 <= min(ranks, default=0) <= rank <= MAX_RANK:
        raise ModelFileError(f"its rank must be 1 to {MAX_RANK}, got {rank}")
    for layer, found in zip(pairs, ranks, strict=True):
        if config.fan_in_fan_out != (layer in transposed):
            form, wanted = ("[in, out]", "true") if layer in transposed else ("[out, in]", "null or false")
            raise ModelFileError(f"{CONFIG}: fan_in_fan_out must be {wanted}: the weight of {layer} is {form}")
        if not config.targets(layer):
            raise ModelFileError(f"{CONFIG}: target_modules must have {layer}, whose matrices are in {WEIGHTS}")
        if config.rank(layer) != found:
            key = f"base_model.model.{layer}.lora_A.weight"
            raise ModelFileError(f"{CONFIG}: r must be the rank of {key}, {found}, got {config.rank(layer)}")
        if not math.isfinite(config.scale(layer)):
            raise ModelFileError(f"{CONFIG}: lora_alpha must be a finite number, got {config.alpha(layer)}")
    digest = blake2b(text, digest_size=16)
    digest.update(content)
    adapter = Adapter(name, directory, rank, digest.hexdigest(), frozenset(pairs))
    return AdapterFiles(adapter, config, memoryview(content), pairs)


def _contents(directory: Path, names: Sequence[str]) -> list[bytes]:
    """The files of an adapter, in one state of all. Raises `ModelFileError`."""
    paths = [directory / name for name in names]
    try:
        with unchanged(paths):
            return [read_regular(path) for path in paths]
    except OSError as error:
        file = Path(error.filename or directory).name  # a failed read names none
        raise ModelFileError(f"{file} cannot be read: {error.strerror or error}") from None


def _check_alike(files: AdapterFiles) -> None:
    for setting in ("rank_pattern", "alpha_pattern"):
        if getattr(files.config, setting):
            raise ModelFileError(f"{CONFIG}: {setting} must be empty: all layers are scaled alike")


def _pairs(matrices: Mapping[str, Matrix], base: Shapes) -> dict[str, tuple[Matrix, Matrix]]:
    sides: dict[str, dict[str, Matrix]] = {}
    for key, matrix in matrices.items():
        part = _PART.fullmatch(key)
        if part is None or len(matrix.stored.shape) != 2:
            raise ModelFileError(f"{WEIGHTS}: {key} is no matrix of a LoRA adapter")
        if matrix.stored.dtype not in ("F32", "F16", "BF16", "F64"):
            raise ModelFileError(f"{WEIGHTS}: {key} must be of F32, F16, BF16 or F64, got {matrix.stored.dtype}")
        layer, is_input = part["layer"], part["side"] == "A"
        if layer not in base:
            raise ModelFileError(f"is an adapter of another model: {layer} is no layer of --model-path")
        shape, wanted, side = matrix.stored.shape, base[layer], 1 if is_input else 0
        if wanted is not None and (len(wanted) != 2 or shape[side] != wanted[side]):
            raise ModelFileError(f"is an adapter of another model: {key} does not fit {layer} {list(wanted)}")
        sides.setdefault(layer, {})[part["side"]] = matrix
    pairs = {}
    for layer, found in sides.items():
        missing = next((side for side in "AB" if side not in found), None)
        if missing is not None:
            raise ModelFileError(f"{WEIGHTS}: base_model.model.{layer}.lora_{missing}.weight is missing")
        a, b = found["A"], found["B"]
        if a.stored.shape[0] != b.stored.shape[1]:
            ranks = f"{a.stored.shape[0]} and {b.stored.shape[1]}"
            raise ModelFileError(f"{WEIGHTS}: A and B of {layer} must have one rank, got {ranks}")
        pairs[layer] = a, b
    return pairs
