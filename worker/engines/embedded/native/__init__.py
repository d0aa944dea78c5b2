"""Kernels of our own for a CPU with AVX-512: linear layers, attention over the KV store, and what
lies between.

They are built with the package where there is a C compiler. Every sum in them runs in an order that
depends on the token alone, so that what a token gets is the same, bit by bit, in any batch; and few
rows are computed at the speed at which weights and keys are read. Tensors are passed by address:
whatever is passed must be contiguous, but for the strides that are named. All tensors of a call are
of one data type: bfloat16, which also needs AVX512-BF16, or float32.
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

from worker.engines.embedded.kv_cache import SequenceSlice

_VERSION = 1
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is particular to a data type.

    Attributes:
        name: Of its library.
        needs: Flags of the processor.
        outrun_with: A flag of processors on which torch's kernels compute prompts several times as
            fast.
        per_word: Elements in 32 bits.
    """

    name: str
    needs: tuple[str, ...]
    outrun_with: str | None
    per_word: int


_KINDS = {
    torch.bfloat16: _Kind("kernels_bfloat16", (*_AVX512, "avx512_bf16"), "amx_bf16", 2),
    torch.float32: _Kind("kernels_float32", _AVX512, None, 1),
}

_COLUMNS = 32
"""Of a panel, as in ``panels.h``."""

_QUERIES = 64
"""Of a tile at most: ``TOGETHER`` in ``attention.c``."""

_WIDEST = 256
"""Inner size of a head at most: ``WIDEST`` in ``attention.c``."""

_THEN = {"none": 0, "silu": 1, "add": 2, "mul": 3}

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


@cache
def unavailable(dtype: torch.dtype) -> str | None:
    """Why this machine or installation has no native kernels for `dtype`; None if it has."""
    try:
        _library(dtype)
    except (OSError, RuntimeError, AttributeError) as error:
        return str(error)
    return None


