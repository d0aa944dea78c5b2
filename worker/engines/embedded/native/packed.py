"""Weights packed into panels, as the GEMMs read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.engines.embedded.native.libraries import DATA_TYPES
from worker.engines.embedded.native.paths import library

COLUMNS = 32
"""Rows of a weight in one panel: ``COLUMNS`` in ``vector.h``."""


def supports_weight(weight: torch.Tensor) -> bool:
    """Whether the kernels compute with this ``weight [N, K]``."""
    data_type = DATA_TYPES.get(weight.dtype)
    return weight.device.type == "cpu" and data_type is not None and weight.shape[1] % data_type.per_word == 0


def fill_panels(rows: torch.Tensor, panels: torch.Tensor, num_threads: int | None = None) -> None:
    """Write rows into panels; missing rows of the last one are 0.

    Args:
        rows: ``[N, n]``, elements of 1, 2 or 4 bytes.
        panels: ``[ceil(N / 32), n, 32]`` of the same type, contiguous.
        num_threads: Threads that compute; None for as many as torch has.

    Raises:
        ValueError: the panels are of another shape or type.
    """
    count, width = rows.shape
    expected = -(-count // COLUMNS), width, COLUMNS
    if tuple(panels.shape) != expected or panels.dtype != rows.dtype or not panels.is_contiguous():
        raise ValueError(f"expected panels {rows.dtype} {list(expected)}, got {panels.dtype} {list(panels.shape)}")
    rows, kernels = rows.contiguous(), library(torch.float32)
    threads = kernels.threads(num_threads)
    kernels.fill_panels(rows.data_ptr(), count, width, rows.element_size(), panels.data_ptr(), threads)


def pack(weight: torch.Tensor, panels: torch.Tensor | None = None, num_threads: int | None = None) -> torch.Tensor:
    """``weight [N, K]`` packed into panels ``[ceil(N / 32), K / w, 32, w]``, w elements to a word.

    Word w of all 32 rows of a panel is contiguous and fills two vector registers, so that a GEMM
    reads each panel once, from front to back. Missing rows of the last panel are 0.

    Args:
        weight: The weight.
        panels: Panels to pack it into; by default new ones.
        num_threads: See `fill_panels`.
    """
    columns, inner = weight.shape
    per_word = DATA_TYPES[weight.dtype].per_word
    if panels is None:
        panels = torch.empty(-(-columns // COLUMNS), inner // per_word, COLUMNS, per_word, dtype=weight.dtype)
    weight = weight.detach().contiguous()
    if weight.storage_offset() % per_word:  # it begins within a word
        weight = weight.clone()
    fill_panels(weight.view(torch.int32), panels.view(torch.int32).squeeze(-1), num_threads)
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
