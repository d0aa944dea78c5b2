"""OpenMP's threads do not spin for a time slice at a barrier, whichever part of the project is
imported first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from effort import grid

from adapters.openmp import SPIN_COUNT, bound_spin

ROOT = Path(__file__).parents[2]
ENTRIES = ["adapters.basic", "worker.engines.embedded", "worker.runtimes.dynamo_engine"]
AT_IMPORT = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch", os.environ.get("GOMP_SPINCOUNT"))

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


def run(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The code in a fresh interpreter, in which neither of the variables is set."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("module", grid(ENTRIES, fast=lambda module: module == "worker.engines.embedded"))
def test_it_is_set_before_torch_is_loaded(module: str) -> None:
    assert run(AT_IMPORT, module).stdout.split() == ["torch", str(SPIN_COUNT)]


@pytest.mark.slow
def test_the_library_of_torch_takes_it() -> None:
    shown = run("import worker.engines.embedded", OMP_DISPLAY_ENV="VERBOSE").stderr
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in shown


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_environment_says_stays(name: str) -> None:
    environ = {name: "passive"}
    assert bound_spin(environ)
    assert environ == {name: "passive"}


def test_torch_that_came_first_is_said(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    caplog.set_level("INFO")
    assert not bound_spin(environ)  # pytest has long imported torch
    assert environ == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    assert "GOMP_SPINCOUNT=5000" in caplog.text
