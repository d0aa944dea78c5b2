"""A GGUF file: its metadata, and its tensors as float32.

The format is llama.cpp's, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is
read here, bounds checked, which takes a fraction of a second; gguf-py takes many for a large
vocabulary. Blocks of weights are dequantised by gguf-py.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_DEPTH = 4
"""Of arrays in arrays; the format sets no limit."""

CHUNK_VALUES = 16 * 2**20
"""Values that are dequantised at a time."""

_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(Exception):
    """The file cannot be read or is not supported; the message is one line, without the path."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor is.

    Attributes:
        name: As in the file.
        shape: Rows first, as in torch.
        kind: How its values are stored.
        start: First byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, a run of values along the last dimension."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """An open GGUF file.

    Args:
        path: The file.

    Raises:
        GgufError: it is no GGUF file, is cut off, or holds a type of tensor that cannot be read.
        OSError: it cannot be opened.

    Attributes:
        metadata: Scalars, strings and lists by key.
        tensors: By name.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise GgufError("not a GGUF file: it does not begin with GGUF")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, self.tensors = _Header(self._data).read()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise GgufError(f"its header is damaged or cut off ({error})") from None
        for tensor in self.tensors.values():
            if tensor.start + tensor.num_rows * tensor.row_bytes > len(self._data):
                raise GgufError(f"it is cut off: tensor {tensor.name} lies beyond its end")

    def rows(self, tensor: GgufTensor, rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.float32]]:
        """The numbered rows of a tensor in that order, ``[n, shape[-1]]`` at a time."""
        return (dequantize(packed, tensor.kind) for packed in self.packed_rows(tensor, rows))

    def packed_rows(self, tensor: GgufTensor, rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.uint8]]:
        """`rows` in the file's own blocks, bytes ``[n, row_bytes]`` at a time."""
        size = tensor.num_rows * tensor.row_bytes
        packed = np.frombuffer(self._data, np.uint8, size, tensor.start).reshape(tensor.num_rows, tensor.row_bytes)
        step = max(1, CHUNK_VALUES // tensor.shape[-1])
        for first in range(0, len(rows), step):
            yield packed[rows[first : first + step]]

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor, for small ones."""
        tensor = self.tensors[name]
        return np.concatenate(list(self.rows(tensor, np.arange(tensor.num_rows)))).reshape(tensor.shape)


class _Header:
    """Reads from the beginning of the file on. Raises `struct.error` where it ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self._number("I")
        if version not in VERSIONS:
            raise GgufError(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"general.alignment must be a positive integer, got {alignment!r}")
        base = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found:
            tensors[name] = GgufTensor(name, shape, _readable(name, shape, kind), base + offset)
        return metadata, tensors

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        if length > len(self._data) - self._at:
            raise struct.error("a text that is longer than the file")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth == MAX_DEPTH:
            raise GgufError(f"its metadata holds a value of unknown type {kind}")
        of, count = self._number("I"), self._number("Q")
        if of in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[of]}", self._data, self._at)
            self._at += struct.calcsize(f"<{count}{_SCALARS[of]}")
            return list(values)
        return [self._value(of, depth + 1) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        return name, shape, self._number("I"), self._number("Q")


def _readable(name: str, shape: tuple[int, ...], number: int) -> GGMLQuantizationType:
    """The type of a tensor. Raises `GgufError` if gguf-py cannot dequantise it."""
    try:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, size), np.uint8), kind)
    except ValueError:
        raise GgufError(f"tensor {name} is of unknown type {number}") from None
    except (KeyError, NotImplementedError):
        raise GgufError(f"tensor {name} is of type {kind.name}, which cannot be read") from None
    if min(shape) < 1 or shape[-1] % block:
        raise GgufError(f"tensor {name} of shape {list(shape)} does not hold whole blocks of type {kind.name}")
    return kind
