"""Linear layers: GEMMs on packed weights, quantised or not, with an epilogue."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from worker.engines.embedded.native.libraries import address
from worker.engines.embedded.native.lora import AdaptedRows
from worker.engines.embedded.native.packed import PackedWeight
from worker.engines.embedded.native.paths import chosen_path, library
from worker.engines.embedded.native.quantised import QuantisedPanels

ACTIVATIONS = {"silu": 1, "gelu": 4, "gelu_tanh": 5, "relu": 6}

EPILOGUES = {"none": 0, "add": 2, "mul": 3, "clamped": 7, "mul_clamped": 8, **ACTIVATIONS}
"""Numbers of ``epilogue_t`` in ``epilogue.h``."""

WITH_OTHER = ("add", "mul", "mul_clamped")
"""Epilogues with a second operand."""


class Gemm:
    """A packed weight ``[N, K]`` and a bias, for `linear`.

    Args:
        weight: The weight.
        bias: ``[N]`` or None.

    Attributes:
        columns: N.
        inner: K.
    """

    def __init__(self, weight: PackedWeight | QuantisedPanels, bias: torch.Tensor | None = None) -> None:
        self.columns, self.inner = weight.shape
        self.weight = weight
        self.bias = bias
        self.quantised = weight if isinstance(weight, QuantisedPanels) else None

    @cached_property
    def address(self) -> int:
        """Address of the ``gemm_t`` of the kernels."""
        return ctypes.addressof(self._in_c)

    @cached_property
    def _in_c(self) -> Any:
        bias = address(self.bias)
        if isinstance(self.weight, PackedWeight):
            panels = self.weight.panels
            return library(panels.dtype).gemm_t(
                columns=self.columns, inner=self.inner, weight=panels.data_ptr(), bias=bias
            )
        weight = self.weight
        return library(torch.float32).gemm_t(
            columns=weight.columns,
            inner=weight.inner,
            weight=weight.codes.data_ptr(),
            bias=bias,
            scales=weight.scales.data_ptr(),
            offsets=address(weight.offsets),
            group=weight.group,
            bits=weight.bits,
            is_half=weight.scales.dtype == torch.float16,
            zero=weight.zero,
            has_words=weight.codes.dtype == torch.int32,
            is_e2m1=weight.is_e2m1,
            steps=address(weight.steps),
            units=address(weight.units),
            step=weight.step,
            span=weight.span,
        )


def quantised_kernel(rounds_to: str) -> Any:
    """The C function that multiplies rows, rounded to one of `ROUNDINGS`, by quantised weights."""
    kernels = library(torch.float32)
    if rounds_to == "none":
        return kernels.quantised_linear
    if rounds_to == "bfloat16":
        return kernels.dequantised_linear_amx
    return kernels.integer_linear_amx if chosen_path(torch.float32) == "amx" else kernels.integer_linear


@dataclass(frozen=True, slots=True)
class GemmAdapters:
    """LoRA of the rows of one GEMM.

    Attributes:
        rows: The adapters of the rows.
        layer: Index of the adapters' layer whose first GEMM it is.
    """

    rows: AdaptedRows
    layer: int


def linear(
    x: torch.Tensor,
    gemm: Gemm,
    epilogue: str = "none",
    other: torch.Tensor | None = None,
    is_unrounded: bool = False,
    adapters: GemmAdapters | None = None,
) -> torch.Tensor:
    """GEMM: ``x [n, K]`` times a packed weight ``[N, K]``, plus a bias; ``[n, N]``, rounded once.

    On a quantised weight a result has the bits of that in float32 on the weight that is unpacked;
    or, where rows are rounded to int8, the bits that ``integer.c`` defines, and where they are to
    bfloat16, those of ``dequantised.c``.

    Args:
        x: Rows.
        gemm: The weight and the bias, of the data type of the rows unless quantised.
        epilogue: One of `EPILOGUES`.
        other: ``[n, N]``, of an epilogue of `WITH_OTHER`.
        is_unrounded: Whether the result is the float32 sums instead, which are not rounded.
        adapters: LoRA of the rows, which is added to the sums; None if no row has one.

    Raises:
        ValueError: rows have another width than the weight's, the epilogue needs `other`, or
            adapters are those of other rows.
        MemoryError: there is no memory for the rows in float32, as AVX2 and plain C read them, or
            for rounded rows.
    """
    rows, dtype = x.shape[0], x.dtype
    if x.shape[1] != gemm.inner:
        raise ValueError(f"a weight of {gemm.inner} columns cannot be multiplied by rows of {x.shape[1]}")
    if epilogue in WITH_OTHER and other is None:
        raise ValueError(f"epilogue {epilogue} needs another operand")
    x = x.contiguous()
    other = other.contiguous() if other is not None else None
    output = x.new_empty(rows, gemm.columns, dtype=torch.float32 if is_unrounded else dtype)
    quantised = gemm.quantised
    kernels = library(dtype if quantised is None else torch.float32)
    kernel = kernels.linear if quantised is None else quantised_kernel(quantised.rounds_to)
    arguments = kernels.linear_t(
        input=x.data_ptr(),
        rows=rows,
        gemm=gemm.address,
        other=address(other),
        output=output.data_ptr(),
        epilogue=EPILOGUES[epilogue],
        is_unrounded=is_unrounded,
        is_bfloat16=dtype == torch.bfloat16,
    )
    if adapters is None:
        failed = kernel(arguments, 1, kernels.threads())
    else:
        failed = _adapted(arguments, adapters, dtype, None if quantised is None else kernel)
    if failed:
        raise MemoryError(f"no memory for {rows} rows of {gemm.inner} elements")
    return output


def _adapted(arguments: Any, adapters: GemmAdapters, dtype: torch.dtype, quantised: Any) -> int:
    """Compute a ``linear_t`` with LoRA, a quantised one with that kernel; not 0 without memory."""
    kernels, rows = library(dtype), adapters.rows
    if arguments.rows != len(rows.adapters):
        raise ValueError(f"a step of {len(rows.adapters)} rows has the adapters, and {arguments.rows} are multiplied")
    step = kernels.step_t(
        adapters=rows.adapters.data_ptr(),
        adapted=rows.rows.data_ptr(),
        num_adapted=len(rows.rows),
        lora_width=rows.width,
        quantised=None if quantised is None else ctypes.cast(quantised, ctypes.c_void_p),
    )
    failed: int = kernels.adapted_linear(step, adapters.layer, arguments, kernels.threads())
    return failed


def unpacked_rows(gemm: Gemm, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[..., K]`` of a quantised weight by their indices.

    Args:
        gemm: The weight ``[N, K]``.
        ids: int64 ``[...]``.
        dtype: Data type of the rows, float32 or bfloat16, to which they are rounded from float32.

    Raises:
        IndexError: there is no such row.
    """
    ids = ids.contiguous()
    output = torch.empty(*ids.shape, gemm.inner, dtype=dtype)
    kernels = library(torch.float32)
    arguments = kernels.unpacking_t(
        gemm=gemm.address,
        ids=ids.data_ptr(),
        count=ids.numel(),
        output=output.data_ptr(),
        is_bfloat16=dtype == torch.bfloat16,
    )
    if kernels.unpack_rows(arguments):
        raise IndexError(f"a weight of {gemm.columns} rows has not all of the rows {ids.tolist()}")
    return output
