"""Native kernels for CPUs: GEMM, RMSNorm, RoPE, and attention over the paged KV cache; and the
weights that tokens are sampled with (`weights`).

They are built with the package where there is a C compiler, once for each path of instructions:
AMX, AVX-512, AVX2, and plain C. They are batch-invariant: every sum runs in an order that depends
on the token alone, and that is the same in all paths but AMX in bfloat16, so that processors that
take different ones compute the same bits. And they compute few rows at the speed at which weights
and keys are read. Tensors are passed by address: whatever is passed must be contiguous, but for the
strides that are named. All tensors of a call are of one data type, bfloat16 or float32, but for
pages in int8.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch.nn import functional

from worker.engines.embedded.kv_cache import SequenceSlice

logger = logging.getLogger(__name__)

_VERSION = 12
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")

PATHS = ("amx", "avx512", "avx2", "generic")
"""Instructions that the kernels are built for, fastest first; ``generic`` is plain C. ``amx`` is
AMX in bfloat16; in float32 AMX for rows in 8 bits, and AVX-512 for all else.
"""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is particular to a data type.

    Attributes:
        name: In the names of its libraries.
        needs: CPU flags that the instructions of each path need.
        per_word: Elements in 32 bits.
        libraries: Whose library a path has, if not its own.
        own_order: Paths that sum in an order of their own.
    """

    name: str
    needs: dict[str, tuple[str, ...]]
    per_word: int
    libraries: dict[str, str]
    own_order: tuple[str, ...]


def _needs(*more: str) -> dict[str, tuple[str, ...]]:
    avx512 = (*_AVX512, *more)
    return {
        "amx": (*avx512, "amx_tile", "amx_int8", "amx_bf16"),
        "avx512": avx512,
        "avx2": ("avx2", "fma", "f16c"),
        "generic": (),
    }


_KINDS = {
    torch.bfloat16: _Kind("bfloat16", _needs("avx512_bf16"), 2, {}, ("amx",)),
    torch.float32: _Kind("float32", _needs(), 1, {"amx": "avx512"}, ()),
}

COLUMNS = 32
"""Rows of a weight in one panel: ``COLUMNS`` in ``panels.h``."""

_QUERIES = 64
"""Queries of a tile at most: ``TOGETHER`` in ``attention.c``."""

_WIDEST = 256
"""Largest head size: ``WIDEST`` in ``kv_rows.h``."""

ACTIVATIONS = {"silu": 1, "gelu": 4, "gelu_tanh": 5, "relu": 6}

EPILOGUES = {"none": 0, "add": 2, "mul": 3, **ACTIVATIONS}

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


_chosen: dict[torch.dtype, str] = {}
"""The path that computes in each data type, where `choose_path` was asked for another than the
first that runs here.
"""


def unavailable(dtype: torch.dtype, path: str | None = None) -> str | None:
    """Why this machine or installation has no native kernels for `dtype`; None if it has.

    Args:
        dtype: Of the tensors.
        path: One of `PATHS`; None for any of them.
    """
    if path is None:
        reasons = [unavailable(dtype, each) for each in PATHS]
        return None if None in reasons else reasons[-1]
    try:
        _open(dtype, path)
    except (OSError, RuntimeError, AttributeError) as error:
        return str(error)
    return None


def choose_path(dtype: torch.dtype, path: str | None = None) -> str:
    """Compute in `dtype` with the instructions of `path`, or of the fastest that runs here.

    It holds for the process: packed weights are the same in all of them. Returns the path. A faster
    one for which the processor has the instructions, but which does not run, is logged.
    """
    path = path or next(path for path in PATHS if path == PATHS[-1] or _runs(dtype, path))
    _chosen[dtype] = path
    return path


def _runs(dtype: torch.dtype, path: str) -> bool:
    reason = unavailable(dtype, path)
    if reason is not None and not _missing_flags(dtype, path):
        logger.warning("kernels native-%s are not used in %s: %s", path, dtype, reason)
    return reason is None


def is_torch_faster(dtype: torch.dtype, path: str) -> bool:
    """Whether torch's kernels are much faster on this CPU than those of `path`.

    Plain C is slow where the processor has no FMA, which it then emulates.
    """
    return not _open(dtype, path).kernels_have_fma()


def sums_as_others(dtype: torch.dtype, path: str) -> bool:
    """Whether `path` sums in the order of plain C on this processor, so that their bits are equal.

    AMX in bfloat16 does not, and AVX512-BF16 might do otherwise on some processor.
    """
    return path not in _KINDS[dtype].own_order and bool(_open(dtype, path).kernels_sum_in_order())


