"""Linear layers whose weights are laid out once for the CPU's matrix kernels, with the work beside them fused in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

Shape = tuple[int, int, bool]
"""Results and inputs per row, and whether the weight is packed."""

_PACKED_FOR_ROWS = 8
"""One layout serves all numbers of rows at nearly equal speed."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Numbers of rows that a product is computed with: multiples of `step` up to `most`, and `blocks`.

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
    """``x @ weight.T + bias`` for rows ``[n, K]``; keeps a packed copy of the weight where the CPU has kernels for it.

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
        self._bias = bias.detach() if bias is not None else None
        self.is_packed = _packs(weight)
        self._weight = weight.detach()
        if self.is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), _PACKED_FOR_ROWS)

    @property
    def shape(self) -> Shape:
        """Layers of the same one have the same tiles."""
        return self.out_features, self.in_features, self.is_packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` to ``[..., N]``."""
        if x.dim() == 2:
            return self._tiled(x, "none")
        return self._tiled(x.reshape(-1, self.in_features), "none").view(*x.shape[:-1], self.out_features)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """The product, then ``y * sigmoid(y)``."""
        return self._tiled(x, "swish")

    # The kernels could add and multiply, too, but setting that up takes as long again as setting up the product.

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product plus `other` ``[n, N]``."""
        return self._tiled(x, "none").add_(other)

    def mul(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product times `other` ``[n, N]``, element by element."""
        return self._tiled(x, "none").mul_(other)

    def _tiled(self, x: torch.Tensor, then: str) -> torch.Tensor:
        rows = len(x)
        if self.tiles.fit(rows):
            return self._product(x, then)
        padding = -rows % self.tiles.step
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
        parts = [self._product(x[part], then) for part in self.tiles.parts(len(x))]
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[:rows]

    def _product(self, x: torch.Tensor, then: str = "none") -> torch.Tensor:
        if self.is_packed:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, then, [], "")
            return packed
        product = functional.linear(x, self._weight, self._bias)
        return functional.silu(product, inplace=True) if then == "swish" else product

    def is_invariant(self, tiles: Tiles) -> bool:
        """Whether the result of a row is the same, bit by bit, in all `tiles` (bounded ones) and places in them."""
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


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16)


def fuse(*layers: torch.nn.Linear) -> Linear:
    """One layer whose result is the results of `layers`, one after another."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) != len(layers):
        raise ValueError("all layers must have a bias, or none")
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight
    return Linear(weight, torch.cat(biases) if biases else None)


def replace_linears(module: torch.nn.Module) -> None:
    """Put a `Linear` in place of every ``torch.nn.Linear`` inside `module`, and let go of the originals."""
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear:
            setattr(module, name, fuse(child))
        else:
            replace_linears(child)


def linears(module: torch.nn.Module) -> Iterator[Linear]:
    """Every `Linear` inside `module`."""
    return (child for child in module.modules() if isinstance(child, Linear))
