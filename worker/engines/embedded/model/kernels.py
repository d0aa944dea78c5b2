"""Kernel backends: the choice of a model's GEMM and attention backends, of its RMSNorm, and of what
caps its logits.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from worker.engines.embedded import native
from worker.engines.embedded.attention import AttentionBackend, AttentionSizes, NativeAttention, TorchAttention
from worker.engines.embedded.model.gemm import GemmBackend, NativeGemm, OneDnnGemm, TorchGemm, TritonGemm
from worker.engines.embedded.model.quantisation import Quantised, QuantisedGemm, quantise
from worker.engines.embedded.native import PackedWeight
from worker.errors import StartupError

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)
"""GPUs from then on multiply bfloat16."""


@dataclass(frozen=True, slots=True)
class KernelBackend:
    """The backends that a model may compute with, each list in the order of preference.

    Attributes:
        name: Name in ``--kernels``: ``torch``, ``triton``, or ``native-`` and a path of
            `native.PATHS`.
        gemms: GEMM backends; the last one supports every weight.
        attentions: Attention backends; the last one supports all sizes.
        rms_norm: ``x / sqrt(mean(x * x) + epsilon) * weight`` of ``x [..., K]``, ``weight [K]`` and
            an epsilon.
        soft_cap: ``cap * tanh(x / cap)`` of float32 ``x [..., K]`` and a cap; it may replace x.
        reads_quantised: Whether they compute with quantised weights.
        quantisation: One of `quantisation.FORMATS` that weights are rounded to; None for none.
        rounds_to: Data type that rows are rounded to where they meet quantised weights: one of
            `ROUNDINGS` of `native/quantised.py`.
    """

    name: str
    gemms: tuple[type[GemmBackend], ...]
    attentions: tuple[type[AttentionBackend], ...]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    soft_cap: Callable[[torch.Tensor, float], torch.Tensor]
    reads_quantised: bool = False
    quantisation: str | None = None
    rounds_to: str = "none"

    @property
    def rounding(self) -> str:
        """The part of a model's `made_by` that `rounds_to` adds."""
        said = {
            "none": "",
            "int8": "int8 activations in spans but outliers",
            "bfloat16": "bfloat16 activations with AMX",
        }
        return f", {said[self.rounds_to]}" if said[self.rounds_to] else ""

    def quantised(self, weight: torch.Tensor, is_unrounded: bool = False) -> Quantised:
        """`weight` rounded to `quantisation`; that of the LM head, whose results are unrounded, to
        8 bits.
        """
        assert self.quantisation is not None
        return quantise(weight, "int8" if is_unrounded else self.quantisation)

    def gemm(
        self, weight: torch.Tensor | PackedWeight | Quantised, bias: torch.Tensor | None, is_unrounded: bool = False
    ) -> GemmBackend:
        """The first GEMM backend that supports the weight, made of it; see `GemmBackend`."""
        if isinstance(weight, Quantised):
            return QuantisedGemm(weight, bias, is_unrounded, self.rounds_to)
        is_unrounded = is_unrounded and weight.dtype != torch.float32
        return next(backend for backend in self.gemms if backend.supports(weight))(weight, bias, is_unrounded)

    def attention(self, sizes: AttentionSizes) -> AttentionBackend:
        """The first attention backend that supports `sizes`."""
        return next(backend for backend in self.attentions if backend.supports(sizes))()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rms_norm(x, weight.shape, weight, epsilon)


def _soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return x.div_(cap).tanh_().mul_(cap)


TORCH = KernelBackend("torch", (OneDnnGemm, TorchGemm), (TorchAttention,), _rms_norm, _soft_cap)


@cache
def _in_own_order(path: str) -> tuple[type[NativeGemm], type[NativeAttention]]:
    """`NativeGemm` and `NativeAttention` in a path that does not sum in the others' order."""
    named = {"kernels": f"native-{path}"}
    return type("OwnOrderGemm", (NativeGemm,), named), type("OwnOrderAttention", (NativeAttention,), named)


