"""The format of keys and values: the choice of ``--kv-cache-dtype``."""

from __future__ import annotations

import torch

from worker.engines.embedded.attention import AttentionSizes, NativeAttention
from worker.engines.embedded.kv_cache import CodeRows
from worker.engines.embedded.model.kernels import KernelBackend
from worker.errors import StartupError

_CODES = {"int8": torch.int8, "int16": torch.int16}


def check_kv_cache_dtype(asked: str, dtype: torch.dtype) -> None:
    """Raises `StartupError` if elements of `dtype` are not held in `asked`, one of
    `config.KV_CACHE_DTYPES`.
    """
    if asked == "int16" and dtype != torch.float32:
        held_in = str(dtype).removeprefix("torch.")
        raise StartupError(
            f"--kv-cache-dtype int16 needs --dtype float32: elements of {held_in} take as much memory; "
            "use none, which holds these, or int8"
        )


def code_rows_of(asked: str, sizes: AttentionSizes, kernels: KernelBackend) -> CodeRows | None:
    """The format of a model's keys and values; None if they are held as elements.

    ``auto`` is int16 for a model that rounds rows to int8 before it multiplies them: it changes
    predictions less than that does, takes about half the memory of float32, and the native kernels
    compute attention over it on integers, as those products are.

    Args:
        asked: One of `config.KV_CACHE_DTYPES`.
        sizes: Sizes of its attention; those of pages and rows do not count.
        kernels: Kernels that compute it.

    Raises:
        StartupError: see `check_kv_cache_dtype`.
    """
    check_kv_cache_dtype(asked, sizes.dtype)
    if asked == "auto":
        rounds = kernels.rounds_to == "int8" and sizes.dtype == torch.float32
        asked = "int16" if rounds and isinstance(kernels.attention(sizes), NativeAttention) else "none"
    return CodeRows(sizes.head_dim, sizes.dtype, _CODES[asked]) if asked in _CODES else None
