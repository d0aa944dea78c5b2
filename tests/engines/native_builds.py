"""The native kernels compiled by a test, with options of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from worker.engines.embedded.native import libraries

_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
FLAGS = {
    "amx": _AVX512,
    "avx512": _AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "neon": [],
    "generic": ["-DPLAIN_C=1"],
}

DOT_IN_EVEX = "-DDOT_IN_EVEX=1"
"""AVX2 with the instruction of AVX-VNNI in the form that processors with AVX-512 have."""

needs_compiler = pytest.mark.native

needs_dot_in_evex = pytest.mark.skipif(
    shutil.which("cc") is None or not libraries.cpu_flags() >= {"avx512vl", "avx512_vnni"},
    reason="no compiler, or a processor without AVX512VL and AVX512-VNNI",
)


ALWAYS = ("-Wno-psabi", "-ffp-contract=off", "-fno-math-errno", f"-I{libraries.FOLDER}")


def compile_kernels(path: str, to: Path, *options: str, compiler: Sequence[str] = ("cc", "-fopenmp")) -> None:
    """The kernels in the instructions of `path`, with `options`: a program or a library."""
    sources = map(str, sorted(libraries.FOLDER.glob("*.c")))
    command = [*compiler, *ALWAYS, *FLAGS[path], *options, *sources, "-lm", "-o", str(to)]
    subprocess.run(command, check=True, timeout=300)
