"""Exact numerics: shapes of products and of attention calls in which a row's result is its own, bit
by bit.

Native kernels keep that in every shape. Which shapes torch's do depends on the processor, the data
type and the kernels that it chooses, so they are tried at start, cheapest first, on the model's own
layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from worker.engines.embedded.attention import AttentionStep, Kernel, Shapes
from worker.engines.embedded.kv_cache import KvStore, SequenceSlice
from worker.engines.embedded.model.gemm import NativeProduct
from worker.engines.embedded.model.linear import Linear, Shape, Tiles
from worker.engines.embedded.plan import TILE
from worker.errors import StartupError

_BLOCKS = (128, 96, 64)
"""Rows of a prompt's products, where they come out as in tiles of `TILE`; they are computed
faster.
"""

_PROBED_ENTRIES = 8

_ENTRY_QUERIES = 16
"""Queries in one entry of a call at most, as far as the heads that share keys allow."""


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What attention calls of a model look like, and whether native kernels compute them."""

    heads: int
    kv_heads: int
    width: int
    softcap: float | None
    page_size: int
    dtype: torch.dtype
    is_native: bool = False


@dataclass(frozen=True, slots=True)
class Numerics:
    """What was chosen: ``exact`` or ``fast``, and the shapes for it, of products by
    `Linear.shape`.
    """

    name: str
    tiles: dict[Shape, Tiles]
    shapes: Shapes

    @property
    def made_by(self) -> str:
        """The name and, where bits count, whose kernels they come from: those of others are
        different ones.
        """
        if self.name == "fast":
            return self.name
        products = {shape[-1] is NativeProduct for shape in self.tiles}
        native = products | {self.shapes.kernel is Kernel.NATIVE}
        return f"{self.name}, {' and '.join('native' if each else 'torch' for each in sorted(native))} kernels"


def choose(mode: str, layers: Iterable[Linear], sizes: AttentionSizes, device: torch.device) -> Numerics:
    """The numerics for `mode`, one of `config.NUMERICS`; ``auto`` is exact where that costs next to
    nothing.

    Native kernels are taken wherever there are any: they are the fastest, too.

    Raises:
        StartupError: exact was asked for, and this machine has no shapes for it.
    """
    distinct = {layer.shape: layer for layer in layers}
    any_tiles = dict.fromkeys(distinct, Tiles())
    fast = Numerics("fast", any_tiles, Shapes(Kernel.NATIVE if sizes.is_native else None))
    if mode == "fast" or (mode == "auto" and device.type != "cpu"):
        return fast
    if device.type != "cpu":
        raise StartupError("--numerics exact needs a CPU: results on CUDA depend on the batch; use fast or auto")
    may_cost = mode == "exact"
    tiles: dict[Shape, Tiles] = {}
    for shape, layer in distinct.items():
        found: Tiles | None = Tiles()
        if not layer.is_exact:
            found = next((one for one in _tiles(may_cost) if _is_product_invariant(one, layer, sizes.dtype)), None)
        if found is None:
            break
        tiles[shape] = found
    are_products = len(tiles) == len(distinct)
    shapes: Shapes | None = fast.shapes
    if not sizes.is_native:
        threads = torch.get_num_threads()
        shapes = next(
            (one for one in _shapes(sizes, may_cost) if are_products and _is_invariant(one, sizes, threads)), None
        )
    if are_products and shapes is not None:
        return Numerics("exact", tiles, shapes)
    if mode == "exact":
        what = "attention" if are_products else "matrix products"
        raise StartupError(f"--numerics exact: {what} in {sizes.dtype} depend on the batch on this machine; use fast")
    return fast


def _tiles(may_cost: bool) -> list[Tiles]:
    steps = (1, 2, 4, 8, 16, TILE) if may_cost else (1, 2)
    return [Tiles(step, TILE, blocks) for blocks in (_BLOCKS, _BLOCKS[:1], ()) for step in steps]


