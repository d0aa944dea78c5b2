"""Row-wise kernels: RMSNorm and soft caps."""

from __future__ import annotations

import torch

from worker.engines.embedded.native.paths import library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm: ``x / sqrt(mean(x * x) + epsilon) * weight`` over the last dimension, rounded once.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``, computed with in float32.
        epsilon: Added to the mean.

    Raises:
        ValueError: rows have another width than the weight.
    """
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"a norm of {weight.numel()} elements cannot be that of rows of {width}")
    x, weight = x.contiguous(), weight.float()
    output = torch.empty_like(x)
    kernels = library(x.dtype)
    arguments = kernels.rms_norm_t(
        x=x.data_ptr(),
        rows=x.numel() // width,
        width=width,
        stride=width,
        weight=weight.data_ptr(),
        y=output.data_ptr(),
        epsilon=epsilon,
    )
    kernels.rms_norm(arguments, kernels.threads())
    return output


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)`` of float32 numbers, in place; returns them."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"soft_cap computes contiguous float32, not {x.dtype} of strides {x.stride()}")
    kernels = library(x.dtype)
    kernels.soft_cap(x.data_ptr(), x.numel(), cap, kernels.threads())
    return x
