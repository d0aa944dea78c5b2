"""Kernel backends: the choice of a model's GEMM and attention backends, and of its RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.engines.embedded import native
from worker.engines.embedded.attention import AttentionBackend, AttentionSizes, NativeAttention, TorchAttention
from worker.engines.embedded.model.gemm import GemmBackend, NativeGemm, OneDnnGemm, TorchGemm
from worker.errors import StartupError


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """The backends that a model may compute with, each list in the order of preference.

    Attributes:
        name: As ``--kernels`` names it: ``torch``, or ``native-`` and a path of `native.PATHS`.
        gemms: GEMM backends; the last one supports every weight.
        attentions: Attention backends; the last one supports all sizes.
        rms_norm: ``x / sqrt(mean(x * x) + epsilon) * weight`` of ``x [..., K]``, ``weight [K]`` and
            an epsilon.
    """

    name: str
    gemms: tuple[type[GemmBackend], ...]
    attentions: tuple[type[AttentionBackend], ...]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

    def gemm(self, weight: torch.Tensor, bias: torch.Tensor | None) -> GemmBackend:
        """The first GEMM backend that supports the weight, made of it; see `GemmBackend`."""
        return next(backend for backend in self.gemms if backend.supports(weight))(weight, bias)

    def attention(self, sizes: AttentionSizes) -> AttentionBackend:
        """The first attention backend that supports `sizes`."""
        return next(backend for backend in self.attentions if backend.supports(sizes))()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rms_norm(x, weight.shape, weight, epsilon)


TORCH = KernelBackend("torch", (OneDnnGemm, TorchGemm), (TorchAttention,), _rms_norm)


class OwnOrderGemm(NativeGemm):
    """`NativeGemm` on a processor whose bfloat16 instructions do not sum in the others' order."""

    kernels = "native-avx512"


class OwnOrderAttention(NativeAttention):
    """`NativeAttention` on such a processor."""

    kernels = "native-avx512"


def native_kernels(path: str, sums_as_others: bool = True) -> KernelBackend:
    """The native kernels in `path`, one of `native.PATHS`; before them `native.choose_path`.

    Args:
        path: Instructions that they use.
        sums_as_others: `native.sums_as_others`.
    """
    gemm: type[GemmBackend] = NativeGemm if sums_as_others else OwnOrderGemm
    attention: type[AttentionBackend] = NativeAttention if sums_as_others else OwnOrderAttention
    return KernelBackend(f"native-{path}", (gemm, *TORCH.gemms), (attention, *TORCH.attentions), native.rms_norm)


def choose_kernels(kernels: str, device: torch.device, dtype: torch.dtype) -> KernelBackend:
    """The kernel backend for `kernels`, one of `config.KERNELS`; nothing else asks which it is.

    A new kernel is a class that implements `GemmBackend` or `AttentionBackend`, and an entry above.

    Raises:
        StartupError: the native kernels are asked for and cannot compute here.
    """
    if kernels == "torch":
        return TORCH
    path = kernels.partition("-")[2] or None
    reason = native.unavailable(dtype, path) if device.type == "cpu" else f"they compute on a CPU, not on {device}"
    if kernels != "auto" and reason is not None:
        raise StartupError(f"--kernels {kernels}: {reason}")
    if reason is not None:
        return TORCH
    path = native.choose_path(dtype, path)
    if kernels == "auto" and native.is_torch_faster(dtype, path):
        return TORCH
    return native_kernels(path, native.sums_as_others(dtype, path))
