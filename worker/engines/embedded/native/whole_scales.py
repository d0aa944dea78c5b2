"""Scales and offsets of a quantised weight as whole numbers of a unit, for the GEMMs of integers.

A weight is ``scale * code + offset``. Each row of a weight has a unit, of which it is computed as
``unit * ((code - base) * step + offset)`` with whole numbers in the brackets, so that products with
rows in int8 are summed exactly over spans of up to `SPAN` elements (``integer.c``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SPAN = 128
"""Elements of a rounded row with one scale, at most: ``SPAN`` in ``rounded_rows.h``."""

_TILE = 64
"""A span is a multiple of it: ``DEPTH`` in ``rounded_rows.h``."""

_LARGEST = 32_512
"""Largest weight in units before it is rounded: what rounding of steps and offsets adds to it, 64.5
at most, leaves it below 2^15.
"""


_LEAST_UNIT = 2.0**-149
"""Unit of a row of zeros: the least float32."""


def span_of(inner: int) -> int:
    """Elements of each span of a row but the last one: as few spans of one length as can be."""
    spans = -(-inner // SPAN)
    return -(-inner // (spans * _TILE)) * _TILE


def step_of(group: int, inner: int) -> int:
    """Weights that share a step, where `group` share a scale."""
    span = span_of(inner)
    return span if group == inner else math.gcd(group, span)


@dataclass(frozen=True, slots=True)
class Codes:
    """Meaning of the codes of a weight.

    Attributes:
        base: The code whose weight is its offset.
        least: The least code that there can be, less `base`.
        most: The greatest one.
        has_powers: Whether scales are powers of two, as MXFP4's are: so are units then, and scales
            down to a 2048th of the largest one are whole numbers.
    """

    base: int
    least: int
    most: int
    has_powers: bool = False


NIBBLES, BYTES, E2M1 = Codes(8, -8, 7), Codes(0, -128, 127), Codes(0, -12, 12, True)


def whole_scales(
    scales: torch.Tensor, offsets: torch.Tensor | None, inner: int, codes: Codes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and units of a weight ``[N, inner]``.

    A unit is the largest magnitude that a code of its row can have, by `_LARGEST`, or the next
    power of two; a step is the scale in units, rounded to the nearest whole number, and so is an
    offset.

    Args:
        scales: float16 or float32 ``[N, groups]``, finite.
        offsets: The same, of code 0; None for those of ``codes.base`` being 0.
        inner: Weights of a row.
        codes: Meaning of the codes.

    Returns:
        Steps, int16 ``[N, n]``, or with offsets int32, of which the lower 16 bits are the step and
        the upper ones the offset, one for each `step_of` weights of a row; and units, float32
        ``[N, 1]``.
    """
    group = inner // scales.shape[1]
    wide = torch.float64 if scales.dtype == torch.float32 else torch.float32
    scale = scales.to(wide)
    if offsets is None:
        offset = None
        largest = scale.abs() * max(-codes.least, codes.most)
    else:
        offset = offsets.to(wide) + codes.base * scale
        largest = torch.maximum((codes.least * scale + offset).abs(), (codes.most * scale + offset).abs())
    units = (largest.amax(1, keepdim=True) / _LARGEST).clamp_min(_LEAST_UNIT).float()
    if codes.has_powers:
        units = torch.ones_like(units).ldexp(units.frexp().exponent)
    unit = units.to(wide)
    step = step_of(group, inner)
    repeats = -(-inner // step) if group == inner else group // step
    steps = (scale / unit).round()
    if offset is None:
        return steps.to(torch.int16).repeat_interleave(repeats, 1), units
    whole = (offset / unit).round().to(torch.int32) * 65_536
    return (whole + (steps.to(torch.int32) & 0xFFFF)).repeat_interleave(repeats, 1), units