def chosen_path(dtype: torch.dtype) -> str:
    """The path that computes in `dtype`."""
    return _chosen.get(dtype) or choose_path(dtype)


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The C library of `dtype` in the chosen path; raises as `_open` does."""
    return _open(dtype, chosen_path(dtype))


@cache
def _open(dtype: torch.dtype, path: str) -> ctypes.CDLL:
    """The C library of `dtype` in `path`.

    Raises:
        RuntimeError: this machine or installation has none; the message says why.
        OSError: it cannot be loaded.
        AttributeError: it is older and lacks a function.
    """
    kind = _KINDS.get(dtype)
    if kind is None:
        raise RuntimeError(f"they compute bfloat16 and float32, not {dtype}")
    missing = _missing_flags(dtype, path)
    if missing:
        raise RuntimeError(f"this processor has no {', '.join(missing)}")
    if path == "amx":
        _ask_for_tiles()
    library = _load(f"kernels_{kind.libraries.get(path, path)}_{kind.name}")
    if path == "amx" and dtype == torch.float32:
        if not hasattr(library, "integer_linear_amx"):
            raise RuntimeError("they were built without AMX: the C compiler does not know it")
        if not library.integers_in_tiles_are_exact():
            raise RuntimeError("this processor's amx computes other integers than its maker documents")
    if path in kind.own_order and not library.kernels_sum_in_order():
        raise RuntimeError(f"this processor's {path} sums in another order than its maker documents")
    return library


def _ask_for_tiles() -> None:
    """Asks the system to keep AMX's tiles, for all threads; raises RuntimeError if it does not."""
    if platform.machine() != "x86_64":
        raise RuntimeError(f"a processor of {platform.machine()} has no AMX")
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_INT64(arch_prctl), _INT64(request_permission), _INT64(tile_data)):
        raise RuntimeError(f"the system does not let this process use AMX: {os.strerror(ctypes.get_errno())}")