def native_kernels(path: str, sums_as_others: bool = True) -> KernelBackend:
    """The native kernels in `path`, one of `native.PATHS`; before them `native.choose_path`.

    Args:
        path: Instructions that they use.
        sums_as_others: `native.sums_as_others`.
    """
    gemm, attention = (NativeGemm, NativeAttention) if sums_as_others else _in_own_order(path)
    return KernelBackend(
        f"native-{path}",
        (gemm, *TORCH.gemms),
        (attention, *TORCH.attentions),
        native.rms_norm,
        native.soft_cap,
        reads_quantised=True,
    )


def no_triton(device: torch.device) -> str | None:
    """The reason why Triton's kernels cannot compute on `device`; None if they can."""
    if device.type != "cuda":
        return f"they compute on CUDA, not on {device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _LEAST_CAPABILITY:
        return f"they need a GPU of compute capability {'.'.join(map(str, _LEAST_CAPABILITY))}, not {major}.{minor}"
    compilers = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")  # as triton looks for them
    if not any(map(shutil.which, compilers)):
        return f"triton needs a C compiler, and there is none: {' or '.join(compilers)}"
    headers = sysconfig.get_path("include", "posix_prefix")
    if not Path(headers, "Python.h").is_file():
        return f"triton needs Python's header files, and there is no {headers}/Python.h"
    return None


def triton_kernels(numerics: str) -> KernelBackend:
    """The Triton kernels for CUDA; beside them torch's GEMMs where `numerics` are ``fast``."""
    from worker.engines.embedded import cuda  # triton is there with CUDA alone
    from worker.engines.embedded.attention.triton_backend import TritonAttention

    gemms: tuple[type[GemmBackend], ...] = (TorchGemm,) if numerics == "fast" else (TritonGemm, *TORCH.gemms)
    return KernelBackend("triton", gemms, (TritonAttention, *TORCH.attentions), cuda.rms_norm, _soft_cap)


def choose_kernels(
    kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    quantisation: str | None = None,
    rounds_to: str = "none",
    numerics: str = "auto",
) -> KernelBackend:
    """The kernel backend for `kernels`, one of `config.KERNELS`; nothing else asks which it is.

    A new kernel is a class that implements `GemmBackend` or `AttentionBackend`, and an entry above.

    Args:
        kernels: The value of ``--kernels``.
        device: Device that computes.
        dtype: Data type of rows and results.
        quantisation: See `KernelBackend`.
        rounds_to: See `KernelBackend`.
        numerics: The value of ``--numerics``.

    Raises:
        StartupError: the native kernels are asked for, or needed, and cannot compute here.
    """
    needed_by = f"--quantization {quantisation}" if quantisation else None
    if rounds_to != "none":
        needed_by = f"--activation-dtype {rounds_to}"
    if needed_by is not None and kernels == "torch":
        raise StartupError(f"{needed_by} needs the native kernels, not --kernels torch")
    if kernels == "torch":
        return TORCH
    if kernels == "triton" or (device.type == "cuda" and kernels == "auto" and needed_by is None):
        reason = no_triton(device)
        if reason is None and needed_by is None:
            return triton_kernels(numerics)
        if kernels == "triton":
            raise StartupError(f"--kernels triton: {reason or f'{needed_by} needs the native kernels'}")
        logger.warning("torch's kernels compute, which are slower, and not Triton's: %s", reason)
        return TORCH
    path = kernels.partition("-")[2] or None
    reason = native.unavailable(dtype, path) if device.type == "cpu" else f"they compute on a CPU, not on {device}"
    if reason is not None and needed_by is not None:
        raise StartupError(f"{needed_by} needs the native kernels: {reason}")
    if kernels != "auto" and reason is not None:
        raise StartupError(f"--kernels {kernels}: {reason}")
    if reason is not None:
        if device.type == "cpu":
            logger.warning("torch's kernels compute, which are slower, and not the native ones: %s", reason)
        return TORCH
    if rounds_to == "bfloat16" and (reason := native.no_bfloat16_rows(path)) is not None:
        raise StartupError(f"--activation-dtype bfloat16 needs AMX: {reason}; use auto")
    native.choose_path(torch.float32, path)  # computes quantised weights, whatever the data type of the rows
    path = native.choose_path(dtype, path)
    chosen = native_kernels(path, native.sums_as_others(dtype, path))
    if kernels == "auto" and needed_by is None and native.is_torch_faster(dtype, path):
        return TORCH
    return replace(chosen, quantisation=quantisation, rounds_to=rounds_to)
