"""Linear layers on packed weights, in numbers of rows that keep them batch-invariant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from worker.engines.embedded.model.gemm import GemmBackend, TorchGemm
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.panels import Lookup, Panels, lookup

LayerShape = tuple[int, int, type[GemmBackend]]
"""Output and input features, and the GEMM backend."""


@dataclass(frozen=True, slots=True)
class GemmTiling:
    """Numbers of rows that a GEMM is called with: multiples of `step` up to `most`, and `blocks`.

    A GEMM kernel chooses its order of summation by the number of rows. So a layer whose kernel is
    not batch-invariant by construction is called with few different numbers, which are tried at
    start: rows are padded to a multiple of `step` and split into tiles of at most `most`.

    Attributes:
        step: What numbers of rows are padded to a multiple of.
        most: Rows of a tile at most; None for any number.
        blocks: Further numbers, multiples of `step` above `most`, largest first. Long prompts are
            computed faster in them.
    """

    step: int = 1
    most: int | None = None
    blocks: tuple[int, ...] = ()

    def fits(self, rows: int) -> bool:
        """Whether a GEMM of `rows` rows needs neither padding nor splitting."""
        return rows in self.blocks or (rows % self.step == 0 and (self.most is None or rows <= self.most))

    def split(self, rows: int) -> Iterator[slice]:
        """`rows` rows, a multiple of `step`, in slices that fit."""
        start = 0
        while start < rows:
            left = rows - start
            count = next((block for block in self.blocks if block <= left), min(left, self.most or left))
            yield slice(start, start + count)
            start += count


class Linear(torch.nn.Module):
    """``x @ weight.T + bias`` for rows ``[n, K]``; after `pack` it keeps only the packed weight.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.tiling = GemmTiling()
        self.num_bytes = weight.nbytes
        self._dtype = weight.dtype
        self._weight: torch.Tensor | None = weight.detach()
        self._bias = bias.detach() if bias is not None else None
        self._gemm: GemmBackend = TorchGemm(self._weight, self._bias)

    def pack(self, kernels: KernelBackend) -> None:
        """Choose the GEMM backend, which packs the weight; once."""
        if self._weight is None:
            raise RuntimeError("the layer is packed already")
        self._gemm = kernels.gemm(self._weight, self._bias)
        self._weight = None

    def layouts(self) -> Iterator[Panels]:
        """Layouts that the packed weight may have."""
        return self._gemm.layouts()

    @property
    def is_packed(self) -> bool:
        """Whether the weight is held in another layout, so that the one given can be freed."""
        return self._gemm.is_packed

    @property
    def is_batch_invariant(self) -> bool:
        """Whether it is batch-invariant without a tiling."""
        return self._gemm.is_batch_invariant

    @property
    def shape(self) -> LayerShape:
        """Layers of the same one have the same tiling."""
        return self.out_features, self.in_features, type(self._gemm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to ``[..., N]``."""
        if x.dim() == 2:
            return self._tiled(x)
        return self._tiled(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """``y * sigmoid(y)`` of the result y."""
        return self._tiled(x, "silu")

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The result plus `other` ``[n, N]``."""
        return self._tiled(x, "add", other)

    def mul(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The result times `other` ``[n, N]``, element by element."""
        return self._tiled(x, "mul", other)

    def _tiled(self, x: torch.Tensor, epilogue: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        rows = len(x)
        if self.tiling.fits(rows):
            return self._gemm(x, epilogue, other)
        padding = -rows % self.tiling.step
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
            other = functional.pad(other, (0, 0, 0, padding)) if other is not None else None
        results = [
            self._gemm(x[tile], epilogue, other[tile] if other is not None else None)
            for tile in self.tiling.split(len(x))
        ]
        return (torch.cat(results) if len(results) > 1 else results[0])[:rows]

    def is_invariant(self, tiling: GemmTiling) -> bool:
        """Whether a row's result has the same bits in all tiles of `tiling`, at any index in them.

        Raises:
            ValueError: `tiling` is not bounded, so that not all tiles can be tried.
        """
        if tiling.most is None:
            raise ValueError("only a bounded number of shapes can be tried")
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(max((tiling.most, *tiling.blocks)), self.in_features, generator=generator).to(self._dtype)
        expected = torch.cat([self._gemm(tile) for tile in torch.split(rows, tiling.most)])
        if not all(torch.equal(self._gemm(rows[:block]), expected[:block]) for block in tiling.blocks):
            return False
        for count in range(tiling.step, tiling.most + 1, tiling.step):
            starts = {0, (tiling.most - count) // 2, tiling.most - count}
            if not all(
                torch.equal(self._gemm(rows[start : start + count]), expected[start : start + count])
                for start in starts
            ):
                return False
        return True


def fuse(*layers: torch.nn.Linear) -> Linear:
    """One fused linear layer: its result is the results of `layers`, concatenated.

    Raises:
        ValueError: some of them have a bias and others have none.
    """
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) != len(layers):
        raise ValueError("all layers must have a bias, or none")
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight
    return Linear(weight, torch.cat(biases) if biases else None)


def has_tied_embeddings(network: Any) -> bool:
    """Whether output layer and embedding of transformers' causal language model share a weight."""
    embedding, head = network.model.embed_tokens.weight, network.lm_head.weight
    return bool(embedding.data_ptr() == head.data_ptr() and embedding.shape == head.shape)


def embed_with(weight: torch.Tensor, head: Linear, is_tied: bool) -> Lookup:
    """Row lookup in an embedding's ``weight [N, K]``; in the packed weight of `head` where it is
    tied, so that the weight is held once.

    Where all layers hold packed copies it keeps none of the memory of `weight`, which may be the
    whole checkpoint, mapped into memory.
    """
    found = lookup(weight, head.layouts()) if is_tied else None
    return found or partial(functional.embedding, weight=weight.clone() if head.is_packed else weight)


def replace_linears(module: torch.nn.Module) -> None:
    """Put a `Linear` in place of every ``torch.nn.Linear`` inside `module`."""
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear:
            setattr(module, name, fuse(child))
        else:
            replace_linears(child)


def pack_all(module: torch.nn.Module, kernels: KernelBackend) -> None:
    """`Linear.pack` for every one inside `module`."""
    for layer in linears(module):
        layer.pack(kernels)


def linears(module: torch.nn.Module) -> Iterator[Linear]:
    """Every `Linear` inside `module`."""
    return (child for child in module.modules() if isinstance(child, Linear))
