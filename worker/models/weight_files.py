"""The safetensors files of a checkpoint: which ones there are, and what their headers say.

The headers are read here, strictly, before any library maps the files: a tensor that is there
twice, of a type that holds no weights, or of another shape than ``config.json`` asks for is refused
by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from adapters.strict_json import read_object
from worker.errors import one_line
from worker.models.geometry import Geometry, Tensor
from worker.models.problems import ModelFileError, shown
from worker.models.quantised import CODES, OFFSETS, SCALES
from worker.models.quantised_tensors import ThirdPartyWeight, find_tensors
from worker.models.quantization_config import Quantization
from worker.models.regular_files import open_regular

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
"""Bytes of an element, by safetensors' name of its type."""

_MOST_DIMENSIONS, _MOST_SIZE = 8, 2**48

_FLOATS = ("F32", "F16", "BF16", "F64")
"""Types of weights that are not quantised."""

_INTEGERS = tuple(name for name in _SIZES if name == "BOOL" or name[0] in "IU")

_CODES = ("I8", "U8")
"""Types of the codes of quantised ones, of 8 and of 4 bits."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file.

    Attributes:
        file: The file, as the checkpoint's directory has it.
        dtype: safetensors' name of its type.
        shape: Shape.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The safetensors files of a checkpoint.

    Args:
        directory: Directory of the checkpoint.
        is_quantised: Whether it is in the form of `worker.models.quantised`, of which all files in
            the directory are read; else those that transformers reads.
        quantization: Quantisation of a checkpoint that another program quantised; None for others.

    Raises:
        ModelFileError: one is missing or damaged, or two hold a tensor of the same name; or what
            another program quantised is not in its format.

    Attributes:
        directory: The same.
        files: Names of the files, from the directory.
        tensors: Tensors by name.
        third_party: Tensors of a checkpoint that another program quantised, sorted; or None.
    """

    def __init__(self, directory: Path, is_quantised: bool = False, quantization: Quantization | None = None) -> None:
        self.directory = directory
        self.files, placed = _files(directory, is_quantised)
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in read_header(directory / file, file).items():
                if name in self.tensors:
                    raise ModelFileError(f"{file}: tensor {name} is in {self.tensors[name].file}, too")
                self.tensors[name] = tensor
        for name, file in placed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ModelFileError(f"{INDEX}: weight_map says that tensor {name} is in {file}, which lacks it")
        self.third_party = None if quantization is None else find_tensors(self.tensors, quantization)

    @property
    def plain(self) -> Collection[str]:
        """Names of the tensors that are no part of what another program quantised."""
        return self.tensors if self.third_party is None else self.third_party.plain

    def check(self, geometry: Geometry) -> None:
        """Raises `ModelFileError` unless there is every weight of a model of this geometry, of its
        shape, and of a type that holds weights. Other tensors are not looked at.
        """
        for expected in self._expected(geometry):
            self._check(expected)

    def check_types(self) -> None:
        """Raises `ModelFileError` for a weight of a type that holds none, which transformers would
        take for the numbers that quantised ones stand for. Buffers, such as masks, may be integers.
        """
        for name in self.plain:
            found = self.tensors[name]
            if found.dtype not in _FLOATS and (found.dtype not in _INTEGERS or name.endswith((".weight", "_proj"))):
                raise self._no_floats(name, found)

    def _no_floats(self, name: str, found: StoredTensor) -> ModelFileError:
        return ModelFileError(
            f"{found.file}: tensor {name} must be of type {', '.join(_FLOATS)}, got {shown(found.dtype)}"
        )

    def names(self, geometry: Geometry) -> Iterator[str]:
        """The tensors of the files that hold the weights of a model, parts of quantised ones too.

        Only for what `check` accepts.
        """
        for expected in self._expected(geometry):
            name = self._stored(expected.name)
            quantised = (name + suffix for suffix in (CODES, SCALES, OFFSETS))
            yield from (each for each in (name, *quantised) if each in self.tensors and name not in self._packed)

    def holds(self, name: str) -> bool:
        """Whether a weight of that name is there, quantised or not."""
        return any(each in self.tensors for each in (name, name + CODES)) or name in self._packed

    @property
    def _packed(self) -> Mapping[str, ThirdPartyWeight]:
        return {} if self.third_party is None else self.third_party.weights

    def _expected(self, geometry: Geometry) -> Iterable[Tensor]:
        for tensor in geometry.tensors():
            fused = _fused_experts(tensor.name, geometry)
            if fused is None or self._stored(fused[0].name) not in self.tensors:
                yield tensor
            elif tensor.name.endswith("experts.0.gate_proj.weight"):
                yield from fused

    def _stored(self, name: str) -> str:
        """The name of a weight in these files: those of a model without a head lack ``model.``."""
        short = name.removeprefix("model.")
        if name in self.tensors or name in self._packed or short + CODES in self.tensors:
            return name
        return short if short in self.tensors or short in self._packed else name

    def _check(self, expected: Tensor) -> None:
        name = self._stored(expected.name)
        packed = self._packed.get(name)
        if packed is not None:
            if packed.shape != expected.shape:
                tensor = packed.parts["codes"]
                raise ModelFileError(
                    f"{self.tensors[tensor].file}: tensor {tensor} must hold a weight of shape {list(expected.shape)}, "
                    f"as config.json has it, got {shown(list(packed.shape))}"
                )
            return
        codes = self.tensors.get(name + CODES)
        found = self.tensors.get(name)
        if codes is not None and found is not None:
            raise ModelFileError(f"{found.file}: tensor {name} is there twice, quantised too")
        if codes is not None:
            if codes.dtype not in _CODES:
                raise ModelFileError(
                    f"{codes.file}: tensor {name}{CODES} must be of type {' or '.join(_CODES)}, got {codes.dtype}"
                )
            self._check_shape(name + CODES, codes, _codes_shape(expected.shape, codes.dtype))
            return
        if found is None:
            raise ModelFileError(
                f"{self.files[0] if len(self.files) == 1 else INDEX}: weights are incomplete, tensor {name} of shape "
                f"{list(expected.shape)} is missing"
            )
        self._check_shape(name, found, expected.shape)
        if found.dtype not in _FLOATS:
            raise self._no_floats(name, found)

    def _check_shape(self, name: str, found: StoredTensor, shape: tuple[int, ...]) -> None:
        if found.shape != shape:
            raise ModelFileError(
                f"{found.file}: tensor {name} must be of shape {list(shape)}, as config.json has it, got "
                f"{shown(list(found.shape))}"
            )


