"""Top-k and nucleus candidates of rows of logits, found without sorting a whole row.

A row is read once, for the maximum of each block of 64 tokens. The `n` highest tokens are in the
`n` blocks with the highest maxima, so that everything else works on a small part of the row. Where
the nucleus holds more than a few hundred tokens, a sample of the row locates its end.
Batch-invariant: a row's result never depends on the other rows. Everything but `prefix_of_mass`
works on any torch device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_LAST_ID = 2**31 - 1

BLOCK = 64
"""Tokens per block."""

_STRIDES = 8
_BUCKETS = 1024
_SAMPLE = 3000
"""Approximate size of the sample of a row that estimates where the nucleus ends."""

_FEW = 4
"""The nucleus is gathered if it is at most 1 / _FEW of the row; else whole rows are masked."""

_ERRORS = 3.5
"""Half-width of the first bracket, standard errors of the sample's estimate."""

_PIECE = 16
"""Neighbouring keys sampled together: one cache line of float32 costs no more than one key."""


def num_blocks(width: int) -> int:
    """Number of blocks of a row; the last may be partial."""
    return -(-width // BLOCK)


def block_maxima(values: torch.Tensor) -> torch.Tensor:
    """Block maxima ``[R, num_blocks(V)]`` of floating ``[R, V]``; NaN where a block holds NaN."""
    maxima = _blocks(values).amax(-1)
    tail = values[:, maxima.shape[1] * BLOCK :]
    return torch.cat((maxima, tail.amax(-1, keepdim=True)), 1) if tail.shape[1] else maxima


def highest_ids(values: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Argmax of each row; ties go to the lowest id.

    Ten times as fast as ``torch.argmax`` over whole rows, given the block maxima.

    Args:
        values: floating ``[B, V]``.
        maxima: `block_maxima` of `values`, of the selected rows if `rows` is given.
        rows: int64 ``[R]``, all rows by default.

    Returns:
        int64 ``[R]``. Meaningless for a row with NaN.
    """
    first = maxima.argmax(-1, keepdim=True) * BLOCK
    # columns beyond the row repeat its last column, whose earlier occurrence wins the argmax
    columns = (first + torch.arange(BLOCK, device=values.device)).clamp_(max=values.shape[1] - 1)
    if rows is None:
        picked = values.gather(1, columns)
    else:
        picked = values[rows[:, None], columns]
    return columns.gather(1, picked.argmax(-1, keepdim=True)).squeeze(1)


def top(
    values: torch.Tensor, count: int, maxima: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest values and their ids, as ``torch.topk``; ties in any order.

    Args:
        values: floating ``[B, V]``.
        count: How many, at most V.
        maxima: `block_maxima` of `values`, of the selected rows if `rows` is given.
        rows: int64 ``[R]``, all rows by default.

    Returns:
        Values, descending, and int64 ids, both ``[R, count]``. All other values of a row are at
        most the last one.
    """
    width = values.shape[1]
    if width <= 2 * _STRIDES * count:
        return (values if rows is None else values.index_select(0, rows)).topk(count, dim=-1)
    if width < 2 * BLOCK * count:
        return _top_of_strides(values if rows is None else values.index_select(0, rows), count)
    whole = width // BLOCK
    if maxima is None:
        maxima = block_maxima(values if rows is None else values.index_select(0, rows))
    chosen = top(maxima[:, :whole], count)[1]
    found, columns = top(_take_blocks(values, chosen, rows), count)
    ids = chosen.gather(1, (columns // BLOCK).clamp_(max=count - 1)) * BLOCK + columns % BLOCK
    if whole * BLOCK == width:
        return found, ids
    # the tail that no block covers was appended after the chosen blocks
    return found, torch.where(columns < count * BLOCK, ids, columns + (whole - count) * BLOCK)


def top_in_order(
    values: torch.Tensor, count: int, maxima: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `top`, with ties ordered by rising id.

    Of the values that tie with the last one returned, any may be left out.

    On the CPU a lower bound of the last value is found first, and the values at or above it are
    sorted by numpy, whose integer sort is ten times as fast as torch's.

    Args:
        values: float32 ``[B, V]``, without NaN.
        count: How many, at most V.
        maxima: `block_maxima` of `values`, of the selected rows if `rows` is given.
        rows: int64 ``[R]``, all rows by default.
    """
    if maxima is None:
        maxima = block_maxima(values if rows is None else values.index_select(0, rows))
    strides = next((n for n in (8, 4, 2) if maxima.shape[1] // n >= 2 * count), 0)
    if values.device.type != "cpu" or not strides or not len(maxima):
        return _order_ties(*top(values, count, maxima, rows))
    # Values rarely cluster at the bound: room for 4 * count of them serves nearly every row. The
    # overfull ones go through `top`.
    keys, crowded = _reaching(values, maxima, _lower_bounds(maxima, count, strides), rows, 4 * count)
    ids = torch.from_numpy(_LAST_ID - (np.sort(keys, axis=-1)[:, : -count - 1 : -1] & _LAST_ID))
    owners = torch.arange(len(maxima)) if rows is None else rows
    if len(crowded):
        ids[crowded] = _order_ties(*top(values, count, maxima[crowded], owners[crowded]))[1]
    return values[owners[:, None], ids], ids


def sort_ids(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``ids.sort(-1)`` for distinct ids ``[R, n]`` below 2**31, n up to 2**31."""
    if ids.device.type != "cpu":
        return ids.sort(dim=-1)
    # one int64 per id, with its index in the low bits: a plain sort yields the ids and the order
    keys = np.sort((ids.numpy() << 31) | np.arange(ids.shape[1]), axis=-1)
    return torch.from_numpy(keys >> 31), torch.from_numpy(keys & _LAST_ID)


def _lower_bounds(maxima: torch.Tensor, count: int, strides: int) -> torch.Tensor:
    """``[R, 1]``: a lower bound, usually tight, of each row's `count`-th highest maximum."""
    # The maximum over strided groups leaves fewer values to sort. The count-th highest of them is a
    # bound, since count groups hold at least one maximum each at or above it.
    whole = maxima.shape[1] // strides
    highest = maxima[:, : whole * strides].view(len(maxima), strides, whole).amax(1)
    return torch.from_numpy(np.sort(highest.numpy(), axis=-1)[:, -count, None])


def _reaching(
    values: torch.Tensor, maxima: torch.Tensor, bounds: torch.Tensor, rows: torch.Tensor | None, room: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], torch.Tensor]:
    """Sort keys ``[R, room]`` of the values at or above their row's bound, and the overfull rows.

    Overfull rows have more than `room` such values.

    A key rises with the value and, in ties, falls with the id. Unused entries hold the lowest key.
    """
    reaching = (maxima >= bounds).numpy()  # blocks that hold a value at or above the bound
    crowded = np.array([np.count_nonzero(row) > room for row in reaching])
    reaching[crowded] = False
    row, block = np.divmod(np.flatnonzero(reaching), maxima.shape[1])
    picked = _blocks_of(values, row if rows is None else rows.numpy()[row], block)
    flat = np.flatnonzero((picked >= bounds[torch.from_numpy(row)]).numpy())
    owner, column = row[flat // BLOCK], block[flat // BLOCK] * BLOCK + flat % BLOCK
    starts = np.searchsorted(owner, np.arange(len(maxima) + 1))
    crowded |= np.diff(starts) > room
    reached = _sort_keys(picked.view(-1)[torch.from_numpy(flat)].numpy(), column)
    keys = np.full((len(maxima), room), np.iinfo(np.int64).min)
    rank = np.arange(len(owner)) - starts[owner]
    fits = rank < room
    keys[owner[fits], rank[fits]] = reached[fits]
    return keys, torch.from_numpy(np.flatnonzero(crowded))


def _blocks_of(
    values: torch.Tensor, row: np.ndarray[Any, np.dtype[np.int64]], block: np.ndarray[Any, np.dtype[np.int64]]
) -> torch.Tensor:
    """Blocks ``[n, BLOCK]``, padded with -inf beyond the row's end."""
    width = values.shape[1]
    if width % BLOCK == 0 and values.is_contiguous():
        return values.view(-1, BLOCK).index_select(0, torch.from_numpy(row * (width // BLOCK) + block))
    columns = torch.from_numpy(block[:, None] * BLOCK + np.arange(BLOCK))
    picked = values[torch.from_numpy(row)[:, None], columns.clamp(max=width - 1)]
    return picked.masked_fill_(columns >= width, -torch.inf)


def _order_ties(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Order by falling value and rising id."""
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _top_of_strides(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `top`, by blocks of eight strided values: their maxima vectorise better."""
    width = values.shape[1]
    whole = width // _STRIDES
    maxima = values[:, : whole * _STRIDES].view(len(values), _STRIDES, whole).amax(1)
    chosen = top(maxima, count)[1]
    starts = torch.arange(0, whole * _STRIDES, whole, device=values.device)
    ids = (chosen[:, None, :] + starts[:, None]).flatten(1)
    if whole * _STRIDES < width:
        tail = torch.arange(whole * _STRIDES, width, device=values.device)
        ids = torch.cat((ids, tail.expand(len(values), -1)), 1)
    found, columns = values.gather(1, ids).topk(count, dim=-1)
    return found, ids.gather(1, columns)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    whole = values.shape[1] // BLOCK
    return values[:, : whole * BLOCK].view(len(values), whole, BLOCK)


def _take_blocks(values: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The chosen blocks of each row side by side, then the tail that no block covers."""
    whole = values.shape[1] // BLOCK
    if rows is None:
        rows = torch.arange(len(values), device=values.device)
    if whole * BLOCK == values.shape[1] and values.is_contiguous():
        flat = (chosen + rows[:, None] * whole).view(-1)
        return values.view(-1, BLOCK).index_select(0, flat).view(len(rows), -1)
    picked = _blocks(values)[rows[:, None], chosen].flatten(1)
    return torch.cat((picked, values[:, whole * BLOCK :].index_select(0, rows)), 1)


def prefix_of_mass(
    keys: torch.Tensor, masses: torch.Tensor, total: int, target: int, zero: int = 0
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The nucleus: shortest prefix, by falling key and rising id, of mass >= `target`; CPU only.

    The last key is bracketed, first by a sample of the row, and only the keys within the bracket
    are sorted. The exact sum of the masses above the bracket proves that the prefix ends in it; if
    it does not, a histogram of all keys brackets it again, and at last all keys are sorted. So the
    result is exact, and sampling decides the cost alone.

    Args:
        keys: float32 ``[V]``, without NaN.
        masses: int64 ``[V]``, each the mass (at least 0) plus `zero`.
        total: Sum of the masses, below 2**62.
        target: From 1 to `total`.
        zero: See `masses`.

    Returns:
        Rising ids that include the whole prefix (None: all ids), and their masses, int64, with 0
        for ids outside the prefix.
    """
    key, mass = keys.numpy(), masses.numpy()
    for low, high in _brackets(key, mass, total - target, zero):
        reaching = key >= low
        ids = None
        if _FEW * np.count_nonzero(reaching) < len(key):
            ids = np.flatnonzero(reaching)
            kept = _prefix(key.take(ids), mass.take(ids) - zero, target, None, high)
        else:  # gathering this many scattered keys would cost more than it saves
            kept = _prefix(key, mass - zero, target, reaching, high)
        if kept is not None:
            return None if ids is None else torch.from_numpy(ids), torch.from_numpy(kept)
    raise ValueError(f"the masses do not add up to {total}")


def _prefix(
    key: np.ndarray[Any, np.dtype[np.float32]],
    mass: np.ndarray[Any, np.dtype[np.int64]],
    target: int,
    reaching: np.ndarray[Any, np.dtype[np.bool_]] | None,
    high: float,
) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """`mass`, in place, with 0 outside the prefix; None if the prefix does not end in the bracket.

    The bracket holds the keys `reaching` its lower bound (all if None) and not above `high`.
    """
    above = key > high  # surely inside the prefix, if it ends in the bracket at all
    near = np.flatnonzero(~above if reaching is None else reaching & ~above)
    near = near[_LAST_ID - (np.sort(_sort_keys(key.take(near), np.arange(len(near))))[::-1] & _LAST_ID)]
    found = mass.take(near)
    mass *= above
    missing = target - int(mass.sum())
    reached = found.cumsum()
    if missing <= 0 or not len(near) or missing > reached[-1]:
        return None
    count = int(reached.searchsorted(missing)) + 1
    mass[near[:count]] = found[:count]
    return mass


def _brackets(
    key: np.ndarray[Any, np.dtype[np.float32]], mass: np.ndarray[Any, np.dtype[np.int64]], left_out: int, zero: int
) -> Iterator[tuple[float, float]]:
    """Brackets ``(low, high)`` of the prefix's last key, from cheap and likely to certain.

    First from a sample, widened by its error; then from a histogram of all keys, exact to a bucket;
    at last everything, which always holds the end.
    """
    stride = len(key) // _SAMPLE
    if stride:
        whole = len(key) // _PIECE * _PIECE
        sampled = key[:whole].reshape(-1, _PIECE)[::stride].ravel()
        yield _bracket(sampled, mass[:whole].reshape(-1, _PIECE)[::stride].ravel() - zero, left_out / stride, _ERRORS)
        yield _bracket(key, mass - zero, left_out, 0.0)
    yield -np.inf, np.inf


def _bracket(
    key: np.ndarray[Any, np.dtype[np.float32]],
    mass: np.ndarray[Any, np.dtype[np.int64]],
    left_out: float,
    errors: float,
) -> tuple[float, float]:
    """Bracket around the key with mass `left_out` below it, `errors` standard errors to each side.

    One bucket is added on each side, because keys are known to the bucket only.
    """
    buckets, highest, width = _buckets(key)
    masses = np.bincount(buckets, mass.astype(np.float64), _BUCKETS)
    # Cumulated from the low end: the tail that the prefix leaves out holds many keys of small mass,
    # so that a sample estimates its mass well; the mass of the head is dominated by a few keys.
    below = masses[::-1].cumsum()
    end = int(below.searchsorted(left_out))
    count = int(np.count_nonzero(buckets >= _BUCKETS - 1 - end))
    # relative standard error of a sum estimated from count samples
    error = min(1.0, errors / math.sqrt(max(count, 1)))
    first, last = (int(below.searchsorted(left_out * part)) for part in (1 - error, 1 + error))
    low, high = (highest - (_BUCKETS - number) * width for number in (first - 1, last + 2))
    return low, high


def _buckets(key: np.ndarray[Any, np.dtype[np.float32]]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], float, float]:
    """Bucket of each key, falling as the key rises; the highest key; the width of a bucket."""
    highest, lowest = float(key.max(initial=-np.inf)), float(key.min(initial=np.inf))
    if lowest == -np.inf:
        lowest = float(key[key > -np.inf].min(initial=highest))
    width = (highest - lowest) / _BUCKETS
    if not width > 0:
        return np.where(key < highest, np.int32(_BUCKETS - 1), np.int32(0)), highest, 0.0
    buckets = np.subtract(highest, key, dtype=np.float64)
    buckets *= 1 / width
    return np.minimum(buckets, _BUCKETS - 1).astype(np.int32), highest, width


def _sort_keys(
    values: np.ndarray[Any, np.dtype[np.float32]], ids: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Distinct int64 keys that rise with the value and, in ties, fall with the id (low 31 bits)."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # adding 0 turns -0.0 into 0.0
    # The bits of a float32 rise with it, except that negative ones fall: flipping their 31 low bits
    # makes all of them rise. The complement of the id below makes the lower id win a tie.
    return ((bits ^ ((bits >> 63) & _LAST_ID)) << 31) | (_LAST_ID - ids)
