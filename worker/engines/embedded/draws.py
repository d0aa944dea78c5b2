"""Counter-based random numbers: a draw is a function of seed, choice, absolute position and purpose.

There is no generator to advance, so a token drawn at a position is the same whatever was drawn before it, beside
it or after it. The function is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), computed on the host in integers, hence equal on every device.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    TOKEN = 0
    PROCESSOR = 1


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10, elementwise: four 32-bit counter words and two key words, each held in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = c0 * _MULTIPLIERS[0]
        right = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _WORD) ^ c1 ^ k0, right & _LOW, (left >> _WORD) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: Words, positions: Words, *, choice: int = 0, purpose: Purpose = Purpose.TOKEN
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, one for each seed and position.

    Args:
        seeds: uint64 ``[n]``; the Philox key.
        positions: uint64 ``[n]``, index of the token in prompt + generated; the low half of the counter.
        choice: Index of the choice, below 2**32; the third word of the counter.
        purpose: The fourth word of the counter.
    """
    third, fourth = (np.full_like(positions, value) for value in (choice, int(purpose)))
    words = philox((positions & _LOW, positions >> _WORD, third, fourth), (seeds & _LOW, seeds >> _WORD))
    return ((words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))).astype(np.float64) * 2.0**-53


def uniform(seed: int, choice: int, position: int, purpose: Purpose) -> float:
    """One uniform number in [0, 1); see `uniforms`."""
    one = uniforms(np.array([seed], np.uint64), np.array([position], np.uint64), choice=choice, purpose=purpose)
    return float(one[0])
