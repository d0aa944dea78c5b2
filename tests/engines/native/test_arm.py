"""The native kernels on 64-bit Arm: cross-compiled and run in emulation, they have the bits of x86.

Processors with and without SDOT are emulated. Speed is not tested: an emulator has none to measure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_builds import FLAGS, compile_kernels
from test_native_sanitizers import DIGESTS, FUZZ, ROUNDS

from worker.engines.embedded import native
from worker.engines.embedded.native import libraries

pytestmark = [pytest.mark.native_build, pytest.mark.campaign, pytest.mark.timeout(600)]

EDGES = Path(__file__).with_name("vector_edges.c")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PROCESSORS = ("max", "cortex-a72")
"""Processors of the emulator: the second one has no SDOT."""

SEEDS = (2, 3)
EDGE_ROUNDS = 3000


@pytest.fixture(autouse=True, scope="module")
def _tools() -> None:
    for tool, package in ((COMPILER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"), (EMULATOR, "qemu-user")):
        assert shutil.which(tool), f"no {tool}, which these tests need: apt-get install {package}"


def digest(*command: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (command, done.stderr[-3000:])
    return done.stdout.strip()


def x86_paths(dtype: str) -> Iterator[str]:
    """The paths of this processor that sum in the common order."""
    (known,) = (each for each in libraries.DATA_TYPES if str(each) == f"torch.{dtype}")
    for path in native.PATHS:
        if path != "amx" and native.unavailable(known, path) is None:
            yield path


def options_of(path: str, dtype: str) -> list[str]:
    kind = ["-DFLOAT32=1"] if dtype == "float32" else ["-mavx512bf16"] if path == "avx512" else []
    return ["-O2", f"-I{FUZZ.parent}", *kind]


@pytest.mark.parametrize("path", ["neon", "generic"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arm_has_the_bits_of_x86(dtype: str, path: str, tmp_path: Path) -> None:
    """All kernels, with odd sizes; a digest of all results, and those of other seeds."""
    expected = {str(known): of for known, of in DIGESTS.items()}[f"torch.{dtype}"]
    program = tmp_path / "fuzz"
    compile_kernels(path, program, *options_of(path, dtype), "-static", str(FUZZ), compiler=COMPILER)
    for processor in PROCESSORS:
        assert digest(EMULATOR, "-cpu", processor, program, ROUNDS) == expected, processor
    here = {}
    for other in x86_paths(dtype):
        compile_kernels(other, tmp_path / other, *options_of(other, dtype), str(FUZZ))
        here[other] = [digest(tmp_path / other, ROUNDS // 3, seed) for seed in SEEDS]
    there = [digest(EMULATOR, "-cpu", PROCESSORS[0], program, ROUNDS // 3, seed) for seed in SEEDS]
    assert here == dict.fromkeys({*here, "generic"}, there)
    assert len(set(there)) == len(SEEDS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vectors_agree_at_the_edges(dtype: str, tmp_path: Path) -> None:
    """Subnormal and infinite numbers, no numbers, ties: each function of the three layers and of
    NEON's, alone.
    """

    def compiled(path: str, compiler: str, *options: str) -> Path:
        program = tmp_path / f"{compiler}-{path}"
        command = [compiler, "-Wno-psabi", "-ffp-contract=off", "-fno-math-errno", *FLAGS[path]]
        files = [f"-I{libraries.FOLDER}", str(EDGES), "-lm", "-o", str(program)]
        subprocess.run([*command, *options_of(path, dtype), *options, *files], check=True, timeout=100)
        return program

    commands: dict[str, list[object]] = {path: [compiled(path, "cc")] for path in x86_paths(dtype)}
    for path in ("neon", "generic"):
        program = compiled(path, COMPILER, "-static")
        for processor in PROCESSORS:
            commands[f"{path} on {processor}"] = [EMULATOR, "-cpu", processor, program]
    for seed in SEEDS:
        found = {name: digest(*command, EDGE_ROUNDS, seed) for name, command in commands.items()}
        assert len(set(found.values())) == 1, found
