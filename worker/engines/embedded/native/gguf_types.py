"""Rounding to GGUF's types by the native kernels in float32, with llama.cpp's bits.

`worker.engines.embedded.model.requantisation` and `super_blocks` are the same for processors
without the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.engines.embedded.native.libraries import address
from worker.engines.embedded.native.paths import library

Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scales and offsets of some rows; see `QuantisedWeight`."""


@dataclass(frozen=True, slots=True)
class _Type:
    """A type of GGUF.

    Attributes:
        block: Weights that are rounded together.
        group: Weights with one scale.
        bits: Bits of a code: 8 with a sign, or 4 without, of which two lie in a byte.
        scales: Data type of scales and offsets.
        has_offsets: Whether there are any.
    """

    block: int
    group: int
    bits: int
    scales: torch.dtype
    has_offsets: bool


TYPES = {
    "Q8_0": _Type(32, 32, 8, torch.float16, False),
    "Q4_0": _Type(32, 32, 4, torch.float16, False),
    "Q4_1": _Type(32, 32, 4, torch.float16, True),
    "Q4_K": _Type(256, 32, 4, torch.float32, True),
    "Q6_K": _Type(256, 16, 8, torch.float32, False),
}
"""Types by GGUF's name that the kernels round to."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Some rows, rounded, and what they were.

    Attributes:
        rounded: Codes, scales and offsets.
        largest: Largest magnitude of the rows; infinite or NaN where one of their numbers is.
        is_finite: Whether all scales and offsets are finite.
    """

    rounded: Rounded
    largest: float
    is_finite: bool


_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Data types of weights that the kernels read: ``source`` in ``arguments.h``."""


def rounding_of(name: str, weight: torch.Tensor, num_threads: int | None = None) -> Rounding:
    """``weight [n, K]`` rounded to a type; codes are int8 ``[n, K]`` or uint8 ``[n, K / 2]``, the
    others ``[n, K / group]``.

    Args:
        name: One of `TYPES`.
        weight: Numbers of a floating-point type on the CPU; those of 64 bits are rounded to float32
            first. K is a multiple of the type's block. What comes of numbers that are not finite is
            not defined.
        num_threads: Threads that compute; None for as many as torch has.

    Raises:
        ValueError: the weight is no such tensor.
    """
    one = TYPES[name]
    if (
        not weight.is_floating_point()
        or weight.device.type != "cpu"
        or weight.dim() != 2
        or weight.shape[1] % one.block
    ):
        raise ValueError(
            f"expected numbers in rows of whole blocks of {one.block} on the CPU, got {weight.dtype} "
            f"{list(weight.shape)} on {weight.device}"
        )
    rows = (weight if weight.dtype in _SOURCES else weight.float()).contiguous()
    count, inner = rows.shape
    codes = torch.empty(count, inner * one.bits // 8, dtype=torch.int8 if one.bits == 8 else torch.uint8)
    scales = torch.empty(count, inner // one.group, dtype=one.scales)
    offsets = torch.empty_like(scales) if one.has_offsets else None
    found = torch.zeros(2, dtype=torch.int32)
    kernels = library(torch.float32)
    blocks = kernels.blocks_t(
        weights=rows.data_ptr(),
        count=rows.numel() // one.block,
        source=_SOURCES[rows.dtype],
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        offsets=address(offsets),
        found=found.data_ptr(),
    )
    getattr(kernels, f"round_{name.lower()}")(blocks, kernels.threads(num_threads))
    largest, is_beyond = found.view(torch.float32)[0].item(), bool(found[1].item())
    return Rounding((codes, scales, offsets), largest, not is_beyond)
