"""Linear layers whose weights are laid out once for the CPU's matrix kernels, with the work
beside them fused in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from worker.engines.embedded.model import gemm
from worker.engines.embedded.model.panels import Lookup, Panels, lookup

Shape = tuple[int, int, type]
"""Results and inputs per row, and what computes them."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Numbers of rows that a product is computed with: multiples of `step` up to `most`, and
    `blocks`.

    None for `most` means any number. Blocks are multiples of `step` above `most`, largest first.
    """

    step: int = 1
    most: int | None = None
    blocks: tuple[int, ...] = ()

    def fit(self, rows: int) -> bool:
        """Whether a product of `rows` rows needs neither padding nor splitting."""
        return rows in self.blocks or (rows % self.step == 0 and (self.most is None or rows <= self.most))

    def parts(self, rows: int) -> Iterator[slice]:
        """`rows` rows, a multiple of `step`, in parts that fit."""
        start = 0
        while start < rows:
            left = rows - start
            count = next((block for block in self.blocks if block <= left), min(left, self.most or left))
            yield slice(start, start + count)
            start += count


class Linear(torch.nn.Module):
    """``x @ weight.T + bias`` for rows ``[n, K]``. After `pack` it keeps the weight in the layout
    of its kernels alone.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.tiles = Tiles()
        self.num_bytes = weight.nbytes
        self._dtype = weight.dtype
        self._weight: torch.Tensor | None = weight.detach()
        self._bias = bias.detach() if bias is not None else None
        self._product: gemm.Product = gemm.TorchProduct(self._weight, self._bias)

    def pack(self, may_be_native: bool) -> None:
        """Choose the kernels, our own only if they are allowed, and lay out the weight for them;
        once.
        """
        if self._weight is None:
            raise RuntimeError("the layer is packed already")
        self._product = gemm.make(self._weight, self._bias, may_be_native)
        self._weight = None

    def layouts(self) -> Iterator[Panels]:
        """Layouts in which the packed weight may lie."""
        return self._product.layouts()

    @property
    def is_packed(self) -> bool:
        """Whether the weight is held in another layout, and the one given is of no more use."""
        return self._product.is_packed

    @property
    def is_exact(self) -> bool:
        """Whether a row's result is the same, bit by bit, whatever the number of rows; then it
        needs no tiles.
        """
        return self._product.is_exact

    @property
    def shape(self) -> Shape:
        """Layers of the same one have the same tiles."""
        return self.out_features, self.in_features, type(self._product)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to ``[..., N]``."""
        if x.dim() == 2:
            return self._tiled(x)
        return self._tiled(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """The product, then ``y * sigmoid(y)``."""
        return self._tiled(x, "silu")

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product plus `other` ``[n, N]``."""
        return self._tiled(x, "add", other)

    def mul(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product times `other` ``[n, N]``, element by element."""
        return self._tiled(x, "mul", other)

    def _tiled(self, x: torch.Tensor, then: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        rows = len(x)
        if self.tiles.fit(rows):
            return self._product(x, then, other)
        padding = -rows % self.tiles.step
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
            other = functional.pad(other, (0, 0, 0, padding)) if other is not None else None
        parts = [
            self._product(x[part], then, other[part] if other is not None else None)
            for part in self.tiles.parts(len(x))
        ]
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[:rows]

    def is_invariant(self, tiles: Tiles) -> bool:
        """Whether the result of a row is the same, bit by bit, in all `tiles` (bounded ones) and
        places in them.
        """
        if tiles.most is None:
            raise ValueError("only a bounded number of shapes can be tried")
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(max((tiles.most, *tiles.blocks)), self.in_features, generator=generator).to(self._dtype)
        expected = torch.cat([self._product(part) for part in torch.split(rows, tiles.most)])
        if not all(torch.equal(self._product(rows[:block]), expected[:block]) for block in tiles.blocks):
            return False
        for count in range(tiles.step, tiles.most + 1, tiles.step):
            starts = {0, (tiles.most - count) // 2, tiles.most - count}
            if not all(
                torch.equal(self._product(rows[start : start + count]), expected[start : start + count])
                for start in starts
            ):
                return False
        return True


def fuse(*layers: torch.nn.Linear) -> Linear:
    """One layer whose result is the results of `layers`, one after another."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) != len(layers):
        raise ValueError("all layers must have a bias, or none")
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight
    return Linear(weight, torch.cat(biases) if biases else None)


def has_tied_embeddings(network: Any) -> bool:
    """Whether the output layer of transformers' causal language model has the weight of its
    embedding.
    """
    embedding, head = network.model.embed_tokens.weight, network.lm_head.weight
    return bool(embedding.data_ptr() == head.data_ptr() and embedding.shape == head.shape)


def embed_with(weight: torch.Tensor, head: Linear, is_tied: bool) -> Lookup:
    """Looks up rows of an embedding's ``weight [N, K]``, held once with that of the packed `head`
    where it is tied.

    Where all layers hold packed copies it keeps none of the memory of `weight`, which may be the
    whole checkpoint, mapped into memory.
    """
    found = lookup(weight, head.layouts()) if is_tied else None
    return found or partial(functional.embedding, weight=weight.clone() if head.is_packed else weight)


def replace_linears(module: torch.nn.Module) -> None:
    """Put a `Linear` in place of every ``torch.nn.Linear`` inside `module`, and let go of the
    originals.
    """
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear:
            setattr(module, name, fuse(child))
        else:
            replace_linears(child)


def pack_all(module: torch.nn.Module, may_be_native: bool) -> None:
    """`Linear.pack` for every one inside `module`."""
    for layer in linears(module):
        layer.pack(may_be_native)


def linears(module: torch.nn.Module) -> Iterator[Linear]:
    """Every `Linear` inside `module`."""
    return (child for child in module.modules() if isinstance(child, Linear))
