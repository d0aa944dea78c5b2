"""The Triton kernel without a GPU: run by Triton's interpreter against sorting, and compiled for real GPUs.

Triton decides when it is imported whether kernels are interpreted, so that each test has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = """
import torch
from worker.engines.embedded.device_draw import select_by_sorting
from worker.engines.embedded import triton_select

triton_select._BLOCK = 256  # several programs per row
select_by_digits = triton_select.select_by_digits
generator = torch.Generator().manual_seed(5)
keys = torch.randn(5, 501, generator=generator) * 3
keys[1] = keys[1].round()
keys[2, 5:] = -torch.inf
keys[3] = -keys[3].abs() - 1e30
keys[4] = torch.where(torch.arange(501) % 2 == 0, 0.0, -0.0)
masses = torch.randint(0, 2**49, keys.shape, generator=generator)
totals = masses.sum(-1, keepdim=True)
for given, targets in (
    (masses, torch.stack([totals[0], totals[1] // 2, totals[2] - 1, torch.tensor([1]), totals[4] // 3])),
    (None, torch.tensor([[1], [50], [501], [6], [200]])),
):
    found, expected = select_by_digits(keys, given, targets), select_by_sorting(keys, given, targets)
    assert all(map(torch.equal, found, expected)), (found, expected)
print("the same")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from worker.engines.embedded import triton_select

pointers = {"keys": "*fp32", "masses": "*i64", "targets": "*i64", "sums": "*i64", "lasts": "*fp32", "befores": "*i64"}
constants = {"HAS_MASSES": True, "DIGITS": 8, "BLOCK": 4096}
for kernel in (triton_select._add_digits, triton_select._finish):
    own = {name: constants[name] for name in kernel.arg_names if name in constants}
    kinds = {name: "constexpr" if name in own else pointers.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=own)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert compiled.asm["cubin"]
print("the same")
"""


@pytest.mark.parametrize("program", [INTERPRETED, COMPILED], ids=["interpreted", "compiled"])
def test_the_kernel(program: str, tmp_path: object) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if program is INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
