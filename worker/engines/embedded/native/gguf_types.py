"""Rounding to GGUF's types by the native kernels in float32, with llama.cpp's bits.

`worker.engines.embedded.model.requantisation` and `super_blocks` are the same for processors
without the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


_ROWS_AT_ONCE = 256  # of bfloat16, which are widened: they stay in a processor's cache


def rounded_to(name: str, weight: torch.Tensor, num_threads: int | None = None) -> Rounded:
    """Codes, scales and offsets of ``weight [n, K]``; codes are int8 ``[n, K]`` or uint8
    ``[n, K / 2]``, the others ``[n, K / group]``.

    Args:
        name: One of `TYPES`.
        weight: Finite numbers of a floating-point type on the CPU, which are rounded to float32
            first; K is a multiple of the type's block.
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
    count, inner = weight.shape
    codes = torch.empty(count, inner * one.bits // 8, dtype=torch.int8 if one.bits == 8 else torch.uint8)
    scales = torch.empty(count, inner // one.group, dtype=one.scales)
    offsets = torch.empty_like(scales) if one.has_offsets else None
    kernels = library(torch.float32)
    kernel, threads = getattr(kernels, f"round_{name.lower()}"), kernels.threads(num_threads)
    at_once = count if weight.dtype == torch.float32 else _ROWS_AT_ONCE
    for first in range(0, count, max(1, at_once)):
        rows = weight[first : first + at_once].float().contiguous()
        parts = [part[first:].data_ptr() for part in (codes, scales, offsets) if part is not None]
        kernel(rows.data_ptr(), rows.numel() // one.block, *parts, threads)
    return codes, scales, offsets
