"""Weights of whole rows of logits in Triton, as integers: the tokens of the CPU's kernels.

The weight of a token is the one of `adapters.sampling.weights`, and the exponential that of
`native/exponential.h`: single operations in float64, none of them fused, in its order. Sums of
integers are exact in any order, so that a row's token is the CPU's.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from adapters.sampling.weights import rounding, weight_bits

_BLOCK = 1024
_TO_WHOLE = tl.constexpr(1.5 * 2.0**52)
_LOG2_E = tl.constexpr(float.fromhex("0x1.71547652b82fep+0"))
_LN_2_HIGH = tl.constexpr(float.fromhex("0x1.62e42feep-1"))
_LN_2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))
_EVEN_8 = tl.constexpr(float.fromhex("0x1.ad1fda447c0ffp-26"))
_EVEN_6 = tl.constexpr(float.fromhex("0x1.71df55b256e22p-19"))
_EVEN_4 = tl.constexpr(float.fromhex("0x1.a01a011bd30b9p-13"))
_EVEN_2 = tl.constexpr(float.fromhex("0x1.11111111289abp-7"))
_EVEN_0 = tl.constexpr(float.fromhex("0x1.5555555555501p-3"))
_ODD_7 = tl.constexpr(float.fromhex("0x1.289fb14c72d07p-22"))
_ODD_5 = tl.constexpr(float.fromhex("0x1.a019ab0993fbcp-16"))
_ODD_3 = tl.constexpr(float.fromhex("0x1.6c16c17ccd801p-10"))
_ODD_1 = tl.constexpr(float.fromhex("0x1.55555555531eap-5"))
_SMALLEST = tl.constexpr(-708.0)


@triton.jit
def _exponential(x):
    """exp(x) of float64 at most 709; 0 below -708: see ``native/exponential.h``."""
    shifted = x * _LOG2_E + _TO_WHOLE
    whole = shifted - _TO_WHOLE
    high = x - whole * _LN_2_HIGH
    low = whole * _LN_2_LOW
    r = high - low
    square = r * r
    even = square * _EVEN_8 + _EVEN_6
    odd = square * _ODD_7 + _ODD_5
    even = even * square + _EVEN_4
    odd = odd * square + _ODD_3
    even = even * square + _EVEN_2
    odd = odd * square + _ODD_1
    even = even * square + _EVEN_0
    even = even + r * odd
    even = square * (0.5 + r * even) - low
    even = 1.0 + (high + even)
    bits = even.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    return tl.where(x >= _SMALLEST, bits, 0).to(tl.float64, bitcast=True)


@triton.jit
def _weights(
    entry,
    block,
    logits_pointer,
    rows_pointer,
    divisors_pointer,
    highest_pointer,
    lowest_pointer,
    numbers_pointer,
    width,
    BLOCK: tl.constexpr,
):
    """int64 weights of a block of a row."""
    start = tl.load(rows_pointer + entry) * width
    divisor, highest = tl.load(divisors_pointer + entry), tl.load(highest_pointer + entry)
    lowest, offset = tl.load(lowest_pointer + entry), tl.load(numbers_pointer)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_pointer + start + token, mask=token < width, other=float("-inf"))
    logit = tl.div_rn(logit, tl.zeros((BLOCK,), tl.float32) + divisor)
    exponential = _exponential(logit.to(tl.float64) - highest.to(tl.float64))
    units = (exponential + offset).to(tl.int64, bitcast=True) - offset.to(tl.int64, bitcast=True)
    return tl.where((token < width) & (logit >= lowest) & (logit > float("-inf")), units, 0)


@triton.jit
def _weigh(
    logits_pointer,
    rows_pointer,
    divisors_pointer,
    highest_pointer,
    lowest_pointer,
    numbers_pointer,
    masses_pointer,
    width,
    BLOCK: tl.constexpr,
):
    entry, block = tl.program_id(0), tl.program_id(1)
    units = _weights(
        entry,
        block,
        logits_pointer,
        rows_pointer,
        divisors_pointer,
        highest_pointer,
        lowest_pointer,
        numbers_pointer,
        width,
        BLOCK,
    )
    tl.store(masses_pointer + entry * tl.num_programs(1) + block, tl.sum(units, 0))


@triton.jit
def _draw(
    logits_pointer,
    rows_pointer,
    divisors_pointer,
    highest_pointer,
    lowest_pointer,
    numbers_pointer,
    masses_pointer,
    uniforms_pointer,
    found_pointer,
    width,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    entry = tl.program_id(0)
    place = tl.arange(0, BLOCKS)
    masses = tl.load(masses_pointer + entry * blocks + place, mask=place < blocks, other=0)
    total = tl.sum(masses, 0)
    point = (total.to(tl.float64) * tl.load(uniforms_pointer + entry)).to(tl.int64)
    point = tl.minimum(point, total - 1)
    block = tl.sum((tl.cumsum(masses, 0) <= point).to(tl.int64), 0)
    point -= tl.sum(tl.where(place < block, masses, 0), 0)
    units = _weights(
        entry,
        block,
        logits_pointer,
        rows_pointer,
        divisors_pointer,
        highest_pointer,
        lowest_pointer,
        numbers_pointer,
        width,
        BLOCK,
    )
    token = block * BLOCK + tl.sum((tl.cumsum(units, 0) <= point).to(tl.int64), 0)
    tl.store(found_pointer + entry * 2, token)
    tl.store(found_pointer + entry * 2 + 1, total)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    divisors: torch.Tensor,
    highest: torch.Tensor,
    lowest: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """A token of each row by the weights of all of its tokens, and their sum; int64 ``[n, 2]``.

    Args:
        logits: float32 ``[B, V]``, contiguous, finite or -inf.
        rows: Indices of the rows, int64 ``[n]``.
        divisors: Divisor of the logits of each, float32 ``[n]``.
        highest: Highest logit of each, divided, float32 ``[n]``; finite.
        lowest: Lowest divided logit that has a weight, float32 ``[n]``; -inf if off.
        uniforms: Random number in [0, 1) of each, float64 ``[n]``.
    """
    count, width = len(rows), logits.shape[1]
    blocks = -(-width // _BLOCK)
    offset, _ = rounding(weight_bits(width))
    numbers = torch.full((1,), offset, dtype=torch.float64, device=logits.device)
    masses = torch.empty(count, blocks, dtype=torch.int64, device=logits.device)
    found = torch.empty(count, 2, dtype=torch.int64, device=logits.device)
    if count:
        given = (logits, rows, divisors, highest, lowest, numbers, masses)
        options = {"BLOCK": _BLOCK, "enable_fp_fusion": False, "num_warps": 4}
        _weigh[count, blocks](*given, width, **options)
        _draw[count,](*given, uniforms, found, width, blocks, BLOCKS=1 << math.ceil(math.log2(blocks)), **options)
    return found
