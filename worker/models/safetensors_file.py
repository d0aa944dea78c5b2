"""Writes safetensors files piece by piece: nothing of a tensor is copied before it is written, and
other threads run meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file.

    Attributes:
        name: Name in the file.
        code: safetensors' name of the data type.
        shape: Shape.
        num_bytes: Bytes of all values.
        parts: Makes its values, some bytes at a time.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    num_bytes: int
    parts: Callable[[], Iterable[bytes | memoryview]]


def write_safetensors(
    output: BinaryIO,
    tensors: Sequence[Stored],
    metadata: Mapping[str, str],
    show: Callable[[float], None] = lambda part: None,
) -> None:
    """The length of a JSON header, the header, the values.

    Args:
        output: File that is written to.
        tensors: Tensors in the order of the file.
        metadata: Metadata of the file.
        show: Called with the part of the values that is written.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    total = 0
    for tensor in tensors:
        end = total + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    output.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for tensor in tensors:
        for part in tensor.parts():
            done += output.write(part)
            show(done / total)
