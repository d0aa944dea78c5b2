"""What a linear layer is computed with: our own kernels, oneDNN's on a weight laid out for them,
or torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.model.panels import Panels

_PACKED_FOR_ROWS = 8
"""One of oneDNN's layouts serves all numbers of rows at nearly equal speed."""

_ONEDNN_COLUMNS = (8, 16, 24, 32, 48, 64)
"""Rows of a weight that oneDNN's layouts keep together."""


class Product(Protocol):
    """``x @ weight.T + bias`` for rows ``x [n, K]``.

    Attributes:
        is_exact: Whether a row's result is the same, bit by bit, whatever rows are beside it.
        is_packed: Whether the weight was copied into another layout, so that the one given is of no
            more use.
    """

    is_exact: bool
    is_packed: bool

    def __call__(self, x: torch.Tensor, then: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        """The product ``[n, N]``, and then nothing, ``silu``, or ``add`` or ``mul`` with ``other
        [n, N]``.
        """

    def layouts(self) -> Iterator[Panels]:
        """Layouts in which the packed weight may lie; none if it is not packed."""


class NativeProduct:
    """Our own kernels; everything is rounded once, at the end."""

    is_exact = True
    is_packed = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._columns, self._inner = weight.shape
        self._panels = native.pack(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor, then: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        return native.linear(x, self._panels, self._columns, self._bias, then, other)

    def layouts(self) -> Iterator[Panels]:
        yield Panels(self._panels.view(torch.int32).squeeze(-1), self._inner, self._panels.dtype)


class TorchProduct:
    """Whatever torch takes for it."""

    is_exact = False
    is_packed = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, then: str = "none", other: torch.Tensor | None = None) -> torch.Tensor:
        product = self._product(x, then)
        if other is None:
            return product
        # oneDNN could add and multiply, too, but setting that up takes as long again as setting up
        # the product
        return product.add_(other) if then == "add" else product.mul_(other)

    def layouts(self) -> Iterator[Panels]:
        yield from ()

    def _product(self, x: torch.Tensor, then: str) -> torch.Tensor:
        product = functional.linear(x, self._weight, self._bias)
        return functional.silu(product, inplace=True) if then == "silu" else product


class OneDnnProduct(TorchProduct):
    """oneDNN, with a packed weight."""

    is_packed = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS), bias)
        self._shape, self._dtype = weight.shape, weight.dtype

    def layouts(self) -> Iterator[Panels]:
        count = torch.ops.mkldnn._nbytes(self._weight) // 4
        memory = (ctypes.c_int32 * count).from_address(torch.ops.mkldnn.data_ptr(self._weight))
        words = torch.frombuffer(memory, dtype=torch.int32)
        return onednn_layouts(words, self._shape, self._dtype, owner=self._weight)

    def _product(self, x: torch.Tensor, then: str) -> torch.Tensor:
        unary = "swish" if then == "silu" else "none"
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, unary, [], "")
        return packed


def onednn_layouts(
    words: torch.Tensor, shape: torch.Size, dtype: torch.dtype, owner: object = None
) -> Iterator[Panels]:
    """Layouts that oneDNN may have chosen for a weight; it does not tell which. They differ in one
    number alone.

    Args:
        words: int32 ``[n]``, the packed weight.
        shape: Of the weight, ``[N, K]``.
        dtype: Of the weight.
        owner: What keeps the memory of `words` from being freed.
    """
    for columns in _ONEDNN_COLUMNS:
        count, rest = divmod(len(words), -(-shape[0] // columns) * columns)
        if not rest and 4 * count >= shape[1] * dtype.itemsize:
            yield Panels(words.view(-1, count, columns), shape[1], dtype, owner)


def make(weight: torch.Tensor, bias: torch.Tensor | None, may_be_native: bool) -> Product:
    """The fastest there is for ``weight [N, K]`` and ``bias [N]``; native kernels only where
    they are allowed.
    """
    if may_be_native and native.takes_weight(weight):
        return NativeProduct(weight, bias)
    return (OneDnnProduct if _onednn_takes(weight) else TorchProduct)(weight, bias)


def _onednn_takes(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16)
