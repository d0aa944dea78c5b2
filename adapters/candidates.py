"""The likeliest tokens of rows of logits, found without sorting a row.

A row is read once, for the maximum of each block of 64 tokens. The `n` highest tokens are in the
`n` blocks with the highest maxima, so that all else happens on a small part of the row. Where more
of a row is needed than a few hundred tokens, a sample tells where to look. What happens to a row
never depends on the rows beside it. Everything but `prefix_of_mass` works on any torch device.
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
"""Keys of a row, about, that are looked at to guess where a prefix ends."""

_FEW = 4
"""Up to one token in so many, tokens are picked out of it, above it all of the row is looked at."""

_ERRORS = 3.5
"""Standard errors that what a sample says may be wrong by."""

_PIECE = 16
"""So many neighbours are looked at together: they cost no more than one."""


def num_blocks(width: int) -> int:
    """Blocks of a row; the last may be partly filled."""
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
    # columns beyond the row repeat its last one, which comes earlier and therefore wins
    columns = (first + torch.arange(BLOCK, device=values.device)).clamp_(max=values.shape[1] - 1)
    if rows is None:
        picked = values.gather(1, columns)
    else:
        picked = values[rows[:, None], columns]
    return columns.gather(1, picked.argmax(-1, keepdim=True)).squeeze(1)


def top(
    values: torch.Tensor, count: int, maxima: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest values and their ids, as ``torch.topk`` finds them; of equal values any.

    Args:
        values: floating ``[B, V]``.
        count: How many, at most V.
        maxima: `block_maxima` of `values`, of the selected rows if `rows` is given.
        rows: int64 ``[R]``, all rows by default.

    Returns:
        Values, descending, and int64 ids, both ``[R, count]``. Every other value of a row is at
        most its last one.
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
    found, places = top(_take_blocks(values, chosen, rows), count)
    ids = chosen.gather(1, (places // BLOCK).clamp_(max=count - 1)) * BLOCK + places % BLOCK
    if whole * BLOCK == width:
        return found, ids
    return found, torch.where(places < count * BLOCK, ids, places + (whole - count) * BLOCK)


def top_in_order(
    values: torch.Tensor, count: int, maxima: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `top`, with ties ordered by rising id.

    Of the values that tie with the last one returned, any may be left out.

    On the CPU a lower bound of the last value is found first, and what reaches it is sorted, by
    numpy, whose sort is ten times as fast as torch's.

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
    keys = np.sort((ids.numpy() << 31) | np.arange(ids.shape[1]), axis=-1)
    return torch.from_numpy(keys >> 31), torch.from_numpy(keys & _LAST_ID)


def _lower_bounds(maxima: torch.Tensor, count: int, strides: int) -> torch.Tensor:
    """``[R, 1]``: at most the `count`-th highest maximum of each row, and seldom much less."""
    whole = maxima.shape[1] // strides
    highest = maxima[:, : whole * strides].view(len(maxima), strides, whole).amax(1)
    return torch.from_numpy(np.sort(highest.numpy(), axis=-1)[:, -count, None])


def _reaching(
    values: torch.Tensor, maxima: torch.Tensor, bounds: torch.Tensor, rows: torch.Tensor | None, room: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], torch.Tensor]:
    """Sort keys ``[R, room]`` of the values at or above their row's bound, and the overfull rows.

    Overfull rows have more than `room` such values.

    A key rises with the value and, of equal values, falls with the id. Keys without a token are the
    lowest.
    """
    reaching = (maxima >= bounds).numpy()
    crowded = np.array([np.count_nonzero(row) > room for row in reaching])
    reaching[crowded] = False
    row, block = np.divmod(np.flatnonzero(reaching), maxima.shape[1])
    picked = _blocks_of(values, row if rows is None else rows.numpy()[row], block)
    places = np.flatnonzero((picked >= bounds[torch.from_numpy(row)]).numpy())
    owner, column = row[places // BLOCK], block[places // BLOCK] * BLOCK + places % BLOCK
    starts = np.searchsorted(owner, np.arange(len(maxima) + 1))
    crowded |= np.diff(starts) > room
    reached = _sort_keys(picked.view(-1)[torch.from_numpy(places)].numpy(), column)
    keys = np.full((len(maxima), room), np.iinfo(np.int64).min)
    rank = np.arange(len(owner)) - starts[owner]
    fits = rank < room
    keys[owner[fits], rank[fits]] = reached[fits]
    return keys, torch.from_numpy(np.flatnonzero(crowded))


def _blocks_of(
    values: torch.Tensor, row: np.ndarray[Any, np.dtype[np.int64]], block: np.ndarray[Any, np.dtype[np.int64]]
) -> torch.Tensor:
    """Blocks ``[n, BLOCK]``; what is beyond the row's end is -inf."""
    width = values.shape[1]
    if width % BLOCK == 0 and values.is_contiguous():
        return values.view(-1, BLOCK).index_select(0, torch.from_numpy(row * (width // BLOCK) + block))
    columns = torch.from_numpy(block[:, None] * BLOCK + np.arange(BLOCK))
    picked = values[torch.from_numpy(row)[:, None], columns.clamp(max=width - 1)]
    return picked.masked_fill_(columns >= width, -torch.inf)


def _order_ties(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By falling value and rising id."""
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
    found, places = values.gather(1, ids).topk(count, dim=-1)
    return found, ids.gather(1, places)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    whole = values.shape[1] // BLOCK
    return values[:, : whole * BLOCK].view(len(values), whole, BLOCK)


def _take_blocks(values: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The chosen blocks of each row side by side, then what no block covers."""
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

    A sample says between which keys the prefix surely ends. Only what is between them is sorted.
    The sum of all that is above proves the end; where it does not, the keys are told apart by a
    histogram of all, and at last all are sorted.

    Args:
        keys: float32 ``[V]``, without NaN.
        masses: int64 ``[V]``, each `zero` more than the mass, which is at least 0.
        total: What the masses add up to, below 2**62.
        target: From 1 to `total`.
        zero: See `masses`.

    Returns:
        Ids, rising, with all of the prefix among them, None for all ids; and their masses, int64, 0
        for those that are not part of it.
    """
    key, mass = keys.numpy(), masses.numpy()
    for low, high in _brackets(key, mass, total - target, zero):
        reaching = key >= low
        ids = None
        if _FEW * np.count_nonzero(reaching) < len(key):
            ids = np.flatnonzero(reaching)
            kept = _prefix(key.take(ids), mass.take(ids) - zero, target, None, high)
        else:  # what is picked by a mask of no pattern costs more than it saves
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

    The bracket is what is `reaching` its lower bound (everything if None) and not above `high`.
    """
    above = key > high
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
    """Pairs of keys that the prefix ends between, more and more surely."""
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
    places, highest, width = _buckets(key)
    masses = np.bincount(places, mass.astype(np.float64), _BUCKETS)
    below = masses[::-1].cumsum()  # in the lowest buckets, the more of them the further on
    end = int(below.searchsorted(left_out))
    count = int(np.count_nonzero(places >= _BUCKETS - 1 - end))
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
    places = np.subtract(highest, key, dtype=np.float64)
    places *= 1 / width
    return np.minimum(places, _BUCKETS - 1).astype(np.int32), highest, width


def _sort_keys(
    values: np.ndarray[Any, np.dtype[np.float32]], ids: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Distinct int64 keys that rise with the value and, in ties, fall with the id (low 31 bits)."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # -0.0 is 0.0
    return ((bits ^ ((bits >> 63) & _LAST_ID)) << 31) | (_LAST_ID - ids)
