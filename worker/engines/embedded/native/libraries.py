"""C libraries of kernels: which of them this installation has, and their functions and arguments.

There is one for each data type and each path of instructions. The structures of the functions'
arguments are declared in ``arguments.h`` alone: a library describes them, and Python makes its own
from that description.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

_VERSION = 28
"""Version of what arguments mean: ``kernels_version`` in ``linear.c``."""

FOLDER = Path(__file__).parent
"""Directory of the libraries."""

AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")

PATHS = ("amx", "avx512", "avx2", "neon", "generic")
"""Instructions that the kernels are built for, fastest first; ``generic`` is plain C. ``amx`` is
AMX in bfloat16; in float32 AMX for rows in 8 bits, and AVX-512 for all else. ``neon`` is that of
64-bit Arm.
"""


@dataclass(frozen=True, slots=True)
class DataType:
    """A data type that the kernels compute in.

    Attributes:
        name: Part of the names of its libraries.
        needs: CPU flags that the instructions of each path need.
        per_word: Elements in 32 bits.
        libraries: Paths that share another path's library, and that path.
        own_order: Paths that sum in an order of their own.
    """

    name: str
    needs: dict[str, tuple[str, ...]]
    per_word: int
    libraries: dict[str, str]
    own_order: tuple[str, ...]


def _needs(*more: str) -> dict[str, tuple[str, ...]]:
    avx512 = (*AVX512, *more)
    return {
        "amx": (*avx512, "amx_tile", "amx_int8", "amx_bf16"),
        "avx512": avx512,
        "avx2": ("avx2", "fma", "f16c"),
        "neon": ("asimd",),
        "generic": (),
    }


DATA_TYPES = {
    torch.bfloat16: DataType("bfloat16", _needs("avx512_bf16"), 2, {}, ("amx",)),
    torch.float32: DataType("float32", _needs(), 1, {"amx": "avx512"}, ()),
}

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

_C_TYPES = {"int64_t": _INT64, "int32_t": _INT32, "float": _FLOAT, "double": ctypes.c_double}


class KernelLibrary(ctypes.CDLL):
    """A loaded library: C functions, and structures of their arguments.

    The structures are attributes too, by their names in C: ``library.linear_t(rows=1)``. A field
    that is not set is 0, and one that does not exist is an `AttributeError`.

    Args:
        path: The file.

    Raises:
        RuntimeError: it is of another version.
        OSError: it cannot be loaded.
        AttributeError: it lacks a function.
    """

    gemm_t: Any
    linear_t: Any
    threads_t: Any
    rms_norm_t: Any
    rotation_t: Any
    attention_t: Any
    experts_t: Any
    layer_t: Any
    step_t: Any
    unpacking_t: Any
    blocks_t: Any
    weighing_t: Any
    drawing_t: Any
    scoring_t: Any

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.kernels_version.restype = _INT32
        if self.kernels_version() != _VERSION:
            raise RuntimeError(f"{path.name} is of another version of this package: install it again")
        self.kernels_arguments.restype = ctypes.c_char_p
        for line in self.kernels_arguments().decode().splitlines():
            name, _, fields = line.partition(":")
            setattr(self, f"{name}_t", _structure(name, fields))
        self._declare_functions()
        self._threads: dict[int, Any] = {}  # they stay, because kernels that run have their addresses

    def threads(self, count: int | None = None) -> int:
        """Address of a ``threads_t``: of `count` threads, or as many as torch computes with."""
        count = count or torch.get_num_threads()
        found = self._threads.get(count) or self._threads.setdefault(count, self.threads_t(count=count))
        return ctypes.addressof(found)

    def _declare_functions(self) -> None:
        """Types of arguments and results; some functions are in the libraries of float32 alone, and
        those of AMX where the compiler knows it.
        """
        linear, weighing = ctypes.POINTER(self.linear_t), ctypes.POINTER(self.weighing_t)
        blocks = ctypes.POINTER(self.blocks_t)
        signatures: dict[str, tuple[type | None, tuple[type, ...]]] = {
            "linear": (_INT32, (linear, _INT64, _POINTER)),
            "quantised_linear": (_INT32, (linear, _INT64, _POINTER)),
            "integer_linear": (_INT32, (linear, _INT64, _POINTER)),
            "integer_linear_amx": (_INT32, (linear, _INT64, _POINTER)),
            "dequantised_linear_amx": (_INT32, (linear, _INT64, _POINTER)),
            "unpack_rows": (_INT32, (ctypes.POINTER(self.unpacking_t),)),
            "rms_norm": (None, (ctypes.POINTER(self.rms_norm_t), _POINTER)),
            "soft_cap": (None, (_POINTER, _INT64, _FLOAT, _POINTER)),
            "rotate_and_store": (None, (ctypes.POINTER(self.rotation_t), _POINTER)),
            "attend": (None, (ctypes.POINTER(self.attention_t), _POINTER)),
            "decoder_layers": (_INT32, (ctypes.POINTER(self.step_t), _POINTER, _INT64, _POINTER, _POINTER)),
            "adapted_linear": (_INT32, (ctypes.POINTER(self.step_t), _INT64, linear, _POINTER)),
            "apply_masks": (None, (_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER)),
            "block_maxima": (None, (_POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER)),
            "highest_ids": (None, (_POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER, _POINTER)),
            "exponentials": (None, (_POINTER, _INT64)),
            "weigh": (_INT64, (weighing, _POINTER, _INT64, _POINTER, _POINTER)),
            "drawing_memory": (_INT64, (_INT64,)),
            "draw_tokens": (None, (ctypes.POINTER(self.drawing_t), _POINTER)),
            "score_tokens": (None, (ctypes.POINTER(self.scoring_t), _POINTER)),
            "take_prefix": (_INT64, (weighing, _POINTER, *[_INT64] * 3, *[_POINTER] * 3)),
            **{f"round_{kind}": (None, (blocks, _POINTER)) for kind in ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")},
            "copy_from_process": (_INT32, (_INT64, *[_POINTER] * 3, *[_INT64] * 3, _POINTER)),
            "fill_panels": (None, (_POINTER, _INT64, _INT64, _INT32, _POINTER, _POINTER)),
            "kernels_compute_alone": (None, ()),
            "kernels_have_fma": (_INT32, ()),
            "kernels_sum_in_order": (_INT32, ()),
        }
        for name, (result, arguments) in signatures.items():
            if hasattr(self, name):
                function = getattr(self, name)
                function.restype, function.argtypes = result, arguments


@cache
def _structure(name: str, fields: str) -> Any:
    """A `ctypes.Structure` of ``type name;...`` as C has it; without ``__dict__``, so that no other
    field can be set.
    """
    pairs = [field.rsplit(" ", 1) for field in fields.split(";") if field]
    types = [(field, _POINTER if kind.endswith("*") else _C_TYPES[kind]) for kind, field in pairs]
    return type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": types})


def address(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor's first element; None for none."""
    return tensor.data_ptr() if tensor is not None else None


