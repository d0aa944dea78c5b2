"""Weights packed into panels, as the GEMMs read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from worker.engines.embedded.native.libraries import DATA_TYPES

COLUMNS = 32
"""Rows of a weight in one panel: ``COLUMNS`` in ``vector.h``."""


def supports_weight(weight: torch.Tensor) -> bool:
    """Whether the kernels compute with this ``weight [N, K]``."""
    data_type = DATA_TYPES.get(weight.dtype)
    return weight.device.type == "cpu" and data_type is not None and weight.shape[1] % data_type.per_word == 0


def pack(weight: torch.Tensor, panels: torch.Tensor | None = None) -> torch.Tensor:
    """``weight [N, K]`` packed into panels ``[ceil(N / 32), K / w, 32, w]``, w elements to a word.

    Word w of all 32 rows of a panel is contiguous and fills two vector registers, so that a GEMM
    reads each panel once, from front to back. Missing rows of the last panel are 0.

    Args:
        weight: The weight.
        panels: Panels to pack it into; by default new ones.
    """
    columns, inner = weight.shape
    per_word = DATA_TYPES[weight.dtype].per_word
    if panels is None:
        panels = torch.empty(-(-columns // COLUMNS), inner // per_word, COLUMNS, per_word, dtype=weight.dtype)
    padded = functional.pad(weight, (0, 0, 0, -columns % COLUMNS)).contiguous()
    if padded.storage_offset() % per_word:  # it begins within a word
        padded = padded.clone()
    words = padded.view(torch.int32).view(-1, COLUMNS, inner // per_word)  # moved whole, in a third of the time
    panels.view(torch.int32).squeeze(-1).copy_(words.transpose(1, 2))
    return panels


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[N, K]`` in panels.

    Attributes:
        panels: The result of `pack`.
        columns: N.

    Raises:
        ValueError: the shape of the panels is another.
    """

    panels: torch.Tensor
    columns: int

    def __post_init__(self) -> None:
        panels = self.panels
        per_word = DATA_TYPES[panels.dtype].per_word if panels.dtype in DATA_TYPES else 0
        expected = -(-self.columns // COLUMNS), COLUMNS, per_word
        if panels.dim() != 4 or (panels.shape[0], *panels.shape[2:]) != expected:
            raise ValueError(f"panels {panels.dtype} {list(panels.shape)} hold no weight of {self.columns} rows")

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedWeight:
        """``weight [N, K]``, packed."""
        return cls(pack(weight), len(weight))

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return torch.Size((self.columns, self.panels.shape[1] * self.panels.shape[3]))

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weight."""
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.nbytes
