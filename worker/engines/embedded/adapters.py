"""LoRA adapters that an embedded engine has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter that requests compute with; it stays in memory as long as one of them does.

    Attributes:
        name: Name of it as a model.
        digest: Digest of its files, 128 bits as hexadecimal digits.
        rank: Largest rank of its matrices.
        path: Directory that it was read from.
        packed: Its weights, a `native.lora.PackedAdapter`.
    """

    name: str
    digest: str
    rank: int
    path: str
    packed: Any
