"""The images have what the manifests' command lines need: that set of packages serves, here, in
their processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from e2e_stack import Process, Stack, running_stack, wait_for
from image_files import closure, commands, environment_of, extras, install_command, pins, requirements, stage
from manifest_files import FOLDER, Component, components
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ports import free_port

from worker.tiny_model import write_tiny_model

CHECK = str(FOLDER / "check_image.py")
WORKER = "dynamo-logits-worker"

TRTLLM_BASE: dict[str, str | None] = {
    "ai-dynamo": "1.4.2",
    "ai-dynamo-runtime": "1.4.2",
    "huggingface-hub": None,
    "jinja2": None,
    "llguidance": "0.7.29",
    "numpy": "2.0.0",
    "prometheus-client": None,
    "pydantic": None,
    "pyyaml": None,
    "regex": None,
    "safetensors": None,
    "tokenizers": "0.22.1",
    "torch": "2.11.0",
    "tqdm": None,
    "transformers": "5.5.4",
    "uvloop": None,
}
"""Packages of the base image of the TensorRT-LLM stage, with the version where the requirements of
TensorRT-LLM 1.3.0rc22 or of one that it names fix it, or bound it from below; torch requires
jinja2, transformers requires huggingface-hub, and uvloop is added by Dynamo's own build of that
image."""


VLLM_BASE: dict[str, str | None] = {
    "h11": "0.16.0",
    "huggingface-hub": "2.4.0",
    "jinja2": "3.1.6",
    "llguidance": "1.7.6",
    "numpy": "2.3.5",
    "prometheus-client": "0.26.0",
    "pydantic": "2.14.4",
    "pyyaml": "6.0.4",
    "regex": "2026.11.19",
    "rich": "15.0.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
    "torch": "2.13.0",
    "tqdm": "4.70.1",
    "transformers": "5.19.0",
    "uvloop": "0.23.0",
}
"""What vLLM 0.32.0 requires, in the versions that its build for CPUs brings."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has what the embedded image has."""
    return environment_of(closure(requirements(extras("embedded"))), tmp_path_factory.mktemp("image"))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    write_tiny_model(tmp_path / "models" / "tiny-model")
    with running_stack(tmp_path, tmp_path / "models" / "tiny-model") as stack:
        yield stack


def start(stack: Stack, python: Path, part: Component, log: Path, *, door: bool = False) -> Process:
    """As a pod would, with the image's packages; ports, paths, network and discovery are this
    machine's. ``door``: the front door of the pod.
    """
    port, behind = str(free_port()), str(stack.inner_port)
    here = {"8000": str(stack.http_port), "8001": behind, "0.0.0.0": "127.0.0.1", "9090": port, "eth0": "lo"}
    container = part.door if door else part.main
    words = [
        here.get(word, word)
        .replace("/models/", f"{stack.directory}/models/")
        .replace("/packed", f"{stack.directory}/packed")
        for word in container["args"]
    ]
    words = [word.replace(":8001", f":{behind}") for word in words]
    given = {name: here.get(value, value) for name, value in part.environ.items()}
    own = {"HOME": str(stack.directory), "DYN_NAMESPACE_WORKER_SUFFIX": "", "DYN_SYSTEM_PORT": port}
    own["XDG_CACHE_HOME"] = f"{stack.directory}/cache"
    command = [str(python), *container["command"][1:], *words]
    return Process(command, {**given, **stack.environ, **own, "DLW_POOL_SECRET": given.get("DLW_POOL_SECRET", "")}, log)


@pytest.mark.parametrize("graph", ["agg", pytest.param("disagg", marks=pytest.mark.campaign)])
def test_the_embedded_image_serves_its_manifests(stack: Stack, image: Path, graph: str) -> None:
    parts = [part for part in components("frontend", "prefill", "decode", "worker") if part.graph == graph]
    processes: list[Process] = []
    try:
        for number, part in enumerate(parts):
            process = start(stack, image, part, stack.directory / f"part{number}.log")
            processes.append(process)
            if part.type == "frontend":
                processes.append(start(stack, image, part, stack.directory / "door.log", door=True))
            if part.type != "frontend":
                wait_for(lambda p=process: "Registered endpoint" in p.log or not p.running, f"{part} to register")
            assert process.running, process.log

        def answer() -> str | None:
            assert all(process.running for process in processes), [process.log for process in processes]
            status, text = stack.post("completions", model="tiny-model", prompt="hello " * 20, max_tokens=4)
            return text if status == 200 else None

        assert '"completion_tokens":4' in wait_for(answer, "an answer")
    finally:
        for process in reversed(processes):
            process.end()


