"""Batch-invariant numerics: GEMM and attention shapes in which no row depends on the others.

Some kernels are batch-invariant by construction. Where torch's are depends on the processor, the
data type and the kernels that it chooses, so their shapes are tried at start, cheapest first, on
the model's own layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import pairwise

import torch

from worker.engines.embedded.attention import AttentionBackend, AttentionSizes
from worker.engines.embedded.kv_cache import KvStore, SequenceSlice, row_shape
from worker.engines.embedded.model.linear import Linear
from worker.engines.embedded.model.tiling import GemmTiling, LayerShape
from worker.engines.embedded.model.tiling_trial import is_invariant
from worker.engines.embedded.plan import TILE
from worker.errors import StartupError

_BLOCKS = (128, 96, 64)
"""Rows of a prompt's GEMMs where they have the bits of tiles of `TILE`; these are faster."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """The choice of what computes a model, and how.

    Attributes:
        name: ``exact`` or ``fast``.
        tilings: GEMM tilings by `Linear.shape`.
        attention: Attention backend.
        page_size: Tokens per page of the KV cache.
        num_threads: Threads that torch computes with.
    """

    name: str
    tilings: dict[LayerShape, GemmTiling]
    attention: AttentionBackend
    page_size: int
    num_threads: int

    @property
    def made_by(self) -> str:
        """The name and, where bits count, whose kernels compute them: those of others differ.

        The bits of torch's kernels depend on its version, instructions and threads too, and, since
        its attention merges page after page, on the size of a page; those of Triton's on what its
        compiler makes of them for a GPU.
        """
        if self.name == "fast":
            return self.name
        kernels = {shape.gemm.kernels for shape in self.tilings} | {self.attention.kernels}
        parts = [self.name, f"{' and '.join(sorted(kernels, reverse=True))} kernels"]
        if "torch" in kernels:
            parts += [shown_torch(), torch.backends.cpu.get_cpu_capability(), shown_threads(self.num_threads)]
        if "triton" in kernels:
            major, minor = torch.cuda.get_device_capability()
            parts += [f"Triton {version('triton')}", f"compute capability {major}.{minor}"]
        if self.attention.kernels == "torch":
            parts.append(f"pages of {self.page_size} tokens")
        return ", ".join(parts)


def shown_torch() -> str:
    """torch and its version as text."""
    return f"torch {torch.__version__.partition('+')[0]}"


def shown_threads(number: int) -> str:
    """A number of threads as text."""
    return f"{number} {'thread' if number == 1 else 'threads'}"


def choose(mode: str, layers: Iterable[Linear], attention: AttentionBackend, sizes: AttentionSizes) -> Numerics:
    """The numerics for `mode`, one of `config.NUMERICS`; ``auto`` is exact where that is cheap.

    Args:
        mode: The value of ``--numerics``.
        layers: The model's linear layers.
        attention: Attention backend, computing as fast as it can.
        sizes: Sizes of the model's attention.

    Raises:
        StartupError: exact was asked for, and this machine has no batch-invariant shapes.
    """
    distinct = {layer.shape: layer for layer in layers}
    where = sizes.page_size, torch.get_num_threads()
    fast = Numerics("fast", dict.fromkeys(distinct, GemmTiling()), attention, *where)
    if mode == "fast":
        return fast
    if sizes.device.type != "cpu" and not _by_construction(distinct, attention):
        if mode == "auto":
            return fast
        raise StartupError(
            f"--numerics exact: on {sizes.device} the results of torch's kernels depend on the batch; use fast or auto"
        )
    may_cost = mode == "exact"
    tilings = _invariant_tilings(distinct, sizes.dtype, may_cost)
    invariant = _invariant_attention(attention, sizes, may_cost) if tilings is not None else None
    if tilings is not None and invariant is not None:
        return Numerics("exact", tilings, invariant, *where)
    if mode == "exact":
        what = "GEMMs" if tilings is None else "attention"
        raise StartupError(f"--numerics exact: {what} in {sizes.dtype} depend on the batch on this machine; use fast")
    return fast


def tiling_of(layer: Linear, chosen: Numerics, dtype: torch.dtype) -> GemmTiling:
    """The tiling of a packed layer beside those of `chosen`: the one of its shape, if there is one.

    Raises:
        StartupError: its numerics are exact, and the layer has no batch-invariant tiling.
    """
    if layer.shape not in chosen.tilings and chosen.name == "exact":
        found = _invariant_tilings({layer.shape: layer}, dtype, may_cost=True)
        if found is None:
            raise StartupError(f"--numerics exact: GEMMs in {dtype} depend on the batch on this machine")
        return found[layer.shape]
    return chosen.tilings.get(layer.shape, GemmTiling())


def _by_construction(layers: Iterable[LayerShape], attention: AttentionBackend) -> bool:
    """Whether GEMMs and attention are batch-invariant by construction, so that nothing is tried."""
    return attention.is_batch_invariant and all(shape.gemm.is_batch_invariant for shape in layers)


def _invariant_tilings(
    distinct: dict[LayerShape, Linear], dtype: torch.dtype, may_cost: bool
) -> dict[LayerShape, GemmTiling] | None:
    """The cheapest tiling of each layer in which it is batch-invariant; None if one has none."""
    tilings: dict[LayerShape, GemmTiling] = {}
    for shape, layer in distinct.items():
        found: GemmTiling | None = GemmTiling()
        if not layer.gemm.is_batch_invariant:
            candidates = _tilings(may_cost)
            found = next((tiling for tiling in candidates if _is_gemm_invariant(tiling, layer, dtype)), None)
        if found is None:
            return None
        tilings[shape] = found
    return tilings


def _invariant_attention(backend: AttentionBackend, sizes: AttentionSizes, may_cost: bool) -> AttentionBackend | None:
    """`backend`, in the cheapest of its configurations that is batch-invariant; None if none is."""
    if backend.is_batch_invariant:
        return backend
    threads = torch.get_num_threads()
    return next((one for one in backend.candidates(sizes, may_cost) if _is_invariant(one, sizes, threads)), None)


def _tilings(may_cost: bool) -> list[GemmTiling]:
    steps = (1, 2, 4, 8, 16, TILE) if may_cost else (1, 2)
    return [GemmTiling(step, TILE, blocks) for blocks in (_BLOCKS, _BLOCKS[:1], ()) for step in steps]


_known: dict[tuple[object, ...], bool] = {}
"""Results of the trials of this process: a GEMM's sizes, tiling and threads, and whether it is
batch-invariant.
"""


def _is_gemm_invariant(tiling: GemmTiling, layer: Linear, dtype: torch.dtype) -> bool:
    key = (layer.shape, dtype, tiling, torch.get_num_threads())
    if key not in _known:
        _known[key] = is_invariant(layer, tiling)
    return _known[key]


@cache
def _is_invariant(backend: AttentionBackend, sizes: AttentionSizes, num_threads: int) -> bool:
    """Whether tokens get the same bits one by one, in chunks and together, in any page layout.

    `num_threads` is what torch computes with.
    """
    windows = (0, sizes.page_size // 2 + 2) if sizes.has_windows else (0,)
    return all(_is_invariant_in(window, backend, sizes) for window in windows)


def _is_invariant_in(window: int, backend: AttentionBackend, sizes: AttentionSizes) -> bool:
    page_size = sizes.page_size
    count = page_size + page_size // 2 + 3
    num_pages = -(-count // page_size)  # two; more of a few tokens each
    generator = torch.Generator().manual_seed(0)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(count, heads, sizes.head_dim, generator=generator).to(sizes.dtype)

    query, key, value = randn(sizes.heads), randn(sizes.kv_heads), randn(sizes.kv_heads)
    width, dtype = row_shape(sizes.head_dim, sizes.dtype, sizes.code_rows)
    shape = (4 * num_pages, sizes.kv_heads, page_size, width)
    keys, values = ([torch.zeros(shape, dtype=dtype)] for _ in range(2))
    store = KvStore(keys, values, sizes.code_rows)

    def attend(sequences: list[SequenceSlice]) -> torch.Tensor:
        positions = torch.cat([torch.arange(sequence.start, sequence.stop) for sequence in sequences])
        pages = torch.tensor(
            [sequence.page_table[p // page_size] for sequence in sequences for p in _positions(sequence)]
        )
        step = backend.plan(store, sequences, torch.stack((pages, positions % page_size)))
        scale = sizes.head_dim**-0.5
        return step.attend(0, query[positions], key[positions], value[positions], scale, window, sizes.softcap)

    # one sequence, stored three times: in pages that ascend, descend, and lie apart
    page_tables = (
        [*range(num_pages)],
        [*range(2 * num_pages, num_pages, -1)],
        [num_pages, *range(2 * num_pages + 2, 4 * num_pages, 2)],
    )
    expected = attend([SequenceSlice(page_tables[0], 0, count)])
    for table in page_tables[1:]:
        attend([SequenceSlice(table, 0, count)])
    sample = sorted({*range(0, count, 23), *range(min(count, 5)), page_size - 1, page_size})
    alone = [[SequenceSlice(page_tables[p % 3], p, p + 1)] for p in sample]
    together = [
        [SequenceSlice(page_tables[0], p, p + 1) for p in sample],
        [SequenceSlice(page_tables[p % 3], p, p + 1) for p in sample],
    ]
    chunks = [
        [SequenceSlice(page_tables[1], p, min(count, p + 7)), SequenceSlice(page_tables[2], 5, 6)] for p in sample
    ]
    cuts = sorted({0, min(33, count), min(70, count), count // 3, count // 2, count})
    long_chunks = [[SequenceSlice(page_tables[2], start, stop)] for start, stop in pairwise(cuts)]
    batches = [*alone, *together, *chunks, *long_chunks]
    return all(
        torch.equal(attend(sequences), expected[[p for s in sequences for p in _positions(s)]]) for sequences in batches
    )


def _positions(sequence: SequenceSlice) -> range:
    return range(sequence.start, sequence.stop)
