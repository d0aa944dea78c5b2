"""Layout of KV in a store of pages, which two workers' stores must have in common.

Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Properties that the KV of two workers must have in common.

    Attributes:
        model: Fingerprint of configuration and weights.
        dtype: Data type of keys and values; see `KvStore.dtype_name`.
        layers: Layers with a KV store.
        kv_heads: Heads of keys and values.
        head_dim: Elements of a row of the store's tensors: of a head and token; or codes, with the
            scale as some.
        block_size: Tokens per block.
        page_size: Tokens per page.
        numerics: Kernels that computed it, as far as bits depend on them; see
            `numerics.Numerics.made_by`.
    """

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    page_size: int
    numerics: str = "fast"

    def difference(self, other: KvLayout) -> str | None:
        """The first difference, with both values (`other` is the prefill worker's), or None."""
        for name in (field.name for field in fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} is {theirs!r} on the prefill worker and {ours!r} on this decode worker"
        return None


def pieces(
    layout: KvLayout, target: Sequence[int], source: Sequence[int], start: int, stop: int, most: int
) -> list[list[int]]:
    """Contiguous pieces of positions ``[start, stop)`` in one tensor of a store.

    The tensor is ``[pages, heads, page_size, head_dim]``. A whole page is one piece, together with
    its neighbours where both sides have them in a row, up to `most` elements; part of a page is one
    piece per head.

    Args:
        layout: Layout of both sides.
        target: The decode worker's pages, in order.
        source: The prefill worker's pages, in order.
        start: First position.
        stop: Past the last position.
        most: Elements of pages that are one piece, at most.

    Returns:
        ``[target offset, source offset, length]`` of each piece, in elements.
    """
    size, heads, width = layout.page_size, layout.kv_heads, layout.head_dim
    row, whole = size * width, heads * size * width
    found: list[list[int]] = []
    for index in range(start // size, -(-stop // size)):
        first, end = max(start - index * size, 0), min(stop - index * size, size)
        to, of = target[index] * whole, source[index] * whole
        if end - first < size:
            for head in range(heads):
                skip = head * row + first * width
                found.append([to + skip, of + skip, (end - first) * width])
        elif found and found[-1][2] % whole == 0 and found[-1][2] + whole <= most and _follows(found[-1], to, of):
            found[-1][2] += whole
        else:
            found.append([to, of, whole])
    return found


def _follows(piece: list[int], to: int, of: int) -> bool:
    return piece[0] + piece[2] == to and piece[1] + piece[2] == of


def descriptors(
    found: list[list[int]], sides: Sequence[tuple[Sequence[int] | Array, int]], itemsize: int
) -> list[Array]:
    """Address, size in bytes and device ``[n, 3]`` of `found` in all tensors, of either side.

    Args:
        found: Result of `pieces`.
        sides: Addresses of the tensors and the index of their device: the decode worker's, and the
            prefill worker's.
        itemsize: Bytes per element.
    """
    table = np.array(found, dtype=np.uint64) * np.uint64(itemsize)
    tables = []
    for column, (bases, device) in enumerate(sides):
        rows = np.empty((len(bases), len(found), 3), dtype=np.uint64)
        np.add(np.asarray(bases, dtype=np.uint64)[:, None], table[:, column], out=rows[:, :, 0])
        rows[:, :, 1] = table[:, 2]
        rows[:, :, 2] = device
        tables.append(rows.reshape(-1, 3))
    return tables


def slices(sizes: Array | npt.NDArray[np.int64], limit: int) -> list[tuple[int, int]]:
    """Consecutive ranges of descriptors of `limit` bytes at most, or of one descriptor."""
    if len(sizes) and int(sizes.sum()) <= limit:
        return [(0, len(sizes))]
    ranges, first, total = [], 0, 0
    for index, size in enumerate(sizes.tolist()):
        if index > first and total + size > limit:
            ranges.append((first, index))
            first, total = index, 0
        total += size
    if len(sizes) > first:
        ranges.append((first, len(sizes)))
    return ranges


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Address and size of memory ranges, in the order of addresses, adjacent ones made one.

    What is registered as one has one remote key, and every handle carries the keys.
    """
    found: list[tuple[int, int]] = []
    for address, size in sorted(ranges):
        if found and sum(found[-1]) == address:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((address, size))
    return found