def _load(stem: str) -> ctypes.CDLL:
    """The library of that name, in this folder; errors as `_open`."""
    names = (Path(__file__).with_name(stem + suffix) for suffix in EXTENSION_SUFFIXES)
    paths = [path for path in names if path.exists()]
    if not paths:
        raise RuntimeError("they were not built: the package was installed where there was no C compiler")
    library = ctypes.CDLL(str(paths[0]))
    library.kernels_version.restype = _INT32
    if library.kernels_version() != _VERSION:
        raise RuntimeError(f"{paths[0].name} is of another version of this package: install it again")
    return _declare(library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """`library`, with the types of its functions' arguments."""
    library.linear.argtypes = [
        *(_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER),
        *(_INT32, _POINTER, _POINTER, _INT32, _POINTER),
    ]
    library.rms_norm.argtypes = [_POINTER, _INT64, _INT64, _POINTER, _FLOAT, _POINTER, _POINTER]
    library.rotate_and_store.argtypes = [
        *(_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT),
        *(_POINTER, _POINTER, _POINTER, _INT32, _INT64, _POINTER, _POINTER, _POINTER),
    ]
    library.attend.argtypes = [
        *(_POINTER, _INT64, _POINTER, _POINTER, _POINTER, _INT32, _INT64, _INT64, _INT64, _INT64),
        *(_POINTER, _POINTER, _INT64, _INT64, _FLOAT, _FLOAT, _POINTER),
    ]
    library.decoder_layers.argtypes = [_POINTER, _POINTER, _INT64, _POINTER]
    for answer in (
        *(library.linear, library.decoder_layers),
        *(library.kernels_have_fma, library.kernels_sum_in_order),
    ):
        answer.restype = _INT32
    for name in ("quantised_linear", "integer_linear", "integer_linear_amx"):
        if hasattr(library, name):  # in those of float32, the last one where the compiler knows AMX
            function = getattr(library, name)
            function.argtypes = [
                *(_POINTER, _INT32, _INT64, _INT64, _POINTER, _INT32, _INT64, _POINTER, _POINTER, _INT32, _FLOAT),
                *(_INT64, _POINTER, _INT32, _POINTER, _POINTER, _INT32, _POINTER),
            ]
            function.restype = _INT32
    for function in (library.rms_norm, library.rotate_and_store, library.attend):
        function.restype = None
    if hasattr(library, "weigh"):  # in those of float32
        library.soft_cap.argtypes = [_POINTER, _INT64, _FLOAT, _POINTER]
        library.soft_cap.restype = None
        library.block_maxima.argtypes = [_POINTER, _INT64, _INT64, _INT64, _POINTER]
        library.highest_ids.argtypes = [_POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER]
        library.highest_ids.restype = None
        library.unpack_rows.argtypes = [
            *(_POINTER, _INT32, _INT32, _INT64, _POINTER, _POINTER, _INT32, _FLOAT, _INT64, _INT64),
            *(_POINTER, _INT64, _INT32, _POINTER),
        ]
        library.unpack_rows.restype = _INT32
        library.exponentials.argtypes = [_POINTER, _INT64]
        library.block_maxima.restype = library.exponentials.restype = None
        library.weigh.argtypes = [_POINTER, _POINTER, _INT64, _POINTER, _POINTER]
        library.take_prefix.argtypes = [*(_POINTER, _POINTER, _INT64, _INT64, _INT64), *(_POINTER, _POINTER, _POINTER)]
        library.weigh.restype = library.take_prefix.restype = _INT64
    return library


class _CTeam(ctypes.Structure):
    """``team_t`` in ``team.h``."""

    _fields_ = (("threads", _INT32), ("crew", _POINTER))


_teams: dict[int, _CTeam] = {}
"""By their threads; they stay, because kernels that run have their addresses."""


def team() -> int:
    """Address of who computes: as many threads as torch computes with."""
    threads = torch.get_num_threads()
    found = _teams.get(threads) or _teams.setdefault(threads, _CTeam(threads, None))
    return ctypes.addressof(found)


def _missing_flags(dtype: torch.dtype, path: str) -> list[str]:
    """Those that `path` needs and this processor does not have."""
    flags = _cpu_flags()
    return [flag for flag in _KINDS[dtype].needs[path] if flag not in flags]


@cache
def _cpu_flags() -> frozenset[str]:
    if sys.platform != "linux":
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def supports_weight(weight: torch.Tensor) -> bool:
    """Whether `linear` computes with this ``weight [N, K]``."""
    return (
        weight.device.type == "cpu" and weight.dtype in _KINDS and weight.shape[1] % _KINDS[weight.dtype].per_word == 0
    )


def supports_heads(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `attend` computes attention of `heads` query heads over `kv_heads` key heads."""
    if kv_heads < 1 or heads % kv_heads:
        return False
    return dtype in _KINDS and head_dim % 2 == 0 and head_dim <= _WIDEST and heads // kv_heads <= _QUERIES


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight [N, K]`` packed into panels ``[ceil(N / 32), K / w, 32, w]``, w elements to a word.

    Word w of all 32 rows of a panel is contiguous and fills two vector registers, so that a GEMM
    reads each panel once, from front to back. Missing rows of the last panel are 0.
    """
    columns, inner = weight.shape
    per_word = _KINDS[weight.dtype].per_word
    padded = functional.pad(weight, (0, 0, 0, -columns % COLUMNS))
    return padded.view(-1, COLUMNS, inner // per_word, per_word).transpose(1, 2).contiguous()


def check_panels(panels: torch.Tensor, columns: int) -> None:
    """Raises `ValueError` if `panels` are not what `pack` returns for ``columns`` rows."""
    per_word = _KINDS[panels.dtype].per_word if panels.dtype in _KINDS else 0
    if panels.dim() != 4 or (panels.shape[0], *panels.shape[2:]) != (-(-columns // COLUMNS), COLUMNS, per_word):
        raise ValueError(f"panels {panels.dtype} {list(panels.shape)} hold no weight of {columns} rows")


def linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    columns: int,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    other: torch.Tensor | None = None,
    is_unrounded: bool = False,
) -> torch.Tensor:
    """GEMM: ``x [n, K]`` times a packed weight ``[N, K]``, plus a bias; ``[n, N]``, rounded once.

    Args:
        x: Rows.
        panels: What `pack` returned.
        columns: N.
        bias: ``[N]``; None for none.
        epilogue: ``none``; one of `ACTIVATIONS`; or ``add`` or ``mul`` with `other`.
        other: ``[n, N]``.
        is_unrounded: Whether the result is the float32 sums instead, which are not rounded.

    Raises:
        MemoryError: there is no memory for the rows in float32, as AVX2 and plain C read them.
    """
    rows, inner = x.shape
    x = x.contiguous()
    other = other.contiguous() if other is not None else None
    output = x.new_empty(rows, columns, dtype=torch.float32 if is_unrounded else x.dtype)
    failed = library(x.dtype).linear(
        *(x.data_ptr(), rows, inner, panels.data_ptr(), columns, address(bias)),
        *(EPILOGUES[epilogue], address(other), output.data_ptr(), is_unrounded, team()),
    )
    if failed:
        raise MemoryError(f"no memory for {rows} rows of {inner} elements in float32")
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm: ``x / sqrt(mean(x * x) + epsilon) * weight`` over the last dimension, rounded once.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``.
        epsilon: Added to the mean.
    """
    x = x.contiguous()
    output = torch.empty_like(x)
    width = x.shape[-1]
    library(x.dtype).rms_norm(
        *(x.data_ptr(), x.numel() // width, width, weight.data_ptr(), epsilon),
        *(output.data_ptr(), team()),
    )
    return output


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)`` of float32 numbers, in place; returns them."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"soft_cap computes contiguous float32, not {x.dtype} of strides {x.stride()}")
    library(x.dtype).soft_cap(x.data_ptr(), x.numel(), cap, team())
    return x


@dataclass(frozen=True, slots=True)
class Projections:
    """The output of a fused QKV projection, and what RMSNorm per head and RoPE need.

    Attributes:
        qkv: Queries, keys and values ``[T, H + 2 * Hkv, D]``.
        heads: H.
        cosine: RoPE cosines of at least T tokens ``[T, D]``, the two halves of D equal.
        sine: Likewise.
        norms: RMSNorm weights ``[D]`` of each query head and of each key head, and their epsilon;
            None for none.
    """

    qkv: torch.Tensor
    heads: int
    cosine: torch.Tensor
    sine: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float] | None


def rotate_and_store(
    projections: Projections, keys: torch.Tensor, values: torch.Tensor, slot_mapping: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """RMSNorm per head and RoPE; writes keys and values to the KV cache, returns queries.

    Args:
        projections: Of T tokens.
        keys: The layer's pages, ``[pages, Hkv, page size, D]``; or in int8, of the rows of
            `kv_cache.Int8Rows`.
        values: Likewise.
        slot_mapping: Page and slot to which each token's KV is written, int64 ``[T]``.

    Returns:
        Rotated queries ``[T, H, D]``.
    """
    tokens, _, width = projections.qkv.shape
    _, kv_heads, size, _ = keys.shape
    query = projections.qkv.new_empty(tokens, projections.heads, width)
    of_query, of_key, epsilon = projections.norms or (None, None, 0.0)
    library(query.dtype).rotate_and_store(
        *(projections.qkv.data_ptr(), tokens, projections.heads, kv_heads, width),
        *(projections.cosine.data_ptr(), projections.sine.data_ptr(), address(of_query), address(of_key), epsilon),
        *(query.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.dtype == torch.int8, size),
        *(slot_mapping[0].data_ptr(), slot_mapping[1].data_ptr(), team()),
    )
    return query


class Tiles:
    """Query tiles and page tables of a step.

    A tile is consecutive tokens of one row, whose heads that share keys make up to 64 queries: each
    block of keys is laid out in panels once for all of them.

    Args:
        sequences: The rows, in the order of their tokens.
        group: Query heads per key head.

    Attributes:
        page_table: Pages of all rows, one row after another, int64.
        tiles: First token, number of tokens, position of the first in its sequence, and index into
            `page_table` at which the row's pages begin, int64 ``[n, 4]``.
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
        self.page_table = torch.tensor(pages)
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
    """Attention of ``query [T, H, D]`` over the paged KV cache; returns ``[T, H, D]``.

    Args:
        query: After RoPE.
        keys: The layer's pages, ``[pages, Hkv, page size, D]``; or in int8, of the rows of
            `kv_cache.Int8Rows`.
        values: Likewise.
        tiles: Of this step.
        scale: Factor of the scores.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        softcap: Scores go through ``softcap * tanh(score / softcap)``; None for none.
    """
    tokens, heads, width = query.shape
    _, kv_heads, size, _ = keys.shape
    if query.stride()[1:] != (width, 1):
        query = query.contiguous()
    output = query.new_empty(tokens, heads, width)
    library(query.dtype).attend(
        *(query.data_ptr(), query.stride(0), output.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(keys.dtype == torch.int8, kv_heads, heads // kv_heads, width, size),
        *(tiles.page_table.data_ptr(), tiles.tiles.data_ptr()),
        *(len(tiles.tiles), window, scale, softcap or 0.0, team()),
    )
    return output


def address(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
