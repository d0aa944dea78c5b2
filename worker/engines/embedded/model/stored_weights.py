"""Weights in safetensors, from files or from memory; quantised ones are made of their parts."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from worker.engines.embedded.host import memory as host_memory
from worker.engines.embedded.model.quantisation import QuantisedWeight
from worker.models.problems import ModelFileError
from worker.models.quantised import CODES, OFFSETS, SCALES
from worker.models.regular_files import open_regular
from worker.models.weight_files import INDEX, MAX_HEADER_BYTES, SINGLE, WeightFiles, header_of

Weight = torch.Tensor | QuantisedWeight

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
            parts = QuantisedWeight(tensor, tensors[weight + SCALES], tensors.get(weight + OFFSETS))
            yield weight, _checked(weight, parts)
        elif not name.endswith((SCALES, OFFSETS)):
            yield name, tensor


def read_weights(source: Path | memoryview) -> dict[str, Weight]:
    """The weights in a directory of safetensors files, in one such file, or in memory.

    Files are read, not mapped: a trainer may write to one, or cut it off, at any time.

    Raises:
        ModelFileError: a file is missing, damaged, or holds a tensor of a type of no weights.
    """
    if isinstance(source, memoryview):
        return _weights_of("body", source)
    found: dict[str, Weight] = {}
    for path in _files(source):
        try:
            content = _content(path)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path.name}: cannot be read: {error}") from None
        for name, weight in _weights_of(path.name, content).items():
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
    """The bytes of a file, as they are now, in memory of our own."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        [memory] = host_memory.zeros(1, (size,), torch.uint8, torch.device("cpu"))
        content, read = memory.numpy().data, 0
        while read < size and (more := file.readinto(content[read:])):
            read += more
    return content[:read]


def _weights_of(file: str, content: memoryview) -> dict[str, Weight]:
    tensors: dict[str, torch.Tensor] = {}
    header = content[: 8 + min(int.from_bytes(content[:8], "little"), MAX_HEADER_BYTES)]
    for name, (stored, (start, stop)) in header_of(io.BytesIO(header), len(content), file).items():
        dtype = DTYPES.get(stored.dtype) or _PARTS.get(stored.dtype)
        if dtype is None:
            raise ModelFileError(f"{file}: tensor {name} must be of type {', '.join(DTYPES)}, got {stored.dtype}")
        aligned = content[start:stop] if not start % dtype.itemsize else memoryview(bytearray(content[start:stop]))
        empty = torch.empty(0, dtype=dtype)  # frombuffer takes no empty buffer
        tensors[name] = (torch.frombuffer(aligned, dtype=dtype) if stop > start else empty).view(stored.shape)
    try:
        return dict(weights_in(tensors))
    except ValueError as error:
        raise ModelFileError(f"{file}: {error}") from None


def _checked(name: str, weight: QuantisedWeight) -> QuantisedWeight:
    """`weight`, if the kernels can read it. Raises `ValueError`."""
    numbers = [weight.scales, *([] if weight.offsets is None else [weight.offsets])]
    if any(each.ndim != 2 or not each.numel() for each in (weight.codes, *numbers)):
        raise ValueError(f"weight {name} is in no format that is known")
    rows, inner = weight.shape
    groups = weight.scales.shape[1]
    if (
        weight.codes.dtype not in (torch.int8, torch.uint8)
        or any(each.shape != (rows, groups) or each.dtype != weight.scales.dtype for each in numbers)
        or weight.scales.dtype not in (torch.float16, torch.float32)
        or inner % groups
        or (weight.bits == 4 and inner // groups % 8)
    ):
        raise ValueError(f"weight {name} is in no format that is known")
    return weight
