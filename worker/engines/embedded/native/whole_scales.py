"""Scales and offsets of a quantised weight as whole numbers of a unit, for the GEMMs of integers.

A weight is ``scale * code + offset``. In each span of up to `SPAN` weights of a row it is computed as
``unit * ((code - base) * step + offset)`` with whole numbers in the brackets, so that products with
rows in int8 are summed exactly over a span (``integer.c``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SPAN = 256
"""Weights of a row with one unit, at most: ``SPAN`` in ``rounded_rows.h``."""

_TILE = 64
"""A span is a multiple of it: ``DEPTH`` in ``rounded_rows.h``."""

_LARGEST = 32_512
"""Of a weight in units before it is rounded: what rounding of steps and offsets adds to it, 64.5 at
most, leaves it below 2^15.
"""


_LEAST_UNIT = 2.0**-149
"""Of a span of zeros: the least float32."""


def span_of(inner: int) -> int:
    """Weights of each span of a row but the last one: a row has as few spans of one length as can be."""
    spans = -(-inner // SPAN)
    return -(-inner // (spans * _TILE)) * _TILE


def step_of(group: int, inner: int) -> int:
    """Weights that share a step, where `group` share a scale."""
    span = span_of(inner)
    return span if group == inner else math.gcd(group, span)


@dataclass(frozen=True, slots=True)
class Codes:
    """What the codes of a weight mean.

    Attributes:
        base: The code whose weight is its offset.
        least: The least code that there can be, less `base`.
        most: The greatest one.
    """

    base: int
    least: int
    most: int


NIBBLES, BYTES, E2M1 = Codes(8, -8, 7), Codes(0, -128, 127), Codes(0, -12, 12)


def whole_scales(
    scales: torch.Tensor, offsets: torch.Tensor | None, inner: int, codes: Codes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and units of a weight ``[N, inner]``.

    A unit is the largest magnitude that a code of its span can have, by `_LARGEST`; a step is the
    scale in units, rounded to the nearest whole number, and so is an offset.

    Args:
        scales: float16 or float32 ``[N, groups]``, finite.
        offsets: The same, of code 0; None for those of ``codes.base`` being 0.
        inner: Weights of a row.
        codes: What codes there can be.

    Returns:
        Steps, int16 ``[N, n]``, or with offsets int32, of which the lower 16 bits are the step and the
        upper ones the offset; and units, float32 ``[N, spans]``. `n` is the number of whole or
        partial runs of `step_of` weights.
    """
    group, span = inner // scales.shape[1], span_of(inner)
    step = step_of(group, inner)
    per_span, count, spans = span // step, -(-inner // step), -(-inner // span)

    def of_steps(numbers: torch.Tensor) -> torch.Tensor:
        """By step, of whole spans: [N, spans, steps of a span]."""
        wide = numbers.double() if numbers.dtype == torch.float32 else numbers.float()
        repeated = wide.repeat_interleave(max(1, min(group, inner) // step) if group != inner else count, 1)
        return torch.nn.functional.pad(repeated, (0, spans * per_span - repeated.shape[1])).unflatten(1, (spans, -1))

    scale = of_steps(scales)
    if offsets is None:
        largest = scale.abs() * max(-codes.least, codes.most)
    else:
        offset = of_steps(offsets) + codes.base * scale
        largest = torch.maximum((codes.least * scale + offset).abs(), (codes.most * scale + offset).abs())
    units = (largest.amax(2) / _LARGEST).clamp_min(_LEAST_UNIT).float()
    unit = units[..., None].to(scale.dtype)
    steps = (scale / unit).round().flatten(1)[:, :count]
    if offsets is None:
        return steps.to(torch.int16), units
    whole = (offset / unit).round().flatten(1)[:, :count].to(torch.int32)
    return whole * 65_536 + (steps.to(torch.int32) & 0xFFFF), units
