"""RMSNorm in Triton, a row in each program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(x_pointer, weight_pointer, y_pointer, width, epsilon, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    is_inside = place < width
    start = tl.program_id(0).to(tl.int64) * width
    x = tl.load(x_pointer + start + place, mask=is_inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_pointer + place, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / width
    y = x * (1.0 / tl.sqrt_rn(mean + epsilon)) * weight
    tl.store(y_pointer + start + place, y.to(y_pointer.dtype.element_ty), mask=is_inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm: ``x / sqrt(mean(x * x) + epsilon) * weight`` over the last dimension, rounded once.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``.
        epsilon: Added to the mean.
    """
    x, weight = x.contiguous(), weight.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    if x.numel():
        grid = (x.numel() // width,)
        _rms_norm[grid](x, weight, y, width, epsilon, BLOCK=block, num_warps=min(16, max(1, block // 256)))
    return y
