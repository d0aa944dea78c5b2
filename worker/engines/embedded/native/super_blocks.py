"""Rounding to GGUF's types of super-blocks by the native kernels in float32.

They have the bits of `worker.engines.embedded.model.super_blocks`, and search 16 groups at once.
"""

from __future__ import annotations

import torch

from worker.engines.embedded.native.paths import library

SUPER_BLOCK = 256
"""Weights of a super-block."""


def round_q4_k(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and offsets of ``rows`` in Q4_K.

    Args:
        rows: Finite float32 ``[n, K]`` on the CPU; K is a multiple of `SUPER_BLOCK`.

    Returns:
        uint8 ``[n, K / 2]``, each two codes from 0 to 15, the first one lower; and float32
        ``[n, K / 32]`` twice, for ``code * scale + offset``.

    Raises:
        ValueError: the rows are no such tensor.
    """
    rows = _checked(rows)
    count, inner = rows.shape
    codes = torch.empty(count, inner // 2, dtype=torch.uint8)
    scales, offsets = (torch.empty(count, inner // 32, dtype=torch.float32) for _ in range(2))
    kernels = library(torch.float32)
    kernels.round_q4_k(
        *(rows.data_ptr(), rows.numel() // SUPER_BLOCK),
        *(codes.data_ptr(), scales.data_ptr(), offsets.data_ptr(), kernels.threads()),
    )
    return codes, scales, offsets


def round_q6_k(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``rows`` in Q6_K; arguments and errors are those of `round_q4_k`.

    Returns:
        int8 ``[n, K]`` from -32 to 31, and float32 ``[n, K / 16]``.
    """
    rows = _checked(rows)
    count, inner = rows.shape
    codes, scales = torch.empty(count, inner, dtype=torch.int8), torch.empty(count, inner // 16, dtype=torch.float32)
    kernels = library(torch.float32)
    kernels.round_q6_k(
        *(rows.data_ptr(), rows.numel() // SUPER_BLOCK),
        *(codes.data_ptr(), scales.data_ptr(), kernels.threads()),
    )
    return codes, scales


def _checked(rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or rows.dim() != 2 or rows.shape[1] % SUPER_BLOCK:
        raise ValueError(
            f"expected float32 rows of whole super-blocks on the CPU, got {rows.dtype} {list(rows.shape)} "
            f"on {rows.device}"
        )
    return rows.contiguous()