def is_outrun(dtype: torch.dtype) -> bool:
    """Whether torch's kernels compute prompts several times as fast on this processor, as
    oneDNN's do with AMX.
    """
    return _KINDS[dtype].outrun_with in _cpu_flags()


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Raises `RuntimeError`, `OSError` or `AttributeError` (an older one lacks a function)
    saying why there is none.
    """
    kind = _KINDS.get(dtype)
    if kind is None:
        raise RuntimeError(f"they compute bfloat16 and float32, not {dtype}")
    flags = _cpu_flags()
    missing = [flag for flag in kind.needs if flag not in flags]
    if missing:
        raise RuntimeError(f"this processor has no {', '.join(missing)}")
    names = (Path(__file__).with_name(kind.name + suffix) for suffix in EXTENSION_SUFFIXES)
    paths = [path for path in names if path.exists()]
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
    return (
        weight.device.type == "cpu" and weight.dtype in _KINDS and weight.shape[1] % _KINDS[weight.dtype].per_word == 0
    )


def takes_heads(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> bool:
    """Whether attention with `heads` heads of inner size `width`, over `kv_heads`, can be
    computed.
    """
    return dtype in _KINDS and width % 2 == 0 and width <= _WIDEST and heads // kv_heads <= _QUERIES


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight [N, K]`` in panels ``[ceil(N / 32), K / w, 32, w]``, w elements to a word; filled
    up with 0.
    """
    columns, inner = weight.shape
    per_word = _KINDS[weight.dtype].per_word
    padded = functional.pad(weight, (0, 0, 0, -columns % _COLUMNS))
    return padded.view(-1, _COLUMNS, inner // per_word, per_word).transpose(1, 2).contiguous()


def linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    columns: int,
    bias: torch.Tensor | None = None,
    then: str = "none",
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [n, K]`` times a packed weight of `columns` rows, plus ``bias [N]``; ``[n, N]``, rounded
    once.

    Args:
        x: Rows.
        panels: What `pack` returned.
        columns: N.
        bias: None for none.
        then: ``none``; ``silu``; or ``add`` or ``mul``, with `other`.
        other: ``[n, N]``.
    """
    rows, inner = x.shape
    x = x.contiguous()
    other = other.contiguous() if other is not None else None
    output = x.new_empty(rows, columns)
    _library(x.dtype).linear(
        *(x.data_ptr(), rows, inner, panels.data_ptr(), columns, _address(bias)),
        *(_THEN[then], _address(other), output.data_ptr(), torch.get_num_threads()),
    )
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``x / sqrt(mean(x * x) + epsilon) * weight`` over the last dimension, rounded once.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``.
        epsilon: Added to the mean.
    """
    x = x.contiguous()
    output = torch.empty_like(x)
    width = x.shape[-1]
    _library(x.dtype).rms_norm(
        *(x.data_ptr(), x.numel() // width, width, weight.data_ptr(), epsilon),
        *(output.data_ptr(), torch.get_num_threads()),
    )
    return output


@dataclass(frozen=True, slots=True)
class Projections:
    """What a layer's tokens attend with and to, not rotated yet.

    Attributes:
        qkv: Queries, keys and values ``[T, H + 2 * Hkv, D]``.
        heads: H.
        cosine: Of each token's angles ``[T, D]``, of which the two halves are equal.
        sine: Likewise.
        norms: Weights ``[D]`` of an RMS norm of each head's query, and of its key, and their
            epsilon; None for none.
    """

    qkv: torch.Tensor
    heads: int
    cosine: torch.Tensor
    sine: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float] | None


def rotate_and_store(
    projections: Projections, keys: torch.Tensor, values: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Put rotated keys, and values, into the store ``[pages, Hkv, size, D]``; returns rotated
    queries ``[T, H, D]``.

    Args:
        projections: Of T tokens.
        keys: The layer's.
        values: Likewise.
        places: Page and slot of each token, int64 ``[T]``.
    """
    tokens, _, width = projections.qkv.shape
    _, kv_heads, size, _ = keys.shape
    query = projections.qkv.new_empty(tokens, projections.heads, width)
    of_query, of_key, epsilon = projections.norms or (None, None, 0.0)
    _library(query.dtype).rotate_and_store(
        *(projections.qkv.data_ptr(), tokens, projections.heads, kv_heads, width),
        *(projections.cosine.data_ptr(), projections.sine.data_ptr(), _address(of_query), _address(of_key), epsilon),
        *(query.data_ptr(), keys.data_ptr(), values.data_ptr(), size),
        *(places[0].data_ptr(), places[1].data_ptr(), torch.get_num_threads()),
    )
    return query


class Tiles:
    """Which tokens of a step `attend` takes together, and where their keys lie.

    Args:
        sequences: The rows, in the order of their tokens.
        group: Heads that share keys.
    """

    def __init__(self, sequences: Sequence[SequenceSlice], group: int) -> None:
        most = _QUERIES // group
        pages: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        token = 0
        for sequence in sequences:
            for first in range(sequence.start, sequence.stop, most):
                tiles.append((token + first - sequence.start, min(most, sequence.stop - first), first, len(pages)))
            token += sequence.stop - sequence.start
            pages += sequence.page_table
        self.pages = torch.tensor(pages)
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
    """Attention of ``query [T, H, D]`` over ``keys, values [pages, Hkv, size, D]``; ``[T, H,
    D]``.

    A token sees itself and the `window` - 1 tokens before it, or all of them if `window` is 0.
    Scores go through ``softcap * tanh(score / softcap)`` where it is given.
    """
    tokens, heads, width = query.shape
    _, kv_heads, size, _ = keys.shape
    if query.stride()[1:] != (width, 1):
        query = query.contiguous()
    output = query.new_empty(tokens, heads, width)
    _library(query.dtype).attend(
        *(query.data_ptr(), query.stride(0), output.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(kv_heads, heads // kv_heads, width, size, tiles.pages.data_ptr(), tiles.tiles.data_ptr()),
        *(len(tiles.tiles), window, scale, softcap or 0.0, torch.get_num_threads()),
    )
    return output


def _address(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
