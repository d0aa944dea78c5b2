"""Weights of tokens as integers, whose sums do not depend on the order in which they are added.

A token's weight is ``exp((z - max z) / T)``, computed in float64 and rounded to a multiple of
``2**-weight_bits(V)``; here it is counted in these units. The weights of a row sum to less than
2**62, so that every sum of them is exact in int64, whoever adds them up and in whatever order: a
few candidates, a whole row, or the threads of a GPU. A token with a weight below half a unit, 3e-14
of the likeliest token's, is never drawn.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import numpy as np
import torch

_MOST_BITS = 44

_NUMPY_IS_FASTER = torch.backends.cpu.get_cpu_capability() == "AVX512"


def weight_bits(vocab_size: int) -> int:
    """Fractional bits of a weight: 44, one less per doubling of the vocabulary from 262,144 on."""
    return min(_MOST_BITS, 62 - vocab_size.bit_length())


@lru_cache
def rounding(bits: int) -> tuple[float, int]:
    """The float64 that rounds a weight in [0, 1] to `bits` places when added, and its int64 bits.

    Between it and the next power of two, float64 numbers are ``2**-bits`` apart. So the bits of a
    sum, less the bits of the number, are the weight in units, rounded to the nearest, of two
    equally near ones to the even.
    """
    offset = 1.5 * 2.0 ** (52 - bits)
    return offset, int.from_bytes(struct.pack("<d", offset), "little")


def exponential_(values: torch.Tensor) -> torch.Tensor:
    """``values.exp_()`` of contiguous float64, by torch or numpy, whichever is faster here."""
    if values.device.type == "cpu" and _NUMPY_IS_FASTER:
        array = values.numpy()
        np.exp(array, out=array)
        return values
    return values.exp_()


def as_units(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """int64, of weights in [0, 1] in float64, whose memory it takes over. Of NaN any number."""
    offset, zero = rounding(bits)
    return weights.add_(offset).view(torch.int64).sub_(zero)


def logarithms(units: torch.Tensor, bits: int) -> torch.Tensor:
    """float64: the logarithms of weights, 0 for the likeliest token's, -inf for none."""
    return units.double().mul_(2.0**-bits).log_()


def share_of(totals: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """ceil(`totals` (int64) * `shares` (float64)), at most `totals`; a share of 1 is all."""
    wanted = (totals.double() * shares).ceil_().to(torch.int64)
    return torch.where(shares < 1, torch.minimum(wanted, totals), totals)


def points_in(totals: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The unit in ``range(totals)`` that each of `uniforms` (float64 in [0, 1]) falls on."""
    return torch.minimum((totals.double() * numbers).to(torch.int64), totals - 1)


def share_of_one(total: int, share: float) -> int:
    """`share_of` of one row."""
    return min(math.ceil(float(total) * share), total) if share < 1 else total


def point_in_one(total: int, number: float) -> int:
    """`points_in` of one row."""
    return min(int(float(total) * number), total - 1)
