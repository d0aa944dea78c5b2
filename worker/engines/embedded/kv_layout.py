"""Where the KV of a sequence lies in a store of segments, and what two stores must have in common. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What the KV of two workers must have in common.

    Attributes:
        model: Fingerprint of configuration and weights.
        dtype: Of keys and values.
        layers: Layers with a KV store.
        kv_heads: Heads of keys and values.
        head_dim: Elements per head.
        block_size: Tokens per block.
        segment_size: Tokens per segment.
    """

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    segment_size: int

    def difference(self, other: KvLayout) -> str | None:
        """The first attribute in which they differ, with both values (`other`'s is the prefill worker's), or None."""
        for name in (field.name for field in fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} is {theirs!r} on the prefill worker and {ours!r} on this decode worker"
        return None


def pieces(layout: KvLayout, target: Sequence[int], source: Sequence[int], start: int, stop: int) -> list[list[int]]:
    """The contiguous pieces of positions ``[start, stop)`` in one tensor ``[segments, heads, segment_size, head_dim]``.

    A whole segment is one piece, together with its neighbours where both sides have them in a row; part of a segment is
    one piece per head.

    Args:
        layout: Of both sides.
        target: The reader's segments, in order.
        source: The holder's segments, in order.
        start: First position.
        stop: Past the last position.

    Returns:
        ``[target offset, source offset, length]`` of each piece, in elements.
    """
    size, heads, width = layout.segment_size, layout.kv_heads, layout.head_dim
    row, whole = size * width, heads * size * width
    found: list[list[int]] = []
    for index in range(start // size, -(-stop // size)):
        first, end = max(start - index * size, 0), min(stop - index * size, size)
        to, of = target[index] * whole, source[index] * whole
        if end - first < size:
            for head in range(heads):
                skip = head * row + first * width
                found.append([to + skip, of + skip, (end - first) * width])
        elif found and found[-1][2] % whole == 0 and _follows(found[-1], to, of):
            found[-1][2] += whole
        else:
            found.append([to, of, whole])
    return found


def _follows(piece: list[int], to: int, of: int) -> bool:
    return piece[0] + piece[2] == to and piece[1] + piece[2] == of


def descriptors(
    found: list[list[int]], target: Sequence[int], source: Sequence[int], itemsize: int
) -> tuple[Array, Array]:
    """Addresses and sizes in bytes ``[n, 2]`` of `found` in all tensors: the reader's, and the holder's."""
    table = np.array(found, dtype=np.uint64) * np.uint64(itemsize)
    sides = []
    for column, bases in ((0, target), (1, source)):
        addresses = np.array(bases, dtype=np.uint64)[:, None] + table[None, :, column]
        sizes = np.broadcast_to(table[None, :, 2], addresses.shape)
        sides.append(np.stack([addresses.ravel(), sizes.ravel()], axis=1))
    return sides[0], sides[1]


def slices(sizes: Array, limit: int) -> list[tuple[int, int]]:
    """Consecutive ranges of descriptors of `limit` bytes at most, or of one descriptor."""
    ranges, first, total = [], 0, 0
    for index, size in enumerate(sizes.tolist()):
        if index > first and total + size > limit:
            ranges.append((first, index))
            first, total = index, 0
        total += size
    if len(sizes) > first:
        ranges.append((first, len(sizes)))
    return ranges