@cache
def open_library(dtype: torch.dtype, path: str) -> KernelLibrary:
    """The C library of `dtype` in `path`.

    Raises:
        RuntimeError: this machine or installation has none; the message says why.
        OSError: it cannot be loaded.
        AttributeError: it is older and lacks a function.
    """
    data_type = DATA_TYPES.get(dtype)
    if data_type is None:
        raise RuntimeError(f"they compute bfloat16 and float32, not {dtype}")
    missing = missing_flags(dtype, path)
    if missing:
        raise RuntimeError(f"this processor has no {', '.join(missing)}")
    if path == "amx":
        _ask_for_tiles()
    library = _load(f"kernels_{data_type.libraries.get(path, path)}_{data_type.name}")
    if path == "amx" and dtype == torch.float32:
        if not hasattr(library, "integer_linear_amx"):
            raise RuntimeError("they were built without AMX: the C compiler does not know it")
        if not library.integers_in_tiles_are_exact():
            raise RuntimeError("this processor's amx computes other integers than its maker documents")
    if path in data_type.own_order and not library.kernels_sum_in_order():
        raise RuntimeError(f"this processor's {path} sums in another order than its maker documents")
    return library


def _load(stem: str) -> KernelLibrary:
    """The library of that name; errors as `open_library`."""
    paths = [path for path in (FOLDER / (stem + suffix) for suffix in EXTENSION_SUFFIXES) if path.exists()]
    if not paths:
        raise RuntimeError("they were not built: the package was installed where there was no C compiler")
    return KernelLibrary(paths[0])


def _ask_for_tiles() -> None:
    """Asks the system to keep AMX's tiles, for all threads; raises RuntimeError if it does not."""
    if platform.machine() != "x86_64":
        raise RuntimeError(f"a processor of {platform.machine()} has no AMX")
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_INT64(arch_prctl), _INT64(request_permission), _INT64(tile_data)):
        raise RuntimeError(f"the system does not let this process use AMX: {os.strerror(ctypes.get_errno())}")


def missing_flags(dtype: torch.dtype, path: str) -> list[str]:
    """CPU flags that `path` needs and this processor does not have."""
    flags = cpu_flags()
    return [flag for flag in DATA_TYPES[dtype].needs[path] if flag not in flags]


@cache
def cpu_flags() -> frozenset[str]:
    """CPU flags of this processor as Linux names them; none on another system."""
    if sys.platform != "linux":
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    named = ("flags", "Features")  # on x86, on Arm
    return frozenset(next((line for line in lines if line.startswith(named)), "").partition(":")[2].split())
