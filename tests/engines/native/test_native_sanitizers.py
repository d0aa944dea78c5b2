"""The native kernels with odd sizes under AddressSanitizer and UndefinedBehaviorSanitizer, and how
their threads share work.

The bits of their results are asked for, too: they are the same on every processor.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import amx_emulation
import pytest
import torch
from native_builds import DOT_IN_EVEX, compile_kernels, needs_compiler, needs_dot_in_evex

from worker.engines.embedded import native
from worker.engines.embedded.native import libraries

pytestmark = [pytest.mark.native_build, pytest.mark.timeout(400)]  # sanitizers take minutes beside load

FUZZ = Path(__file__).with_name("native_fuzz.c")
TEAM = Path(__file__).with_name("team_stress.c")
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ROUNDS = 60
DIGESTS = {torch.bfloat16: "3659cf4ede4b8129", torch.float32: "105f20bcc822f38d"}
"""Of all results, as AVX-512 in float32, AVX2 and plain C on x86-64 have them."""

IN_TILES = "665bf768dede53eb"
"""Of bfloat16 with AMX, which sums in an order of its own."""

DEQUANTISED = "61cdbe45bd1a6d50"
"""Of float32 where AMX in bfloat16 multiplies quantised weights."""


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_fuzz_knows_the_kernels(dtype: torch.dtype, tmp_path: Path) -> None:
    """Plain C, no sanitizers: it fits the arguments that the kernels have now, and its digests are
    those of what it does now, which campaigns alone would tell otherwise.
    """
    options = [*(["-DFLOAT32=1"] if dtype == torch.float32 else []), f"-I{FUZZ.parent}", str(FUZZ)]
    strict = ("-O0", "-Werror=incompatible-pointer-types", "-Werror=int-conversion")
    compile_kernels("generic", tmp_path / "fuzz", *strict, *options)
    done = subprocess.run([tmp_path / "fuzz", str(ROUNDS)], check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == DIGESTS[dtype]


@pytest.mark.campaign
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_beside_a_buffer_is_touched(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of the fastest path that this processor has: the others differ in `vector_*.h` alone."""
    path = next(path for path in native.PATHS if path != "amx" and native.unavailable(dtype, path) is None)
    check(path, dtype, tmp_path)


@pytest.mark.campaign
@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "option", "digest"),
    [
        (torch.bfloat16, "-DWITH_AMX=1", IN_TILES),
        (torch.float32, "-DINTEGERS_WITH_AMX=1", DIGESTS[torch.float32]),
        (torch.float32, "-DDEQUANTISES_WITH_AMX=1", DEQUANTISED),
    ],
)
@pytest.mark.parametrize("is_emulated", [True, False], ids=["emulated", "by the processor"])
def test_of_amx(is_emulated: bool, dtype: torch.dtype, option: str, digest: str, tmp_path: Path) -> None:
    """Where it is emulated, a tile's rows, too, are seen to be in a buffer."""
    if reason := amx_emulation.reason_against(torch.bfloat16):
        pytest.skip(reason)
    if not is_emulated and not amx_emulation.IS_REAL:
        pytest.skip("this processor has no AMX")
    tiles = str(amx_emulation.SOURCE) if is_emulated else "-DASK_FOR_TILES=1"
    check("amx", dtype, tmp_path, option, tiles, digest=digest)


@pytest.mark.campaign
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("path", [path for path in native.PATHS if path != "amx"])
def test_of_every_path(path: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if native.unavailable(dtype, path) is None:
        check(path, dtype, tmp_path)


@pytest.mark.campaign
@needs_compiler
@pytest.mark.parametrize("path", ["avx512", "avx2"])
def test_without_vnni(path: str, tmp_path: Path) -> None:
    if native.unavailable(torch.float32, path) is None:
        check(path, torch.float32, tmp_path, "-DWITHOUT_VNNI=1")


@pytest.mark.campaign
@needs_dot_in_evex
def test_of_avx2_with_vnni(tmp_path: Path) -> None:
    check("avx2", torch.float32, tmp_path, DOT_IN_EVEX)


@needs_compiler
@pytest.mark.parametrize("options", [("-O2",), ("-O1", *SANITIZERS)], ids=["fast", "sanitized"])
@pytest.mark.parametrize("limit", ["6", "2"])
def test_each_part_of_a_job_is_computed_once(options: tuple[str, ...], limit: str, tmp_path: Path) -> None:
    """By pools of 1 to 6 threads; `limit` is how many OpenMP gives at most."""
    program = tmp_path / "team"
    folder = libraries.FOLDER
    subprocess.run(
        ["cc", "-Wno-psabi", "-fopenmp", *options, f"-I{folder}", TEAM, "-o", program], check=True, timeout=60
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": limit, "GOMP_SPINCOUNT": "5000"}
    done = subprocess.run([program, "1000"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def check(path: str, dtype: torch.dtype, directory: Path, *options: str, digest: str | None = None) -> None:
    has_avx512 = path in ("amx", "avx512")
    kind = ["-DFLOAT32=1"] if dtype == torch.float32 else ["-mavx512bf16"] if has_avx512 else []
    program = directory / "fuzz"
    compile_kernels(path, program, "-O0", *SANITIZERS, *kind, *options, str(FUZZ))
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([program, str(ROUNDS)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == (digest or DIGESTS[dtype])