def _shapes(sizes: AttentionSizes, may_cost: bool) -> list[Shapes]:
    tile = max(1, _ENTRY_QUERIES * sizes.kv_heads // sizes.heads)
    # small products are computed by another kernel, so that those of a single token may need
    # padding
    products = [
        Shapes(Kernel.PRODUCTS, whole_pages=whole, query_multiple=multiple)
        for multiple in ((1, 8, 16) if may_cost else (1,))
        for whole in (False, True)
    ]
    # entries of one size and aligned, whatever the kernel makes of others
    costly = [Shapes(Kernel.FLASH, tokens, whole_pages=True, query_multiple=8) for tokens in (tile, 1)]
    return products + costly if may_cost else products


_known: dict[tuple[object, ...], bool] = {}
"""What has been tried in this process: a product's sizes, tiles and threads, and whether a row's
result is its own.
"""


def _is_product_invariant(tiles: Tiles, layer: Linear, dtype: torch.dtype) -> bool:
    key = (layer.shape, dtype, tiles, torch.get_num_threads())
    if key not in _known:
        _known[key] = layer.is_invariant(tiles)
    return _known[key]


@cache
def _is_invariant(shapes: Shapes, sizes: AttentionSizes, num_threads: int) -> bool:
    """Whether tokens get the same result one by one, in pieces and together, wherever their
    pages lie.

    `num_threads` is what torch computes with.
    """
    if shapes.kernel is Kernel.PRODUCTS and not _are_products_invariant(shapes, sizes):
        return False
    count = sizes.page_size + sizes.page_size // 2 + 3
    generator = torch.Generator().manual_seed(0)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(count, heads, sizes.width, generator=generator).to(sizes.dtype)

    query, key, value = randn(sizes.heads), randn(sizes.kv_heads), randn(sizes.kv_heads)
    shape = (8, sizes.kv_heads, sizes.page_size, sizes.width)
    store = KvStore(*([torch.zeros(shape, dtype=sizes.dtype)] for _ in range(2)))

    def attend(sequences: list[SequenceSlice]) -> torch.Tensor:
        positions = torch.cat([torch.arange(sequence.start, sequence.stop) for sequence in sequences])
        homes = torch.tensor(
            [sequence.page_table[p // sizes.page_size] for sequence in sequences for p in _positions(sequence)]
        )
        step = AttentionStep(store, sequences, torch.stack((homes, positions % sizes.page_size)), shapes)
        return step.attend(0, query[positions], key[positions], value[positions], sizes.width**-0.5, 0, sizes.softcap)

    homes = ([0, 1], [4, 3], [2, 6])
    expected = attend([SequenceSlice(homes[0], 0, count)])
    for home in homes[1:]:
        attend([SequenceSlice(home, 0, count)])
    sample = sorted({*range(0, count, 23), *range(min(count, 5)), sizes.page_size - 1, sizes.page_size})
    alone = [[SequenceSlice(homes[p % 3], p, p + 1)] for p in sample]
    together = [
        [SequenceSlice(homes[0], p, p + 1) for p in sample],
        [SequenceSlice(homes[p % 3], p, p + 1) for p in sample],
    ]
    pieces = [[SequenceSlice(homes[1], p, min(count, p + 7)), SequenceSlice(homes[2], 5, 6)] for p in sample]
    cuts = sorted({0, min(33, count), min(70, count), count // 3, count // 2, count})
    longer = [[SequenceSlice(homes[2], start, stop)] for start, stop in pairwise(cuts)]
    groups = [*alone, *together, *pieces, *longer]
    return all(
        torch.equal(attend(sequences), expected[[p for s in sequences for p in _positions(s)]]) for sequences in groups
    )


def _are_products_invariant(shapes: Shapes, sizes: AttentionSizes) -> bool:
    """Whether a query's two products come out the same whatever the number of queries, entries and
    keys of the call.

    In bfloat16 sums that were added in another order nearly always round to the same. So these sums
    are all 0, and what is left of the terms is what was lost in between.
    """
    group = sizes.heads // sizes.kv_heads
    numbers = [-(-group * tokens // shapes.query_multiple) * shapes.query_multiple for tokens in (64, 1, 2, 3, 7, 33)]
    half = sizes.page_size // 2
    for inner, outer in ((sizes.width, sizes.page_size), (sizes.page_size, sizes.width), (half, sizes.width)):
        queries, keys = _cancelling(_PROBED_ENTRIES * sizes.kv_heads, numbers[0], inner, outer, sizes.dtype)
        if inner == sizes.width:
            keys = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as keys lie in the store
        expected = torch.bmm(queries, keys)
        for entries in (1, 2, _PROBED_ENTRIES):
            matrices = entries * sizes.kv_heads
            for number in numbers:
                found = torch.bmm(queries[:matrices, :number].contiguous(), keys[:matrices])
                if not torch.equal(found, expected[:matrices, :number]):
                    return False
    return True


def _cancelling(
    matrices: int, rows: int, inner: int, outer: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[matrices, rows, inner]`` and ``[matrices, inner, outer]``, whose product is 0 but for
    rounding.
    """
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(matrices, rows, inner // 2, generator=generator).to(dtype)
    right = torch.randn(matrices, inner // 2, outer, generator=generator).to(dtype)
    order = torch.randperm(2 * (inner // 2), generator=generator)
    return torch.cat((left, left), 2)[:, :, order].contiguous(), torch.cat((right, -right), 1)[:, order].contiguous()


def _positions(sequence: SequenceSlice) -> range:
    return range(sequence.start, sequence.stop)
