"""The native kernels on 64-bit Arm: cross-compiled and run in emulation, they have the bits of x86.

Processors with and without SDOT are emulated. Speed is not tested: an emulator has none to measure.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import arm_emulation
import pytest
from arm_emulation import PROCESSORS, emulate
from native_builds import ALWAYS, FLAGS, compile_kernels
from test_native_sanitizers import DIGESTS, FUZZ, ROUNDS

from worker.engines.embedded import native
from worker.engines.embedded.native import libraries

pytestmark = [pytest.mark.native_build, pytest.mark.timeout(600)]  # Zig compiles musl once, which takes a minute

EDGES = Path(__file__).with_name("vector_edges.c")
SEEDS = (2, 3)
EDGE_ROUNDS = 3000


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


@pytest.mark.campaign
@pytest.mark.parametrize("path", ["neon", "generic"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arm_has_the_bits_of_x86(dtype: str, path: str, tmp_path: Path) -> None:
    """All kernels, with odd sizes; a digest of all results, and those of other seeds."""
    expected = {str(known): of for known, of in DIGESTS.items()}[f"torch.{dtype}"]
    program = tmp_path / "fuzz"
    compile_kernels(path, program, *options_of(path, dtype), str(FUZZ), compiler=arm_emulation.compiler())
    assert {emulate(program, ROUNDS, processor=each) for each in PROCESSORS} == {expected}
    here = {}
    for other in x86_paths(dtype):
        compile_kernels(other, tmp_path / other, *options_of(other, dtype), str(FUZZ))
        here[other] = [digest(tmp_path / other, ROUNDS // 3, seed) for seed in SEEDS]
    there = [emulate(program, ROUNDS // 3, seed, processor="max") for seed in SEEDS]
    assert here == dict.fromkeys({*here, "generic"}, there)
    assert len(set(there)) == len(SEEDS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vectors_agree_at_the_edges(dtype: str, tmp_path: Path) -> None:
    """Subnormal and infinite numbers, no numbers, ties: each function of the three layers and of
    NEON's, alone.
    """

    def compiled(path: str, compiler: Sequence[str]) -> Path:
        program = tmp_path / f"{Path(compiler[0]).name}-{path}"
        command = [*compiler, *ALWAYS, *FLAGS[path], *options_of(path, dtype), str(EDGES), "-lm", "-o", str(program)]
        subprocess.run(command, check=True, timeout=300)
        return program

    here = {path: compiled(path, ["cc"]) for path in x86_paths(dtype)}
    there = {path: compiled(path, arm_emulation.compiler()) for path in ("neon", "generic")}
    for seed in SEEDS:
        found = {path: digest(program, EDGE_ROUNDS, seed) for path, program in here.items()}
        for path, processor in product(there, PROCESSORS):
            found[f"{path} on {processor}"] = emulate(there[path], EDGE_ROUNDS, seed, processor=processor)
        assert len(set(found.values())) == 1, found
