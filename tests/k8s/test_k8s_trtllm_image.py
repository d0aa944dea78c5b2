"""TensorRT-LLM's stage of `k8s/Dockerfile`, built with buildah as root on a stand-in of its base
image, on a machine without a GPU.

The stand-in has the real one's layout: a system's Python packages, of which ``tensorrt_llm`` cannot
be imported, and above them a virtual environment without pip, first in the path, beside uv. Its
system is this machine's, seen read-only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_files import closure, environment_of
from manifest_files import FOLDER, REPOSITORY
from packaging.requirements import Requirement
from test_k8s_images import TRTLLM_BASE, UNUSABLE, lacking

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]

BASE, IMAGE = "localhost/dlw-trtllm-base", "localhost/dlw-trtllm-image"
ENVIRON = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
VENV = "/opt/dynamo/venv"


def run(*words: str | Path, fails: bool = False) -> str:
    """Output of a command, which succeeds, or `fails`."""
    done = subprocess.run(list(map(str, words)), env=ENVIRON, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The system's Python packages: what TensorRT-LLM and Dynamo bring, and nothing that is named
    in the stage.
    """
    directory = tmp_path_factory.mktemp("base") / "system"
    names = closure(map(Requirement, TRTLLM_BASE)) - lacking(TRTLLM_BASE)
    environment_of(names, directory)
    packages = directory / "lib" / PYTHON / "site-packages"
    metadata = "Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.3.0rc22\n"
    for name, text in {
        "tensorrt_llm/__init__.py": UNUSABLE,
        "tensorrt_llm-1.3.0rc22.dist-info/METADATA": metadata,
    }.items():
        (packages / name).parent.mkdir()
        (packages / name).write_text(text)
    return packages


@pytest.fixture(scope="module")
def volumes(system: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that show a container this machine's system, its packages, and wheels for uv."""
    wheels = tmp_path_factory.mktemp("wheels")
    download = (
        f"-m pip download -q --no-deps --only-binary :all: --constraint {REPOSITORY}/constraints.txt --dest {wheels}"
    )
    run(sys.executable, *download.split(), "setuptools", *sorted(lacking(TRTLLM_BASE)))
    (wheels / "uv.toml").write_text('no-index = true\nfind-links = ["/wheels"]\n')
    installed = Path(sys.prefix).resolve()
    shown = {
        "/usr": "/usr",
        sys.base_prefix: sys.base_prefix,
        str(installed): str(installed),
        str(system): "/opt/system",
        str(wheels): "/wheels",
        str(wheels / "uv.toml"): "/etc/uv/uv.toml",
    }
    return [word for source, target in shown.items() for word in ("--volume", f"{source}:{target}:ro")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("root")
    for name in ("usr", "tmp", "etc", "proc", "dev", "sys", "opt/uv"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    shutil.copy2(Path(sys.executable).parent / "uv", root / "opt/uv")
    environment = root / VENV.removeprefix("/")
    venv.create(environment, with_pip=False, symlinks=True)
    (environment / "lib" / PYTHON / "site-packages" / "system.pth").write_text("/opt/system\n")
    container = run("buildah", "from", "scratch").strip()
    try:
        run("buildah", "add", "--quiet", container, root, "/")
        path = f"PATH={VENV}/bin:/opt/uv:/usr/local/bin:/usr/bin:/bin"
        run("buildah", "config", "--env", path, "--env", f"VIRTUAL_ENV={VENV}", "--user", "1000:1000", container)
        run("buildah", "config", "--env", "CC=false", container)  # no compiler: the embedded engine's kernels stay out
        run("buildah", "commit", "--quiet", container, BASE)
        yield BASE
    finally:
        run("buildah", "rm", container)
        run("buildah", "rmi", BASE)


def build(base: str, volumes: list[str], *, fails: bool = False) -> str:
    files = ("--file", FOLDER / "Dockerfile", "--ignorefile", FOLDER / "Dockerfile.dockerignore")
    words = ("--layers=false", "--target", "trtllm", "--build-arg", f"TRTLLM_IMAGE={base}", "--tag", IMAGE)
    return run("buildah", "bud", "--format", "docker", *files, *words, *volumes, ".", fails=fails)


def test_the_stage_builds_where_there_is_no_gpu(base: str, volumes: list[str], system: Path) -> None:
    build(base, volumes)
    container = run("buildah", "from", "--pull-never", IMAGE).strip()
    try:
        inside = ("buildah", "run", *volumes, container, "--")
        assert "usage: " in run(*inside, "python3", "-m", "worker", "--help")
        found = run(*inside, "python3", "-c", "import worker, os; print(worker.__file__, os.getuid())")
        assert found == f"{VENV}/lib/{PYTHON}/site-packages/worker/__init__.py 1000\n"
        assert "tensorrt_llm cannot be used: ImportError: libcuda.so.1" in run(
            *inside,
            *("python3", "-c", "from worker.engines.trtllm.capabilities import read_package; read_package()"),
            fails=True,
        )
        assert "/src" not in run(*inside, "ls", "-d", "/src", "/wheels", fails=True).splitlines()
    finally:
        run("buildah", "rm", container)
        run("buildah", "rmi", IMAGE)
    shutil.rmtree(system / "tensorrt_llm-1.3.0rc22.dist-info")
    assert "check_image: tensorrt_llm is not installed" in build(base, volumes, fails=True)
