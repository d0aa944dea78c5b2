"""Kernels of our own for bfloat16 on a CPU with AVX512-BF16: linear layers, attention over the KV store, and between.

They are built with the package where there is a C compiler. Every sum in them runs in an order that depends on the
token alone, so that what a token gets is the same, bit by bit, in any batch; and few rows are computed at the speed at
which weights and keys are read. Tensors are passed by address: whatever is passed must be contiguous, but for the
strides that are named.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch.nn import functional

from worker.engines.embedded.kv_store import Span

_VERSION = 1
_CPU_FLAG = "avx512_bf16"
_AMX_FLAG = "amx_bf16"
_COLUMNS = 32
"""Of a panel, as in ``panels.h``."""

_QUERIES = 64
"""Of a tile at most: ``TOGETHER`` in ``attention.c``."""

_WIDEST = 256
"""Inner size of a head at most: ``WIDEST`` in ``attention.c``."""

_THEN = {"none": 0, "silu": 1, "add": 2, "mul": 3}

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


@cache
def unavailable() -> str | None:
    """Why this machine or installation has no native kernels; None if it has."""
    try:
        _library()
    except (OSError, RuntimeError, AttributeError) as error:
        return str(error)
    return None


def is_worth_it() -> bool:
    """Whether nothing else is faster here. With AMX oneDNN computes prompts several times as fast."""
    return _AMX_FLAG not in _cpu_flags()


@cache
def _library() -> ctypes.CDLL:
    """Raises `RuntimeError`, `OSError` or `AttributeError` (an older one lacks a function) saying why there is none."""
    if _CPU_FLAG not in _cpu_flags():
        raise RuntimeError(f"this processor has no {_CPU_FLAG}")
    paths = [path for suffix in EXTENSION_SUFFIXES if (path := Path(__file__).with_name(f"kernels{suffix}")).exists()]
    if not paths:
        raise RuntimeError("they were not built: the package was installed where there was no C compiler")
    library = ctypes.CDLL(str(paths[0]))
    library.kernels_version.restype = _INT32
    if library.kernels_version() != _VERSION:
        raise RuntimeError(f"{paths[0].name} is of another version of this package: install it again")
    library.linear.argtypes = [
        *(_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER),
        *(_INT32, _POINTER, _POINTER, _INT32),
    ]
    library.rms_norm.argtypes = [_POINTER, _INT64, _INT64, _POINTER, _FLOAT, _POINTER, _INT32]
    library.rotate_and_store.argtypes = [
        *(_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT),
        *(_POINTER, _POINTER, _POINTER, _INT64, _POINTER, _POINTER, _INT32),
    ]
    library.attend.argtypes = [
        *(_POINTER, _INT64, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _INT64),
        *(_POINTER, _POINTER, _INT64, _INT64, _FLOAT, _FLOAT, _INT32),
    ]
    for function in (library.linear, library.rms_norm, library.rotate_and_store, library.attend):
        function.restype = None
    return library


def _cpu_flags() -> frozenset[str]:
    if sys.platform != "linux":
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def takes_weight(weight: torch.Tensor) -> bool:
    """Whether a linear layer with this ``weight [N, K]`` can be computed."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def takes_heads(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> bool:
    """Whether attention with `heads` heads of inner size `width`, over `kv_heads`, can be computed."""
    return dtype == torch.bfloat16 and width % 2 == 0 and width <= _WIDEST and heads // kv_heads <= _QUERIES


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight [N, K]`` in panels ``[ceil(N / 32), K / 2, 32, 2]``, filled up with 0."""
    columns, inner = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -columns % _COLUMNS))
    return padded.view(-1, _COLUMNS, inner // 2, 2).transpose(1, 2).contiguous()


def linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    columns: int,
    bias: torch.Tensor | None = None,
    then: str = "none",
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [n, K]`` times a packed weight of `columns` rows, plus ``bias [N]``; bfloat16 ``[n, N]``, rounded once.

    Args:
        x: bfloat16.
        panels: What `pack` returned.
        columns: N.
        bias: bfloat16.
        then: ``none``; ``silu``; or ``add`` or ``mul``, with `other`.
        other: bfloat16 ``[n, N]``.
    """
    rows, inner = x.shape
    x = x.contiguous()
    other = other.contiguous() if other is not None else None
    output = x.new_empty(rows, columns)
    _library().linear(
        *(x.data_ptr(), rows, inner, panels.data_ptr(), columns, _address(bias)),
        *(_THEN[then], _address(other), output.data_ptr(), torch.get_num_threads()),
    )
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x * x) + epsilon) * weight`` over the last dimension, rounded once.

    Args:
        x: bfloat16 ``[..., K]``.
        weight: bfloat16 ``[K]``.
        epsilon: Added to the mean.
    """
    x = x.contiguous()
    output = torch.empty_like(x)
    width = x.shape[-1]
    _library().rms_norm(
        *(x.data_ptr(), x.numel() // width, width, weight.data_ptr(), epsilon),
        *(output.data_ptr(), torch.get_num_threads()),
    )
    return output


@dataclass(frozen=True, slots=True)
class Projections:
    """What a layer's tokens attend with and to, not rotated yet; all bfloat16.

    Attributes:
        qkv: Queries, keys and values ``[T, H + 2 * Hkv, D]``.
        heads: H.
        cosine: Of each token's angles ``[T, D]``, of which the two halves are equal.
        sine: Likewise.
        norms: Weights ``[D]`` of an RMS norm of each head's query, and of its key, and their epsilon; None for none.
    """

    qkv: torch.Tensor
    heads: int
    cosine: torch.Tensor
    sine: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float] | None


def rotate_and_store(
    projections: Projections, keys: torch.Tensor, values: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Put rotated keys, and values, into the store ``[segments, Hkv, size, D]``; returns rotated queries ``[T, H, D]``.

    Args:
        projections: Of T tokens.
        keys: The layer's.
        values: Likewise.
        places: Segment and slot of each token, int64 ``[T]``.
    """
    tokens, _, width = projections.qkv.shape
    _, kv_heads, size, _ = keys.shape
    query = projections.qkv.new_empty(tokens, projections.heads, width)
    of_query, of_key, epsilon = projections.norms or (None, None, 0.0)
    _library().rotate_and_store(
        *(projections.qkv.data_ptr(), tokens, projections.heads, kv_heads, width),
        *(projections.cosine.data_ptr(), projections.sine.data_ptr(), _address(of_query), _address(of_key), epsilon),
        *(query.data_ptr(), keys.data_ptr(), values.data_ptr(), size),
        *(places[0].data_ptr(), places[1].data_ptr(), torch.get_num_threads()),
    )
    return query


