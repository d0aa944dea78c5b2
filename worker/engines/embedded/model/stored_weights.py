"""Weights in safetensors, from files or from memory; quantised ones are made of their parts."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.model.quantisation import QuantisedWeight, StackedExperts, e8m0_halves
from worker.models.problems import ModelFileError
from worker.models.quantised import CODES, MOST_E8M0, OFFSETS, SCALES, TRANSPOSED
from worker.models.regular_files import open_regular, unchanged
from worker.models.weight_files import INDEX, MAX_HEADER_BYTES, SINGLE, StoredTensor, WeightFiles, header_of

Weight = torch.Tensor | QuantisedWeight | StackedExperts

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Data types of weights that are not quantised, by safetensors' names."""

_PARTS = {"I8": torch.int8, "U8": torch.uint8}


def weights_in(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Weight]]:
    """The weights that `tensors` of one file are, by name. Raises `ValueError` for a quantised one
    in no known format.
    """
    for name, tensor in tensors.items():
        if name.endswith(CODES):
            weight = name.removesuffix(CODES)
            if weight + SCALES not in tensors:
                raise ValueError(f"weight {weight} is in no format that is known")
            yield (
                weight.removesuffix(TRANSPOSED),
                _quantised(weight, tensor, tensors[weight + SCALES], tensors.get(weight + OFFSETS)),
            )
        elif not name.endswith((SCALES, OFFSETS)):
            yield name, tensor


def read_weights(source: Path | memoryview, ignored: Collection[str] = ()) -> dict[str, Weight]:
    """The weights in a directory of safetensors files, in one such file, or in memory.

    Files are read, not mapped: a trainer may write to one, or cut it off, at any time.

    Args:
        source: The directory, the file, or the bytes.
        ignored: Names of tensors that are left out, of whatever type they are.

    Raises:
        ModelFileError: a file is missing, damaged, or holds a tensor of a type of no weights; or
            one has changed while they were read.
    """
    if isinstance(source, memoryview):
        return _weights_of("body", source, ignored)
    files, found = list(_files(source)), dict[str, Weight]()
    try:
        with unchanged(files):
            contents = [_content(path) for path in files]
    except OSError as error:
        raise ModelFileError(f"{Path(error.filename).name}: cannot be read: {error.strerror}") from None
    for path, content in zip(files, contents, strict=True):
        for name, weight in _weights_of(path.name, content, ignored).items():
            if name in found:
                raise ModelFileError(f"{path.name}: tensor {name} is in another file, too")
            found[name] = weight
    return found


def _files(source: Path) -> Iterable[Path]:
    if not source.is_dir():
        return [source]
    if (source / SINGLE).is_file() or (source / INDEX).is_file():
        return [source / file for file in WeightFiles(source).files]
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise ModelFileError("it has no safetensors weights")
    return found


def _content(path: Path) -> memoryview:
    """The bytes of a file, as they are now, in memory of our own. Raises `ModelFileError`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            [memory] = host_memory.zeros(1, (size,), torch.uint8, torch.device("cpu"))
            content, read = memory.numpy().data, 0
            while read < size and (more := file.readinto(content[read:])):
                read += more
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error}") from None
    return content[:read]


def _weights_of(file: str, content: memoryview, ignored: Collection[str]) -> dict[str, Weight]:
    tensors: dict[str, torch.Tensor] = {}
    header = content[: 8 + min(int.from_bytes(content[:8], "little"), MAX_HEADER_BYTES)]
    for name, (stored, (start, stop)) in header_of(io.BytesIO(header), len(content), file).items():
        if name in ignored:
            continue
        is_part = name.endswith((CODES, SCALES, OFFSETS))
        dtype = DTYPES.get(stored.dtype) or (_PARTS.get(stored.dtype) if is_part else None)
        if dtype is None:
            raise ModelFileError(f"{file}: tensor {name} must be of type {', '.join(DTYPES)}, got {stored.dtype}")
        aligned = content[start:stop] if not start % dtype.itemsize else memoryview(bytearray(content[start:stop]))
        empty = torch.empty(0, dtype=dtype)  # frombuffer takes no empty buffer
        tensors[name] = (torch.frombuffer(aligned, dtype=dtype) if stop > start else empty).view(stored.shape)
    try:
        return dict(weights_in(tensors))
    except ValueError as error:
        raise ModelFileError(f"{file}: {error}") from None


def shape_in(tensors: Mapping[str, StoredTensor], name: str) -> tuple[int, ...]:
    """The shape of the quantised weight whose codes are called `name`, with its suffix."""
    *experts, rows, inner = tensors[name].shape
    inner = inner * 2 if tensors[name].dtype == "U8" else inner
    return (*experts, *((inner, rows) if name.endswith(TRANSPOSED + CODES) else (rows, inner)))


def _quantised(
    name: str, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
) -> QuantisedWeight | StackedExperts:
    """A weight of these parts, if the kernels can read it. Raises `ValueError`."""
    is_e2m1 = scales.dtype == torch.uint8
    numbers = [scales, *([] if offsets is None else [offsets])]
    dtypes = (torch.uint8,) if is_e2m1 else (torch.float16, torch.float32)
    fits = codes.ndim in (2, 3) and codes.dtype in (torch.int8, torch.uint8) and codes.numel() > 0
    fits = fits and scales.ndim == codes.ndim and scales.numel() > 0 and scales.dtype in dtypes
    fits = fits and all(each.shape == scales.shape and each.dtype == scales.dtype for each in numbers)
    fits = fits and codes.shape[:-1] == scales.shape[:-1] and name.endswith(TRANSPOSED) <= (codes.ndim == 3)
    if fits:
        bits, groups = 8 if codes.dtype == torch.int8 else 4, scales.shape[-1]
        inner = codes.shape[-1] * 8 // bits
        fits = not inner % groups and (bits == 8 or inner // groups % 8 == 0)
        fits = fits and (not is_e2m1 or (bits == 4 and offsets is None and int(scales.max()) <= MOST_E8M0))
    if not fits:
        raise ValueError(f"weight {name} is in no format that is known")
    scales = e8m0_halves(scales) if is_e2m1 else scales
    if codes.ndim == 2:
        return QuantisedWeight(codes, scales, offsets, is_e2m1)
    return StackedExperts(codes, scales, offsets, is_e2m1, name.endswith(TRANSPOSED))
