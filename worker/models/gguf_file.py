"""A GGUF file: its metadata, and its tensors as float32.

The format is llama.cpp's, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is
read here, bounds checked, which takes a fraction of a second; gguf-py takes many for a large
vocabulary. Blocks of weights are dequantised by gguf-py.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from worker.models.problems import ModelFileError, shown
from worker.models.regular_files import open_regular

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_DEPTH = 4
"""Depth of arrays in arrays; the format sets no limit."""

MAX_ITEMS = 2**24
"""Items of a list of the metadata at most. The largest vocabularies have 2**18 tokens, and 2**19
merges.
"""

MAX_ENTRIES = 2**20
"""Keys, and tensors, of a file."""

CHUNK_VALUES = 16 * 2**20
"""Values that are dequantised at a time."""

_DEFAULT_ALIGNMENT = 32
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ModelFileError):
    """The file cannot be read or is not supported; the message is one line, without the path."""


class Metadata(dict[str, Any]):
    """Scalars, strings and lists by key, read with the type that is expected.

    Every method raises `GgufError`, which names the key, for a value of another type or range; and
    for a key that is missing, unless there is a default.
    """

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._of(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def one_of(self, key: str, known: Collection[str], default: str | None = None) -> str:
        """A string of `known`."""
        value = self.text(key, default)
        if value not in known:
            raise GgufError(f"{key} {shown(value)} is not supported, only {', '.join(known)}")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**63) -> int:
        """An integer from `least` to `most`."""
        value = self._of(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, f"an integer of at least {least}" + _at_most(most), value)
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = math.inf) -> float:
        """A finite number above `least`, `most` at most."""
        value = self._of(key, default)
        if not _is_finite(value) or not least < value <= most:
            raise self._wrong(key, f"a number above {least:g}" + _at_most(most), value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._of(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, not empty."""
        return self._list(key, "strings", lambda each: isinstance(each, str))

    def integers(self, key: str) -> list[int]:
        """A list of integers, not empty."""
        return self._list(key, "integers", lambda each: type(each) is int)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers, not empty."""
        return self._list(key, "finite numbers", _is_finite)

    def _of(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise GgufError(f"it lacks {key}")
        return value

    def _list(self, key: str, of: str, fits: Callable[[Any], bool]) -> list[Any]:
        values = self._of(key, None)
        if not isinstance(values, list):
            raise self._wrong(key, f"a list of {of}", values)
        if not values:
            raise GgufError(f"it lacks {key}")
        wrong = next((index for index, each in enumerate(values) if not fits(each)), None)
        if wrong is not None:
            raise self._wrong(f"{key}[{wrong}]", f"one of {of}", values[wrong])
        return values

    def _wrong(self, key: str, expected: str, value: object) -> GgufError:
        return GgufError(f"{key} must be {expected}, got {shown(value)}")


def _at_most(most: float) -> str:
    return "" if most in (2**63, math.inf) else f" and at most {most}"


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of one tensor in a file.

    Attributes:
        name: Name in the file.
        shape: Rows first, as in torch.
        kind: Encoding of the values.
        start: First byte in the file.
        part: Index of the file that has it, of a model in several.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    part: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, a run of values along the last dimension."""
        from gguf.constants import GGML_QUANT_SIZES  # no second start needs the library

        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """A GGUF file, or several that are parts of one model.

    Nothing is mapped: a process ends where it reads a mapped file that has become shorter.

    Args:
        path: The file; of several the first, whose name ends with ``-00001-of-00003.gguf``.

    Raises:
        GgufError: it is no GGUF file, is cut off, lacks a part, or holds a type of tensor that
            cannot be read.
        OSError: it cannot be opened.

    Attributes:
        metadata: Metadata by key, of the first part.
        tensors: Tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self._paths: list[Path] = []
        self.metadata, self.tensors = self._open(path)
        count = self.metadata.integer("split.count", 1, least=0)
        if count <= 1:
            return
        for part, each in enumerate(parts_of(path, count)[1:], 1):
            if not each.is_file():
                raise GgufError(f"split.count: it is one of {count} parts, and {each.name} is not beside it")
            try:
                metadata, tensors = self._open(each)
                if (metadata.integer("split.count"), metadata.integer("split.no", least=0)) != (count, part):
                    raise GgufError(f"split.no: it must be part {part} of {count}")
                twice = sorted(set(tensors) & set(self.tensors))
                if twice:
                    raise GgufError(f"it holds tensor {shown(twice[0])}, as another part does")
            except GgufError as error:
                raise GgufError(f"{each.name}: {error}") from None
            self.tensors |= tensors
        expected = self.metadata.integer("split.tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise GgufError(f"split.tensors.count must be the {len(self.tensors)} tensors of all parts, got {expected}")

    def _open(self, path: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(MAGIC)) != MAGIC:
                raise GgufError("not a GGUF file: it does not begin with GGUF")
            try:
                metadata, tensors = _Header(file, size, len(self._paths)).read()
            except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
                raise GgufError(f"its header is damaged or cut off ({error})") from None
        for tensor in tensors.values():
            if tensor.start + tensor.num_rows * tensor.row_bytes > size:
                raise GgufError(f"it is cut off: tensor {tensor.name} lies beyond its end")
        self._paths.append(path)
        return metadata, tensors

    def tensor(self, name: str) -> GgufTensor:
        """The tensor of that name. Raises `GgufError` if there is none."""
        if name not in self.tensors:
            raise GgufError(f"it lacks tensor {name}")
        return self.tensors[name]

    def rows(self, tensor: GgufTensor, rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.float32]]:
        """The numbered rows of a tensor in that order, ``[n, shape[-1]]`` at a time; raises as
        `packed_rows`.
        """
        from gguf.quants import dequantize

        return (dequantize(packed, tensor.kind) for packed in self.packed_rows(tensor, rows))

    def packed_rows(self, tensor: GgufTensor, rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.uint8]]:
        """`rows` in the file's own blocks, bytes ``[n, row_bytes]`` at a time.

        Raises:
            GgufError: the file has become shorter meanwhile.
            OSError: it cannot be read.
        """
        step = max(1, CHUNK_VALUES // tensor.shape[-1])
        with open_regular(self._paths[tensor.part]) as file:
            for first in range(0, len(rows), step):
                some = rows[first : first + step]
                yield _read_rows(file, tensor, int(some.min()), int(some.max()) + 1)[some - some.min()]

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor, for small ones."""
        tensor = self.tensors[name]
        return np.concatenate(list(self.rows(tensor, np.arange(tensor.num_rows)))).reshape(tensor.shape)


