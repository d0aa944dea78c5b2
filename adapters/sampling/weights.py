"""Weights of tokens as integers, whose sums do not depend on the order in which they are added.

A token's weight is ``exp(z - max z)`` of float32 logits that the temperature has divided already
(`truncation.divide_`), computed in float64 (`exponential_`) and rounded to a multiple of
``2**-weight_bits(V)``, its unit. The weights of a row sum to less than 2**62, so that every sum of
them is exact in int64 in any order: over candidates, over a whole row, or by the threads of a GPU.
A token with a weight below half a unit, 3e-14 of the highest, is never sampled.
"""

from __future__ import annotations

import math
import struct
from functools import cache, lru_cache

import numpy as np
import torch

from adapters.row_kernels import native_kernels

_MOST_BITS = 44


def weight_bits(vocab_size: int) -> int:
    """Fractional bits of a weight: 44, one less per doubling of the vocabulary from 262,144 on."""
    return min(_MOST_BITS, 62 - vocab_size.bit_length())


@lru_cache
def rounding(bits: int) -> tuple[float, int]:
    """The float64 that rounds a weight in [0, 1] to `bits` bits when added; and its own bits.

    Between this offset and the next power of two, float64 numbers are ``2**-bits`` apart. So the
    int64 bits of a sum, minus the bits of the offset, are the weight in units, rounded to nearest,
    ties to even: one addition replaces a multiplication, a rounding and a conversion.
    """
    offset = 1.5 * 2.0 ** (52 - bits)
    return offset, int.from_bytes(struct.pack("<d", offset), "little")


def exponential_(values: torch.Tensor) -> torch.Tensor:
    """``values.exp_()`` of contiguous float64, none above 709.

    On the CPU by the native kernels, whose bits are the same on every processor; without them by
    torch or numpy, whichever is faster here. That holds for the process.
    """
    kernels = native_kernels()
    if values.device.type == "cpu" and kernels is not None:
        return kernels.exponential_(values)
    if values.device.type == "cpu" and _numpy_is_faster():
        array = values.numpy()
        np.exp(array, out=array)
        return values
    return values.exp_()


@cache
def _numpy_is_faster() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def as_units(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 units of float64 weights in [0, 1], in place in their memory; undefined for NaN."""
    offset, zero = rounding(bits)
    return weights.add_(offset).view(torch.int64).sub_(zero)


def weigh(logits: torch.Tensor, highest: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 weights of float logits ``[R, n]``, whole rows or some of their tokens.

    Args:
        logits: Finite or -inf, which has the weight 0.
        highest: Highest logit of each row, finite, ``[R, 1]``; weights are undefined where it is
            not.
        vocab_size: Width of a whole row, which decides the unit.
    """
    return as_units(exponential_(logits.double() - highest.double()), weight_bits(vocab_size))


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    """int64 weights of float logits ``[R, V]``; 0 in a row whose highest logit is not finite."""
    highest = logits.amax(-1, keepdim=True)
    return weigh(logits, highest, logits.shape[1]).mul_(highest.isfinite())


def weights_of_probabilities(probabilities: torch.Tensor) -> torch.Tensor:
    """int64 weights of probabilities ``[R, V]``, at least 0, not all 0.

    They are scaled by a power of two that brings the highest into [1/2, 1), so that multiples of a
    power of two stay exact.
    """
    exponents = torch.frexp(probabilities.amax(-1, keepdim=True).double()).exponent
    one = torch.ones_like(exponents, dtype=torch.float64)
    half = exponents >> 1  # of a subnormal highest one, the whole power is beyond float64
    scaled = probabilities.double() * torch.ldexp(one, -half) * torch.ldexp(one, half - exponents)
    return as_units(scaled, weight_bits(probabilities.shape[1]))


def share_of(totals: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """ceil(`totals` (int64) * `shares` (float64)), from 1 to `totals`; a share of 1 is all."""
    wanted = (totals.double() * shares).ceil_().to(torch.int64)
    return torch.where(shares < 1, torch.minimum(wanted, totals), totals).clamp_(min=1)


def points_in(totals: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The unit in ``range(totals)`` that each of `uniforms` (float64 in [0, 1]) falls on."""
    return torch.minimum((totals.double() * uniforms).to(torch.int64), totals - 1)


def share_of_one(total: int, share: float) -> int:
    """`share_of` of one row."""
    return max(min(math.ceil(float(total) * share), total), 1) if share < 1 else max(total, 1)


def point_in_one(total: int, uniform: float) -> int:
    """`points_in` of one row."""
    return min(int(float(total) * uniform), total - 1)
