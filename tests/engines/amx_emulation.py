"""The native kernels' AMX path on every processor that has AVX-512: its instructions are emulated.

`amx_emulator.c` takes the signal that they raise there.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from worker.engines.embedded import native
from worker.engines.embedded.native import libraries

SOURCE = Path(__file__).with_name("amx_emulator.c")
FLAGS = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
IS_REAL = libraries.cpu_flags() >= FLAGS
"""Whether this processor has AMX."""


def reason_against(dtype: torch.dtype) -> str | None:
    """Why the path cannot be tested here; None if it can."""
    if IS_REAL:
        return native.unavailable(dtype, "amx")
    if shutil.which("cc") is None:
        return "nothing to build the emulator with"
    if reason := native.unavailable(dtype, "avx512") or native.unavailable(torch.float32, "avx512"):
        return reason
    has_tiles = hasattr(libraries.open_library(torch.float32, "avx512"), "integer_linear_amx")
    return None if has_tiles else "the C compiler does not know AMX"


@cache
def build_emulator() -> Path:
    """The shared library."""
    library = Path(tempfile.mkdtemp(prefix="amx-")) / "emulator.so"
    command = ["cc", "-O3", "-mavx2", "-mfma", "-shared", "-fPIC", SOURCE, "-o", library, "-lm"]
    subprocess.run(command, check=True, timeout=300)  # type: ignore[arg-type]
    return library


def emulated_instructions() -> int:
    """How many there have been in this process."""
    count = ctypes.CDLL(str(build_emulator())).amx_emulated
    count.restype = ctypes.c_long
    return int(count())


@contextmanager
def amx(emulates: bool = not IS_REAL) -> Iterator[None]:
    """The path is there for as long as this lasts.

    Args:
        emulates: Whether instructions are emulated. On a processor that has them they can be where
            the process has not asked the system for tiles.
    """
    if not emulates:
        yield
        return
    ctypes.CDLL(str(build_emulator()))
    flags = libraries.cpu_flags() | FLAGS
    try:
        with (
            mock.patch.object(libraries, "cpu_flags", return_value=flags),
            mock.patch.object(libraries, "_ask_for_tiles"),
        ):
            yield
    finally:
        libraries.open_library.cache_clear()