def _codes_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Shape of the codes of a quantised weight: two of 4 bits lie in a byte."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "U8" else shape


def _fused_experts(name: str, geometry: Geometry) -> tuple[Tensor, Tensor] | None:
    """The weights of all experts of a layer as one tensor each, in which a file may hold `name`."""
    layer, found, _ = name.partition("mlp.experts.")
    if not found:
        return None
    count, inner, hidden = geometry.num_experts, geometry.moe_intermediate_size, geometry.hidden_size
    return (
        Tensor(f"{layer}{found}gate_up_proj", (count, 2 * inner, hidden)),
        Tensor(f"{layer}{found}down_proj", (count, hidden, inner)),
    )


def _files(directory: Path, is_quantised: bool) -> tuple[list[str], dict[str, str]]:
    """The files that hold the weights, as transformers chooses them, and the index's map."""
    if is_quantised and (found := sorted(path.name for path in directory.glob("*.safetensors"))):
        return found, {}
    if (directory / SINGLE).is_file():
        return [SINGLE], {}
    if not (directory / INDEX).is_file():
        raise ModelFileError(f"it has no safetensors weights: neither {SINGLE} nor {INDEX}")
    placed = read_index(directory)
    missing = next((file for file in placed.values() if not (directory / file).is_file()), None)
    if missing is not None:
        raise ModelFileError(f"{INDEX}: weight_map names {shown(missing)}, which is not there")
    return sorted(set(placed.values())), placed


