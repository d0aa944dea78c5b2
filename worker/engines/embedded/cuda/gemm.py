"""GEMM in Triton with one order of summation, whatever the number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.engines.embedded.cuda.shared_memory import shared_bytes

EPILOGUES = ("none", "silu", "gelu", "gelu_tanh", "relu", "add", "mul")
"""Functions of a sum before it is rounded; the last two are of it and another matrix."""

_FEW_ROWS, _MANY_ROWS = 64, 256
_PROCESSORS = 132
"""Programs that keep a large GPU busy."""


@triton.jit
def _activated(x, EPILOGUE: tl.constexpr):
    if EPILOGUE == 1:
        x = x / (1.0 + tl.exp(-x))
    elif EPILOGUE == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif EPILOGUE == 3:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif EPILOGUE == 4:
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays
    return x


@triton.jit
def _gemm(
    x_pointer,
    weight_pointer,
    bias_pointer,
    other_pointer,
    y_pointer,
    rows,
    columns,
    inner,
    HAS_BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # programs that read the same part of the weight follow each other: it stays in the cache
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_row, has_column = row < rows, column < columns
    x_tile = x_pointer + row[:, None].to(tl.int64) * inner + k[None, :]
    weight_tile = weight_pointer + column[None, :].to(tl.int64) * inner + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inner, BLOCK_K):
        if IS_EVEN:
            x = tl.load(x_tile, mask=has_row[:, None], other=0.0)
            weight = tl.load(weight_tile, mask=has_column[None, :], other=0.0)
        else:
            has_k = k < inner - start
            x = tl.load(x_tile, mask=has_row[:, None] & has_k[None, :], other=0.0)
            weight = tl.load(weight_tile, mask=has_column[None, :] & has_k[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    if HAS_BIAS:
        total += tl.load(bias_pointer + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    total = _activated(total, EPILOGUE)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    is_inside = has_row[:, None] & has_column[None, :]
    if EPILOGUE == 5:
        total += tl.load(other_pointer + place, mask=is_inside, other=0.0).to(tl.float32)
    elif EPILOGUE == 6:
        total *= tl.load(other_pointer + place, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y_pointer + place, total.to(y_pointer.dtype.element_ty), mask=is_inside)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    other: torch.Tensor | None = None,
    is_unrounded: bool = False,
) -> torch.Tensor:
    """``epilogue(x @ weight.T + bias)`` ``[n, N]``, summed in float32 and rounded once.

    The products of a row are added in one order, K from 0 on, by the same instructions in tiles of
    every size, so that its bits do not depend on the rows beside it.

    Args:
        x: Rows ``[n, K]``, contiguous, of the data type of `weight`.
        weight: ``[N, K]``, contiguous.
        bias: ``[N]``; None for none.
        epilogue: One of `EPILOGUES`.
        other: ``[n, N]`` for ``add`` and ``mul``.
        is_unrounded: Whether results are the float32 sums.
    """
    (rows, inner), columns = x.shape, len(weight)
    x = x.contiguous()
    other = x if other is None else other.contiguous()
    y = torch.empty(rows, columns, device=x.device, dtype=torch.float32 if is_unrounded else x.dtype)
    tile = _fitting(_tile(rows, columns, x.dtype), x.dtype, x.device)
    grid = (triton.cdiv(rows, tile["BLOCK_M"]), triton.cdiv(columns, tile["BLOCK_N"]))
    if rows:
        _gemm[grid](
            x,
            weight,
            x if bias is None else bias,
            other,
            y,
            rows,
            columns,
            inner,
            HAS_BIAS=bias is not None,
            EPILOGUE=EPILOGUES.index(epilogue),
            IS_EVEN=inner % tile["BLOCK_K"] == 0,
            **tile,
        )
    return y


def _tile(rows: int, columns: int, dtype: torch.dtype) -> dict[str, int]:
    """Sizes of a program's tile, its warps and the stages of its loads: the fastest of some that
    were tried on an H100, with programs for all of its multiprocessors.
    """
    if dtype == torch.float32:
        return _tile_of(32, 32, 32, 4, 3)
    if rows > _MANY_ROWS:
        return _tile_of(128, 128, 64, 8, 4)
    if columns >= 64 * _PROCESSORS // 2 or (rows > _FEW_ROWS and columns >= 24 * _PROCESSORS // 2):
        return _tile_of(64, 64, 128, 4, 5)
    if rows > _FEW_ROWS or columns > 16 * _PROCESSORS:
        return _tile_of(64, 32, 128, 4, 5)
    return _tile_of(64, 16, 256, 4, 4)


def _tile_of(rows: int, columns: int, inner: int, num_warps: int, num_stages: int) -> dict[str, int]:
    blocks = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": inner}
    return {**blocks, "num_warps": num_warps, "num_stages": num_stages}


def _fitting(tile: dict[str, int], dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """`tile` in as many stages as shared memory holds; its sums are the same."""
    of_stage = (tile["BLOCK_M"] + tile["BLOCK_N"]) * tile["BLOCK_K"] * dtype.itemsize
    return {**tile, "num_stages": max(1, min(tile["num_stages"], shared_bytes(device) // of_stage))}
