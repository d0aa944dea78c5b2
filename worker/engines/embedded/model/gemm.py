"""GEMM backends: native kernels, oneDNN on packed weights, or whatever torch chooses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.model.activations import activated
from worker.engines.embedded.model.panels import Panels
from worker.engines.embedded.native import Gemm, PackedWeight

_PACKED_FOR_ROWS = 8
"""Rows that oneDNN is told to pack for; this layout serves all numbers at nearly equal speed."""

_ONEDNN_EPILOGUES = {
    "none": ("none", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
"""Name and variant of what oneDNN computes within a GEMM."""

_ONEDNN_COLUMNS = (8, 16, 24, 32, 48, 64)
"""Rows of a weight in one panel of oneDNN's layouts."""


class GemmBackend(Protocol):
    """``x @ weight.T + bias`` for rows ``x [n, K]``, a ``weight [N, K]`` and a ``bias [N]``.

    Args:
        weight: ``[N, K]`` of the data type of the rows.
        bias: ``[N]`` of that data type; None for none.
        is_unrounded: Whether results are the float32 sums, not rounded to the weight's data type.

    Attributes:
        kernels: Name of the kernels that compute, as in `AttentionBackend.kernels`.
        is_batch_invariant: Whether a row's result has the same bits whatever rows are beside it, by
            construction.
        is_packed: Whether it keeps a packed copy of the weight, so that the one given can be freed.
    """

    kernels: str
    is_batch_invariant: bool
    is_packed: bool

    def __init__(self, weight: Any, bias: torch.Tensor | None, is_unrounded: bool = False) -> None: ...

    @classmethod
    def supports(cls, weight: Any) -> bool:
        """Whether it computes with a weight of this shape and dtype, on this device."""

    def __call__(self, x: torch.Tensor, epilogue: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        """The result ``[n, N]`` after an epilogue.

        Args:
            x: Rows.
            epilogue: ``none``; one of `native.ACTIVATIONS`; or ``add`` or ``mul`` with `other`.
            other: ``[n, N]``.
        """

    def layouts(self) -> Iterator[Panels]:
        """Layouts that the packed weight may have; none if it is not packed."""


class NativeGemm:
    """The native kernels; a result is rounded once, after the epilogue."""

    kernels = "native"
    is_batch_invariant = True
    is_packed = True

    def __init__(
        self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, is_unrounded: bool = False
    ) -> None:
        self.packed = weight if isinstance(weight, PackedWeight) else PackedWeight.of(weight)
        self._gemm = Gemm(self.packed, bias)
        self._is_unrounded = is_unrounded

    @classmethod
    def supports(cls, weight: torch.Tensor | PackedWeight) -> bool:
        return isinstance(weight, PackedWeight) or native.supports_weight(weight)

    def __call__(self, x: torch.Tensor, epilogue: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        return native.linear(x, self._gemm, epilogue, other, self._is_unrounded)

    @property
    def parts(self) -> tuple[Gemm, ...]:
        """The GEMM for `native.layers`."""
        return (self._gemm,)

    def layouts(self) -> Iterator[Panels]:
        panels = self.packed.panels
        yield Panels(panels.view(torch.int32).squeeze(-1), self._gemm.inner, panels.dtype)


class TorchGemm:
    """``torch.nn.functional.linear``, on the weight as it is; in float32 if `is_unrounded`."""

    kernels = "torch"
    is_batch_invariant = False
    is_packed = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_unrounded: bool = False) -> None:
        self._keeps_sums = is_unrounded and _keeps_sums(weight.device, weight.dtype)
        if is_unrounded and not self._keeps_sums:  # these kernels round to the data type of what they multiply
            weight, bias = weight.float(), bias.float() if bias is not None else None
        self._weight = weight
        self._bias = bias

    @classmethod
    def supports(cls, weight: torch.Tensor) -> bool:
        return True

    def __call__(self, x: torch.Tensor, epilogue: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        result = self._multiply(x, epilogue)
        if other is None:
            return result
        # oneDNN could add and multiply, too, but setting up a binary epilogue takes as long again
        # as setting up the GEMM
        return result.add_(other) if epilogue == "add" else result.mul_(other)

    def layouts(self) -> Iterator[Panels]:
        yield from ()

    def _multiply(self, x: torch.Tensor, epilogue: str) -> torch.Tensor:
        if self._keeps_sums:
            result = torch.mm(x, self._weight.T, out_dtype=torch.float32)
            result = result if self._bias is None else result.add_(self._bias)
        else:
            result = functional.linear(x.to(self._weight.dtype), self._weight, self._bias)
        return activated(epilogue, result) if epilogue in native.ACTIVATIONS else result


class TritonGemm:
    """The Triton kernel for CUDA, on the weight as it is; a result is rounded once, after the
    epilogue.
    """

    kernels = "triton"
    is_batch_invariant = True
    is_packed = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_unrounded: bool = False) -> None:
        from worker.engines.embedded import cuda  # triton is there with CUDA alone

        self._multiply = cuda.multiply
        self._weight, self._bias, self._is_unrounded = weight.contiguous(), bias, is_unrounded

    @classmethod
    def supports(cls, weight: torch.Tensor) -> bool:
        return weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float32)

    def __call__(self, x: torch.Tensor, epilogue: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        return self._multiply(x.to(self._weight.dtype), self._weight, self._bias, epilogue, other, self._is_unrounded)

    def layouts(self) -> Iterator[Panels]:
        yield from ()


@cache
def _keeps_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's GEMM can return float32 sums of matrices of `dtype`: on CUDA, since 2.8."""
    if device.type != "cuda":
        return False
    try:
        one = torch.ones(16, 16, device=device, dtype=dtype)
        torch.mm(one, one, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


class OneDnnGemm(TorchGemm):
    """oneDNN, as torch calls it, on a packed weight."""

    is_packed = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_unrounded: bool = False) -> None:
        super().__init__(weight, bias, is_unrounded)
        self._shape, self._dtype = weight.shape, self._weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), _PACKED_FOR_ROWS)

    @classmethod
    def supports(cls, weight: torch.Tensor) -> bool:
        if weight.device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16)

    def layouts(self) -> Iterator[Panels]:
        count = torch.ops.mkldnn._nbytes(self._weight) // 4
        memory = (ctypes.c_int32 * count).from_address(torch.ops.mkldnn.data_ptr(self._weight))
        words = torch.frombuffer(memory, dtype=torch.int32)
        return onednn_layouts(words, self._shape, self._dtype, owner=self._weight)

    def _multiply(self, x: torch.Tensor, epilogue: str) -> torch.Tensor:
        unary, variant = _ONEDNN_EPILOGUES.get(epilogue, _ONEDNN_EPILOGUES["none"])
        x = x.to(self._dtype)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, unary, [], variant)
        return result


def onednn_layouts(
    words: torch.Tensor, shape: torch.Size, dtype: torch.dtype, owner: object = None
) -> Iterator[Panels]:
    """Layouts that oneDNN may have chosen for a weight; it does not tell which.

    All of them are panels of 32-bit words, and differ in the rows of a panel alone.

    Args:
        words: int32 ``[n]``, the packed weight.
        shape: Shape of the weight, ``[N, K]``.
        dtype: Data type of the weight.
        owner: Object that keeps the memory of `words` from being freed.
    """
    for columns in _ONEDNN_COLUMNS:
        count, rest = divmod(len(words), -(-shape[0] // columns) * columns)
        if not rest and 4 * count >= shape[1] * dtype.itemsize:
            yield Panels(words.view(-1, count, columns), shape[1], dtype, owner)