def read_index(directory: Path) -> dict[str, str]:
    """``weight_map`` of the index: the file of each tensor.

    Raises:
        ModelFileError: it cannot be read.
    """
    try:
        index = read_object((directory / INDEX).read_bytes())
    except OSError as error:
        raise ModelFileError(f"{INDEX}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelFileError(f"{INDEX}: {one_line(error)}") from None
    if not isinstance(index.get("metadata"), dict):
        raise ModelFileError(f"{INDEX}: metadata must be an object, got {shown(index.get('metadata'))}")
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) and file for file in found.values()):
        raise ModelFileError(f"{INDEX}: weight_map must be an object with a file for each tensor, got {shown(found)}")
    return found


def read_header(path: Path, name: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file.

    Args:
        path: Path of the file.
        name: Name of the file, for errors.

    Raises:
        ModelFileError: it is damaged or cut off.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return {each: tensor for each, (tensor, _) in header_of(file, size, name).items()}
    except OSError as error:
        raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from None


def header_of(file: BinaryIO, size: int, name: str) -> dict[str, tuple[StoredTensor, tuple[int, int]]]:
    """The tensors of safetensors, and where the bytes of each begin and end.

    Args:
        file: Bytes from the first one on; the header is read.
        size: Bytes that there are.
        name: Name of the file, for errors.

    Raises:
        ModelFileError: it is damaged or cut off.
    """
    return header_and_metadata(file, size, name)[0]


def header_and_metadata(
    file: BinaryIO, size: int, name: str
) -> tuple[dict[str, tuple[StoredTensor, tuple[int, int]]], Any]:
    """`header_of` and the metadata, None if there are none. Raises as it does."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelFileError(f"{name}: is cut off or no safetensors file: a header of {length} bytes")
        header = read_object(file.read(length))
    except ValueError as error:
        raise ModelFileError(f"{name}: its header {one_line(error)}") from None
    metadata = header.pop("__metadata__", None)
    begins = 8 + length
    found = {each: _entry(name, each, entry, size - begins) for each, entry in header.items()}
    _check_order(name, sorted(part for _, part in found.values()), size - begins)
    tensors = {each: (tensor, (begins + start, begins + stop)) for each, (tensor, (start, stop)) in found.items()}
    return tensors, metadata


def _entry(file: str, name: str, entry: Any, size: int) -> tuple[StoredTensor, tuple[int, int]]:
    """A tensor and where its values are."""
    found: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: object = found.get("dtype")
    shape: object = found.get("shape")
    part: object = found.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ModelFileError(f"{file}: tensor {name}: dtype must be a type of safetensors, got {shown(dtype)}")
    if not _are_sizes(shape):
        raise ModelFileError(f"{file}: tensor {name}: shape must be a list of sizes, got {shown(shape)}")
    if not _are_sizes(part) or len(part) != 2:
        raise ModelFileError(f"{file}: tensor {name}: data_offsets must be two positions, got {shown(part)}")
    start, stop = part
    if stop > size:
        raise ModelFileError(f"{file}: is cut off: tensor {name} lies beyond its end")
    if stop - start != math.prod(shape) * _SIZES[dtype]:
        raise ModelFileError(
            f"{file}: tensor {name}: data_offsets must span the bytes of {dtype} {shown(shape)}, got {shown(part)}"
        )
    return StoredTensor(file, dtype, tuple(shape)), (start, stop)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(each) is int and 0 <= each < _MOST_SIZE for each in value)


def _check_order(file: str, parts: list[tuple[int, int]], size: int) -> None:
    """Raises `ModelFileError` unless the tensors fill the file one after the other."""
    at = 0
    for start, stop in parts:
        if start != at:
            raise ModelFileError(f"{file}: its tensors overlap, or leave bytes out, at position {min(at, start)}")
        at = stop
    if at != size:
        raise ModelFileError(f"{file}: holds {size - at} bytes behind its last tensor")
