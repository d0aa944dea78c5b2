"""Counter-based random numbers: u = f(seed, choice, absolute position, purpose).

There is no running generator: a number depends on these four words alone, so it is the same in any
batch, slot or worker, and after preemption or migration. ``purpose`` keeps a processor's numbers
independent of the sampler's. The hash is the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA
2014), chained over the words. The choice is added, times an odd constant, once the seed has been
mixed: neither a seed nor a position nearby has the numbers of another choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SAMPLE = 0
"""Purpose of the sampler. Processors use a constant of their own, from 1 to 2**32 - 1."""

SAMPLE_AGAIN = 2**32
"""Times n, purpose of the sampler where n tokens were sampled and ruled out before: a number that
has led to one of them would lead to its neighbour.
"""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_PER_CHOICE = 0xD1342543DE82EF95
_HIGHEST = 1 - 2.0**-53
"""The highest float64 below 1: the highest sum of 53 bits and a half is rounded to 1."""


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def key(seed: int, choice: int, position: int, purpose: int = SAMPLE) -> int:
    """64-bit hash of the four words; ``seed`` is a uint64."""
    state = _mix((seed + _GAMMA) & _MASK) + choice * _PER_CHOICE
    for word in (position, purpose):
        state = _mix((state + _GAMMA + word) & _MASK)
    return _mix((state + _GAMMA) & _MASK)


def uniform(seed: int, choice: int, position: int, purpose: int = SAMPLE) -> float:
    """A float64 in the open interval (0, 1), from the top 53 bits of `key`."""
    return min(((key(seed, choice, position, purpose) >> 11) + 0.5) * 2.0**-53, _HIGHEST)


def uniform_rows(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purposes: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`uniform` of many rows at once: float64 ``[R]``."""
    state = _mix_words(np.array(seeds, dtype=np.uint64) + np.uint64(_GAMMA))
    state += np.array(choices, dtype=np.uint64) * np.uint64(_PER_CHOICE)
    for words in (positions, purposes):
        state = _mix_words(state + np.uint64(_GAMMA) + np.array(words, dtype=np.uint64))
    return _as_uniform(_mix_words(state + np.uint64(_GAMMA)))


def uniforms(key_: int, count: int) -> torch.Tensor:
    """Float64 ``[count]`` in (0, 1): element i is a hash of ``key_`` and i on every machine."""
    return torch.from_numpy(_uniforms(key_, np.arange(count, dtype=np.uint64)))


def uniforms_at(key_: int, indices: torch.Tensor) -> torch.Tensor:
    """``uniforms(key_, n)[indices]`` without the other elements; ``indices`` are int64, >= 0."""
    return torch.from_numpy(_uniforms(key_, indices.cpu().numpy().astype(np.uint64)))


def _uniforms(key_: int, indices: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return _as_uniform(_mix_words(indices * np.uint64(_GAMMA) + np.uint64(key_ & _MASK)))


def _mix_words(words: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _as_uniform(words: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.minimum(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, _HIGHEST)
