"""The one rule of a prefix of probability, and the ways to find where a prefix ends.

The prefix of a row is the shortest one, by falling key and rising id, whose integer mass is at
least the target (`weights.share_of`). Integer sums are exact in any order, so each of these finds
the same prefix, to which `tests/engines/sampling/test_prefix_rule.py` holds all of them:

* `prefix_of_ordered`, in rows that are in this order already;
* `beyond_prefix`, in whole rows on any device;
* `prefix_of_mass`, in one row on the CPU, without sorting it;
* the native kernel of `whole_row`, which weighs the tokens as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from adapters.sampling.candidates import LAST_ID, sort_keys

_BUCKETS = 1024
_SAMPLE = 3000
"""Approximate size of the sample of a row that estimates where the nucleus ends."""

_FEW = 4
"""The nucleus is gathered if it is at most 1 / _FEW of the row; else whole rows are masked."""

_ERRORS = 3.5
"""Half-width of the first bracket, standard errors of the sample's estimate."""

_PIECE = 16
"""Neighbouring keys sampled together: one cache line of float32 costs no more than one key."""


def prefix_of_ordered(masses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The masses of the prefixes of rows that are in order, with 0 for what follows them.

    Args:
        masses: int64 ``[R, n]``, by falling key and rising id.
        targets: int64 ``[R, 1]``, at least 1.
    """
    return masses * (masses.cumsum(-1) - masses < targets)


def mass_among(keys: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """The mass up to which a prefix is among the highest tokens of some rows, int64 ``[R]``.

    That of the tokens that do not tie with the last one: they precede every token left out.

    Args:
        keys: float ``[R, n]``, falling.
        masses: int64 ``[R, n]``.
    """
    return (masses * (keys > keys[:, -1:])).sum(-1)


def beyond_prefix(keys: torch.Tensor, masses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mask of the tokens that follow the prefixes of some rows, bool ``[R, V]``; sync-free.

    Args:
        keys: float ``[R, V]``. A row with NaN ends anywhere.
        masses: int64 ``[R, V]``, at least 0, row sums below 2**62.
        targets: int64 ``[R, 1]``, at least 1. A row of less mass has no such token.
    """
    last, before = _ends(keys, masses, targets)
    # of the tokens that tie with the last key, the lower ids are kept until the target is met
    tied = keys == last
    spent = before + (masses * tied).cumsum(-1) - masses
    return (keys < last) | (tied & (spent >= targets))


def _ends(keys: torch.Tensor, masses: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends of the prefixes of `beyond_prefix`; a row of less mass ends with its last key.

    Returns:
        The key of the last token, ``[R, 1]``, and the mass of all tokens with higher keys, int64
        ``[R, 1]``.
    """
    ordered, order = torch.sort(keys, dim=-1, descending=True)
    reached = masses.gather(1, order).cumsum_(-1)
    ends = (reached < targets).sum(-1, keepdim=True).clamp_(max=keys.shape[1] - 1)
    last = ordered.gather(1, ends)
    return last, (masses * (keys > last)).sum(-1, keepdim=True)


def prefix_of_mass(
    keys: torch.Tensor, masses: torch.Tensor, total: int, target: int, zero: int = 0
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The shortest prefix of one row whose mass is at least `target`; CPU only.

    The last key is bracketed, first by a sample of the row, and only the keys within the bracket
    are sorted. The exact sum of the masses above the bracket proves that the prefix ends in it; if
    it does not, a histogram of all keys brackets it again, and at last all keys are sorted. So the
    result is exact, and sampling decides the cost alone.

    Args:
        keys: float32 ``[V]``, without NaN.
        masses: int64 ``[V]``, each the mass (at least 0) plus `zero`.
        total: Sum of the masses, below 2**62.
        target: Mass from 1 to `total`.
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
    near = near[LAST_ID - (np.sort(sort_keys(key.take(near), np.arange(len(near))))[::-1] & LAST_ID)]
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
