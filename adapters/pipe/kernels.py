"""Kernel choice: FlashInfer's for float32 rows on CUDA where it is installed, else torch's."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch

from adapters.pipe import torch_kernels
from adapters.pipe.parameters import PerRow

_Indices = torch.Tensor | None
_Generator = torch.Generator | None


class Kernels(Protocol):
    """The functions that both modules have; `adapters.pipe.torch_kernels` says what they do."""

    def scale(self, logits: torch.Tensor, temperature: PerRow) -> torch.Tensor: ...
    def softmax(self, logits: torch.Tensor, temperature: PerRow | None, enable_pdl: bool | None) -> torch.Tensor: ...
    def top_k_mask(self, logits: torch.Tensor, top_k: PerRow) -> torch.Tensor: ...
    def top_k_renorm(self, probs: torch.Tensor, top_k: PerRow) -> torch.Tensor: ...
    def top_p_renorm(self, probs: torch.Tensor, top_p: PerRow, is_deterministic: bool) -> torch.Tensor: ...
    def min_p_renorm(self, probs: torch.Tensor, min_p: PerRow) -> torch.Tensor: ...
    def top_k_sample(
        self, probs: torch.Tensor, top_k: PerRow, indices: _Indices, deterministic: bool, generator: _Generator
    ) -> torch.Tensor: ...
    def top_p_sample(
        self, probs: torch.Tensor, top_p: PerRow, indices: _Indices, deterministic: bool, generator: _Generator
    ) -> torch.Tensor: ...
    def min_p_sample(
        self, probs: torch.Tensor, min_p: PerRow, indices: _Indices, deterministic: bool, generator: _Generator
    ) -> torch.Tensor: ...
    def top_k_top_p_sample(
        self,
        probs: torch.Tensor,
        top_k: PerRow,
        top_p: PerRow,
        indices: _Indices,
        deterministic: bool,
        generator: _Generator,
    ) -> torch.Tensor: ...
    def sample_logits(
        self, logits: torch.Tensor, indices: _Indices, deterministic: bool, generator: _Generator
    ) -> torch.Tensor: ...
    def sample_probs(
        self, probs: torch.Tensor, indices: _Indices, deterministic: bool, generator: _Generator
    ) -> torch.Tensor: ...


def kernels_for(rows: torch.Tensor) -> Kernels:
    """The kernels for rows like these; an empty batch launches none."""
    if rows.is_cuda and rows.dtype == torch.float32 and len(rows) and flashinfer_is_installed():
        from adapters.pipe import flashinfer_kernels

        return flashinfer_kernels
    return torch_kernels


@cache
def flashinfer_is_installed() -> bool:
    """Whether the package can be found; it is not imported."""
    return find_spec("flashinfer") is not None
