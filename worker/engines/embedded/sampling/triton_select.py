"""Radix select in Triton: where prefixes end, bit for bit as `select_by_sorting`.

The bits of a float32, with the low 31 flipped for negative values, are an integer that rises with
it. From the highest digit (of four bits) to the lowest, the masses of the keys that match the
digits found so far are summed by their next digit; the end has the digit at which the cumulative
sum reaches the target. Integer sums do not depend on the order of the atomic additions. A row is
read eight times, mostly from cache, instead of being sorted.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_DIGITS = 8
"""Number of four-bit digits of a key."""


@triton.jit  # type: ignore[untyped-decorator]
def _known(sums, target, row, num_digits, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The first `num_digits` digits of a row's end, and the mass of all keys above them."""
    digit = tl.arange(0, 16)
    prefix = target * 0
    before = target * 0
    for digit_index in range(num_digits):
        found = tl.load(sums + (row * DIGITS + digit_index) * 16 + digit)
        above = tl.sum(found, 0) - tl.cumsum(found, 0)
        reaching = before + above + found >= target
        chosen = tl.max(tl.where(reaching, digit, 0), 0)
        before += tl.sum(tl.where(digit == chosen, above, 0), 0)
        prefix = prefix * 16 + chosen
    return prefix, before


@triton.jit  # type: ignore[untyped-decorator]
def _add_digits(  # type: ignore[no-untyped-def]
    keys,
    masses,
    targets,
    sums,
    width,
    digit_index,
    HAS_MASSES: tl.constexpr,  # noqa: N803
    DIGITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Add a block's masses to ``sums[row, digit_index]``, by that digit of keys with the prefix."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    prefix, _before = _known(sums, tl.load(targets + row), row, digit_index, DIGITS)
    # adding 0 turns -0.0 into 0.0
    bits = (tl.load(keys + row * width + column, mask=inside, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    here = rising >> (28 - 4 * digit_index)
    inside = inside & ((here >> 4) == prefix)
    if HAS_MASSES:
        mass = tl.load(masses + row * width + column, mask=inside, other=0)
    else:
        mass = inside.to(tl.int64)
    own = here & 15
    digit = tl.arange(0, 16)
    found = tl.zeros([16], tl.int64)
    for one in tl.static_range(16):
        found = tl.where(digit == one, tl.sum(tl.where(own == one, mass, 0), 0), found)
    tl.atomic_add(sums + (row * DIGITS + digit_index) * 16 + digit, found, mask=found != 0)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(targets, sums, lasts, befores, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    prefix, before = _known(sums, tl.load(targets + row), row, DIGITS, DIGITS)
    rising = (prefix - 0x80000000).to(tl.int32)
    bits = rising ^ ((rising >> 31) & 0x7FFFFFFF)
    tl.store(lasts + row, bits.to(tl.float32, bitcast=True))
    tl.store(befores + row, before)


def select_by_digits(
    keys: torch.Tensor, masses: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as `adapters.sampling.prefixes.select_by_sorting`, for contiguous tensors."""
    with torch.cuda.device(keys.device) if keys.is_cuda else nullcontext():
        return _select(keys, masses, targets)


def _select(
    keys: torch.Tensor, masses: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    count, width = keys.shape
    sums = torch.zeros(count, _DIGITS, 16, dtype=torch.int64, device=keys.device)
    grid = (count, triton.cdiv(width, _BLOCK))
    for digit_index in range(_DIGITS):
        _add_digits[grid](
            keys,
            keys if masses is None else masses,
            targets,
            sums,
            width,
            digit_index,
            masses is not None,
            _DIGITS,
            _BLOCK,
        )
    lasts, befores = torch.empty_like(targets, dtype=torch.float32), torch.empty_like(targets)
    _finish[(count,)](targets, sums, lasts, befores, _DIGITS)
    return lasts, befores