def test_the_embedded_image_has_the_versions_that_were_tested() -> None:
    assert "-c /src/constraints.txt" in install_command("embedded")
    needed = closure(requirements(extras("embedded")))
    assert sorted(needed - pins().keys()) == []


def test_what_an_image_lacks_fails_its_build(tmp_path: Path) -> None:
    assert any(command.startswith(f"python3 /src/{Path(CHECK).name} ") for command in commands("embedded"))
    assert "--native-kernels" in " ".join(commands("embedded"))
    command = [sys.executable, CHECK, "--extra", "disagg", "worker", "nixl"]
    subprocess.run(command, check=True, cwd=tmp_path)
    # a package without kernels, first in the path
    (tmp_path / "worker/engines/embedded").mkdir(parents=True)
    for folder in ("worker", "worker/engines", "worker/engines/embedded"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "worker/engines/embedded/native.py").write_text("def unavailable(dtype):\n    return 'not built'\n")
    environ = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command[:2], "--native-kernels", "worker"], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stderr) == (1, "check_image: no native kernels: not built\n")
    bare = environment_of({*closure(requirements(())), WORKER}, tmp_path / "bare")
    done = subprocess.run([bare, *command[1:]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert any(line.startswith("check_image: nixl is not installed, need nixl>=") for line in lines)
    assert any(line.startswith("check_image: import nixl: ModuleNotFoundError") for line in lines)


def test_tensorrt_llm_keeps_its_own_set() -> None:
    """What it has is left alone, what it lacks or has too old for us comes in a tested version,
    and nothing else.
    """
    command = install_command("trtllm")
    assert command.startswith("uv pip install ")  # the virtual environment of the base image may be without pip
    assert "--no-deps" in command
    assert "--constraint /src/constraints.txt" in command
    words = command.removeprefix("uv pip install ").split()
    assert named_in(words) == lacking(TRTLLM_BASE)


def test_vllm_keeps_its_own_set(tmp_path: Path) -> None:
    command = install_command("vllm")
    assert "--no-deps" in command
    assert "--constraint /src/constraints.txt" in command
    assert named_in(command.partition(" install ")[2].split()) == lacking(VLLM_BASE)
    assert "ENTRYPOINT []" in stage("vllm")  # the base image's own is vLLM's server
    (check,) = (each for each in commands("vllm") if each.startswith(f"python3 /src/{Path(CHECK).name} "))
    done = subprocess.run([sys.executable, CHECK, *check.split()[2:]], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "check_image: vllm is not installed\n")


def named_in(words: Iterable[str]) -> set[str]:
    """Distributions with a pin that a command names."""
    return {canonicalize_name(word) for word in words if canonicalize_name(word) in pins()}


def lacking(base: Mapping[str, str | None]) -> set[str]:
    """Requirements of ours that a base image does not meet."""
    return {canonicalize_name(one.name) for one in requirements(()) if not has(base, one)}


def has(base: Mapping[str, str | None], requirement: Requirement) -> bool:
    """Whether a base image meets a requirement of ours."""
    name = canonicalize_name(requirement.name)
    if name not in base:
        return False
    version = base[name]
    return version is None or requirement.specifier.contains(version)


UNUSABLE = "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')\n"


def test_tensorrt_llm_is_not_imported_at_its_images_build(tmp_path: Path) -> None:
    """Where there is no GPU, as in a build, its import fails."""
    found = commands("trtllm")
    assert "cd /tmp" in found
    assert not any(re.search(r"\|\||;|\btrue$|\bimport tensorrt_llm", command) for command in found)
    (check,) = (command for command in found if command.startswith(f"python3 /src/{Path(CHECK).name} "))
    words = check.split()[2:]

    def build(*packages: Path) -> str:
        environ = {"PYTHONPATH": os.pathsep.join(map(str, packages))}
        done = subprocess.run([sys.executable, CHECK, *words], capture_output=True, text=True, env=environ)
        assert (done.returncode == 0) is (done.stderr == "")
        return done.stderr

    installed = tmp_path / "installed"
    for name, text in {
        "tensorrt_llm/__init__.py": UNUSABLE,
        "tensorrt_llm-1.3.0rc22.dist-info/METADATA": "Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.3.0rc22\n",
    }.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text)
    assert build(installed) == ""
    assert build() == "check_image: tensorrt_llm is not installed\n"
    (installed / "tensorrt_llm" / "__init__.py").rename(tmp_path / "gone")
    (installed / "tensorrt_llm").rmdir()
    assert build(installed) == "check_image: tensorrt_llm is installed without its package tensorrt_llm\n"
    (tmp_path / "broken/worker").mkdir(parents=True)
    (tmp_path / "broken/worker/__init__.py").write_text("raise ImportError('no')\n")
    assert "check_image: import worker.engines.trtllm: " in build(installed, tmp_path / "broken")