class Tiles:
    """Which tokens of a step `attend` takes together, and where their keys lie.

    Args:
        spans: The rows, in the order of their tokens.
        group: Heads that share keys.
    """

    def __init__(self, spans: Sequence[Span], group: int) -> None:
        most = _QUERIES // group
        segments: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        token = 0
        for span in spans:
            for first in range(span.start, span.stop, most):
                tiles.append((token + first - span.start, min(most, span.stop - first), first, len(segments)))
            token += span.stop - span.start
            segments += span.segments
        self.segments = torch.tensor(segments)
        self.tiles = torch.tensor(tiles)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: Tiles,
    scale: float,
    window: int,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of ``query [T, H, D]`` over ``keys, values [segments, Hkv, size, D]``; bfloat16 ``[T, H, D]``.

    A token sees itself and the `window` - 1 tokens before it, or all of them if `window` is 0. Scores go through
    ``softcap * tanh(score / softcap)`` where it is given.
    """
    tokens, heads, width = query.shape
    _, kv_heads, size, _ = keys.shape
    if query.stride()[1:] != (width, 1):
        query = query.contiguous()
    output = query.new_empty(tokens, heads, width)
    _library().attend(
        *(query.data_ptr(), query.stride(0), output.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(kv_heads, heads // kv_heads, width, size, tiles.segments.data_ptr(), tiles.tiles.data_ptr()),
        *(len(tiles.tiles), window, scale, softcap or 0.0, torch.get_num_threads()),
    )
    return output


def _address(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
