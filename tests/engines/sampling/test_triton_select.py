"""The Triton kernel without a GPU: run by Triton's interpreter against sorting, and compiled for
real GPUs.

Triton decides when it is imported whether kernels are interpreted, so that each test has a process
of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = Path(__file__).parents[3] / "worker" / "engines" / "embedded" / "sampling" / "triton_select.py"

LOAD = """
import importlib.util
import sys

# by its path, without the packages around it, whose import takes longer than the test
spec = importlib.util.spec_from_file_location("triton_select", sys.argv[1])
triton_select = importlib.util.module_from_spec(spec)
spec.loader.exec_module(triton_select)
"""

INTERPRETED = """
import torch

triton_select._BLOCK = 256  # several programs per row


def by_sorting(keys, masses, targets):
    ordered, order = keys.sort(descending=True)
    reached = masses.gather(1, order).cumsum(-1)
    last = ordered.gather(1, (reached < targets).sum(-1, keepdim=True))
    return last, (masses * (keys > last)).sum(-1, keepdim=True)


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
    found = triton_select.select_by_digits(keys, given, targets)
    expected = by_sorting(keys, torch.ones_like(masses) if given is None else given, targets)
    assert all(map(torch.equal, found, expected)), (found, expected)
for grain, scale, share in ((0.5, 1.0, 0.9), (0.0, 4.0, 0.5), (8.0, 3.0, 0.999), (0.0, 1e-4, 0.25)):  # weights
    keys = torch.randn(4, 501, generator=generator) * scale
    keys = (keys / grain).round() * grain if grain else keys
    keys[2, ::3] = -torch.inf
    keys[3, 9:] -= 30
    masses = ((keys - keys.amax(-1, keepdim=True)).double().exp() * 2.0**44).round().long()
    targets = (masses.sum(-1, keepdim=True).double() * share).ceil().long()
    found, expected = triton_select.select_by_digits(keys, masses, targets), by_sorting(keys, masses, targets)
    assert all(map(torch.equal, found, expected)), (found, expected)
print("the same")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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


@pytest.mark.parametrize(
    "program", [pytest.param(INTERPRETED, marks=pytest.mark.slow), COMPILED], ids=["interpreted", "compiled"]
)
def test_the_kernel(program: str, tmp_path: object) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    if program is INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", LOAD + program, KERNEL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
