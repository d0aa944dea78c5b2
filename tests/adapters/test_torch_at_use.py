"""torch imported at its first use: it is torch then, in every module that has it already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapters import torch_at_use

sys.path.append(str(Path(__file__).resolve().parent / "conformance"))
from builtin_examples import EXAMPLES

REPOSITORY = Path(__file__).resolve().parents[2]

USES = {
    "attribute": "assert torch.float32.itemsize == 4",
    "version": "assert torch.__version__",
    "names": "from torch import Tensor, nn; assert issubclass(nn.Parameter, Tensor)",
    "module inside": "import torch.nn.functional as module; assert module.relu(torch.ones(1)).item() == 1",
    "module inside, not imported with it": "import torch.utils.data as data; assert data.DataLoader",
    "meta kernels": "import torch._meta_registrations as kernels; assert kernels.activate_meta",
    "missing attribute": """
try:
    torch.no_such_thing
except AttributeError as error:
    assert "no_such_thing" in str(error), error
""",
    "missing module": """
try:
    import torch.no_such_module
except ModuleNotFoundError as error:
    assert error.name == "torch.no_such_module"
""",
    "threads": """
import threading
failed = []
def use(name):
    try:
        getattr(torch, name)
    except BaseException as error:
        failed.append(error)
names = ["Tensor", "ones", "nn", "float32", "__version__"] * 4
threads = [threading.Thread(target=use, args=(name,)) for name in names]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert not failed, failed
""",
}

FIRST_USE = """
import inspect, sys
from adapters import lean_torch, torch_at_use
if sys.argv[1] == "lean":
    assert lean_torch.install()
assert torch_at_use.install() and not torch_at_use.install()
import torch
before = torch
inspect.getmodule(inspect.currentframe())  # looks at every module
assert "torch._C" not in sys.modules
exec(sys.argv[2])
assert torch is before is sys.modules["torch"]
assert type(torch) is type(sys)
assert torch.__spec__.loader is torch.__loader__ and torch.__loader__.get_code("torch")
assert torch.ones(3).add(1).sum().item() == 6
assert torch.nn.functional.__spec__.loader.get_code("torch.nn.functional")
"""

FRONT_DOOR = """
import json, sys
from worker.importing import prepare
prepare(uses_torch=False)
import worker.frontdoor.process
from adapters.catalog import Catalog, parse_selection
catalog = Catalog.load()
for name, examples in json.loads(sys.argv[1]).items():
    for arguments in examples:
        text = json.dumps({"version": 1, "processors": [{"name": name, "args": arguments}]})
        catalog.check(parse_selection(text))
assert "torch._C" not in sys.modules
"""


def run(program: str, *arguments: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_the_first_use_imports_torch(use: str) -> None:
    run(FIRST_USE, "lean", USES[use])


@pytest.mark.slow
@pytest.mark.parametrize("use", ["attribute", "module inside", "threads"])
def test_the_first_use_imports_torch_with_meta_kernels(use: str) -> None:
    run(FIRST_USE, "whole", USES[use])


def test_a_front_door_checks_processors_without_torch() -> None:
    run(FRONT_DOOR, json.dumps(EXAMPLES))


def test_the_catalogue_is_listed_without_torch() -> None:
    program = """
import sys
sys.argv = ["adapters", "list"]
from adapters.__main__ import run
assert run() == 0
assert "torch._C" not in sys.modules
"""
    run(program)


@pytest.mark.slow
def test_torch_is_there_before_third_party_code(tmp_path: Path) -> None:
    """Also where its version is none whose meta kernels are deferred."""
    (tmp_path / "outside.py").write_text("""
from torch import *
from adapters.basic import TemperatureProcessor
assert Tensor.__module__ == "torch"  # noqa: F405
class Mine(TemperatureProcessor):
    name = "mine"
""")
    program = """
import sys
sys.path.append(sys.argv[1])
from adapters import torch_at_use
assert torch_at_use.install()
from adapters.catalog.loading import load_class
assert load_class("outside:Mine", "test").name == "mine"
"""
    run(program, str(tmp_path))


def test_torch_that_cannot_be_imported_says_so_at_each_use() -> None:
    program = """
import sys
from importlib.machinery import PathFinder
from adapters import torch_at_use
class Broken(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch._C":
            raise ImportError("libtorch.so: cannot open shared object file")
        return None
assert torch_at_use.install()
import torch
sys.meta_path.insert(1, Broken)
for _ in range(2):
    try:
        torch.float32
    except ImportError as error:
        assert "libtorch.so" in str(error), error
    else:
        raise AssertionError("no error")
sys.meta_path.remove(Broken)
"""
    run(program)


def test_torch_that_is_there_stays_as_it_is() -> None:
    before = list(sys.meta_path)
    assert not torch_at_use.install()
    assert sys.meta_path == before


def test_torch_that_is_missing_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not torch_at_use.install()
    assert "torch" not in sys.modules
