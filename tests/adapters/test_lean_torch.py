"""torch without its meta kernels: whatever needs them gets them, as if they had been there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adapters import lean_torch

REPOSITORY = Path(__file__).resolve().parents[2]
DEFERRED = ("torch._meta_registrations", "torch._decomp", "torch._prims", "torch._refs")

USES = {
    "fake tensors": """
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    assert torch.randn(3, 4).cummax(1).values.shape == (3, 4)
""",
    "refs first": "import torch._refs.nn.functional; assert torch._refs.__spec__.loader.get_code('torch._refs')",
    "prims first": "from torch._prims import rng_prims",
    "decompositions by attribute": "assert torch._decomp.decomposition_table",
    "meta kernels by attribute": "assert torch._meta_registrations.activate_meta",
    "threads": """
import importlib, threading
threads = [threading.Thread(target=lean_torch.complete) for _ in range(3)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
""",
}

LARGE_USES = {
    "compile": """
noise = torch.compile(lambda generator: torch.rand(3, generator=generator) + 1, backend="aot_eager")
assert noise(torch.Generator().manual_seed(1)).equal(torch.rand(3, generator=torch.Generator().manual_seed(1)) + 1)
""",
    "export": """
class Softmax(torch.nn.Module):
    def forward(self, x):
        return x.softmax(-1)
assert "softmax" in torch.export.export(Softmax(), (torch.ones(3),)).graph_module.code
""",
    "a model on the meta device": """
from transformers import LlamaConfig, LlamaForCausalLM
size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(**size))
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 16)
""",
}

FORKS = f"""
import json, os, sys, traceback
from adapters import lean_torch
assert lean_torch.install() and not lean_torch.install()
import torch
assert not set({DEFERRED!r}) & set(sys.modules)
assert torch.__spec__.loader is torch.__loader__ and torch.__loader__.get_code("torch")
generator = torch.Generator().manual_seed(5)
assert torch.rand(1, generator=generator).equal(torch.rand(1, generator=torch.Generator().manual_seed(5)))
failed = []
for name, use in json.loads(sys.argv[1]).items():
    if os.fork():
        _, status = os.wait()
        failed += [name] if status else []
        continue
    try:
        exec(use, {{"torch": torch, "lean_torch": lean_torch}})
        assert set({DEFERRED!r}) <= set(sys.modules)
        assert not [finder for finder in sys.meta_path if type(finder).__module__ == lean_torch.__name__]
        assert not [name for name in torch._lazy_modules if "torch." + name in {DEFERRED!r}]
        assert type(sys.modules["torch._meta_registrations"]) is type(sys)
        assert torch._meta_registrations is sys.modules["torch._meta_registrations"]
        assert torch.linalg.cross(*(torch.empty(2, 3, device="meta"),) * 2).shape == (2, 3)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
sys.exit(", ".join(failed) or 0)
"""


def run(program: str, *arguments: str) -> str:
    """What a process prints."""
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("uses", [USES, pytest.param(LARGE_USES, marks=pytest.mark.campaign)], ids=["torch", "large"])
def test_whatever_needs_meta_kernels_gets_them(uses: dict[str, str]) -> None:
    run(FORKS, json.dumps(uses))


def test_a_backend_that_needs_them_as_torch_is_imported() -> None:
    program = """
import sys, types
from adapters import lean_torch
class Point:
    name = "early"
    def load(self):
        def begin():
            import torch._meta_registrations, torch._decomp
            assert torch._decomp.meta_table and sys.modules["torch._meta_registrations"].activate_meta
        return begin
import importlib.metadata
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **given: [Point()] if given.get("group") == "torch.backends" else real(**given)
assert lean_torch.install()
import torch
assert torch.linalg.cross(*(torch.empty(2, 3, device="meta"),) * 2).shape == (2, 3)
assert torch._meta_registrations.activate_meta
"""
    run(program)


def test_frames_of_torch_have_the_modules_inspect_finds() -> None:
    program = """
import inspect, sys
from adapters import lean_torch
ours, found = inspect.getmodule, []
assert lean_torch.install()
def told(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "found" and frame.f_code.co_filename == lean_torch.__file__:
        of = frame.f_locals["of"]
        found.append((of, inspect.isframe(of)))
sys.setprofile(told)
import torch
sys.setprofile(None)
assert inspect.getmodule is ours
frames = [of for of, is_frame in found if is_frame]
assert frames
for of in frames:
    assert sys.modules[of.f_globals["__name__"]] is ours(of), of
"""
    run(program)


def test_importing_the_packages_changes_nothing_about_torch() -> None:
    program = "import sys, adapters, worker.build, worker.importing\nprint([type(each) for each in sys.meta_path])"
    assert "lean_torch" not in run(program)


def test_torch_that_is_there_stays_as_it_is() -> None:
    assert "torch" in sys.modules
    before = list(sys.meta_path)
    assert not lean_torch.install()
    lean_torch.complete()
    assert sys.meta_path == before


@pytest.mark.parametrize("number", ["2.6.0", "2.16.0a0+cpu", "3.0"])
def test_other_versions_are_imported_whole(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(lean_torch, "version", lambda name: number)
    assert not lean_torch.install()


def test_the_version_that_is_installed_is_tested() -> None:
    found = re.search(r"^torch==(\d+\.\d+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] in lean_torch.TESTED