def parts_of(path: Path, count: int | None = None) -> list[Path]:
    """All parts of the model whose first part is `path`; itself alone if its name does not say so.

    Args:
        path: The file.
        count: Parts that there are as the file says; None if it is not asked.

    Raises:
        GgufError: it is another part, or its name does not fit `count`.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        if count is not None:
            raise GgufError(
                f"split.count: it is one of {count} parts, and its name must end with -00001-of-{count:05}.gguf"
            )
        return [path]
    number, total = int(named[2]), int(named[3])
    if number != 1 or total != (count or total):
        raise GgufError(f"split.count: name the first of its parts, {named[1]}-00001-of-{count or total:05}{named[4]}")
    return [path.with_name(f"{named[1]}-{part:05}-of-{total:05}{named[4]}") for part in range(1, total + 1)]


def _read_rows(file: BinaryIO, tensor: GgufTensor, first: int, stop: int) -> npt.NDArray[np.uint8]:
    """Consecutive rows of a tensor, bytes ``[stop - first, row_bytes]``."""
    file.seek(tensor.start + first * tensor.row_bytes)
    data = file.read((stop - first) * tensor.row_bytes)
    if len(data) < (stop - first) * tensor.row_bytes:
        raise GgufError(f"it has become shorter while it was read: tensor {tensor.name} lies beyond its end")
    return np.frombuffer(data, np.uint8).reshape(stop - first, tensor.row_bytes)


class _Header:
    """Reads from behind the magic number on. Raises `struct.error` where it ends too early.

    Args:
        file: The file, of which the magic number has been read.
        size: Bytes of the file.
        part: See `GgufTensor`.
    """

    def __init__(self, file: BinaryIO, size: int, part: int) -> None:
        self._file, self._size, self._part = file, size, part
        self._at = len(MAGIC)

    def read(self) -> tuple[Metadata, dict[str, GgufTensor]]:
        version = self._number("I")
        if version not in VERSIONS:
            raise GgufError(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._count("tensors", MAX_ENTRIES), self._count("keys", MAX_ENTRIES)
        metadata = Metadata()
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise GgufError(f"its metadata hold {shown(key)} twice")
            metadata[key] = self._value(key, self._number("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT, most=2**20)
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in found:
            if name in tensors:
                raise GgufError(f"it holds tensor {shown(name)} twice")
            tensors[name] = GgufTensor(name, shape, _readable(name, shape, kind), base + offset, self._part)
        return metadata, tensors

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            raise GgufError(f"its header is damaged: it says that there are {count} {what}, {most} at most are read")
        return int(count)

    def _take(self, size: int) -> bytes:
        """The next bytes."""
        self._at += size
        data = self._file.read(size) if self._at <= self._size else b""
        if len(data) < size:
            raise struct.error("it ends too early")
        return data

    def _unpacked(self, form: str) -> tuple[Any, ...]:
        """The next numbers, in the standard sizes of `struct`."""
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))

    def _number(self, code: str) -> Any:
        return self._unpacked(code)[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _value(self, key: str, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth == MAX_DEPTH:
            raise GgufError(f"its metadata holds a value of unknown type {kind}: {shown(key)}")
        of, count = self._number("I"), self._count(f"items of {shown(key)}", MAX_ITEMS)
        if of in _SCALARS:
            return list(self._unpacked(f"{count}{_SCALARS[of]}"))
        return [self._value(key, of, depth + 1) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"tensor {shown(name)} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        return name, shape, self._number("I"), self._number("Q")


def _readable(name: str, shape: tuple[int, ...], number: int) -> GGMLQuantizationType:
    """The type of a tensor. Raises `GgufError` if gguf-py cannot dequantise it."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

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
