"""Counter-based draws: noise = f(seed, choice, absolute position, purpose), never a running generator.

A draw depends on these four alone, so it is the same in whatever batch, slot or worker it is made, and after any
preemption or migration. ``purpose`` keeps a processor's coin apart from the sampler's draw. The hash is the
SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), chained over the four words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SAMPLE = 0
"""Purpose of the sampler's own draw. Processors use a positive constant of their own."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def key(seed: int, choice: int, position: int, purpose: int = SAMPLE) -> int:
    """64-bit hash of the four words; ``seed`` is a uint64."""
    state = seed & _MASK
    for word in (choice, position, purpose):
        state = _mix((state + _GAMMA + word) & _MASK)
    return _mix((state + _GAMMA) & _MASK)


def uniform(seed: int, choice: int, position: int, purpose: int = SAMPLE) -> float:
    """A float64 in the open interval (0, 1), from the top 53 bits of `key`."""
    return ((key(seed, choice, position, purpose) >> 11) + 0.5) * 2.0**-53


def uniforms(key_: int, count: int) -> torch.Tensor:
    """Float64 ``[count]`` in (0, 1): element i is a hash of ``key_`` and i alone, the same on every machine."""
    return torch.from_numpy(_uniforms(key_, np.arange(count, dtype=np.uint64)))


def uniforms_at(key_: int, indices: torch.Tensor) -> torch.Tensor:
    """``uniforms(key_, n)[indices]`` at the cost of the indices only; ``indices`` are int64 and at least 0."""
    return torch.from_numpy(_uniforms(key_, indices.cpu().numpy().astype(np.uint64)))


def _uniforms(key_: int, indices: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    words = indices * np.uint64(_GAMMA) + np.uint64(key_ & _MASK)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
