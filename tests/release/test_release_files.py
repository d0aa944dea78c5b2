"""What a release is made of: the distributions have every file that the package needs, and version,
changelog, licences and hooks agree with the checkout.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from itertools import product
from pathlib import Path

import pytest
import yaml
from image_files import PROJECT, closure, pins, requirements, tomllib  # type: ignore[attr-defined]
from install_packages import CUDA
from packaging.utils import canonicalize_name

import worker

REPOSITORY = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PACKAGES = ("adapters", "worker")


def tracked(*folders: str) -> set[str]:
    """Files that git has, relative to the root."""
    done = subprocess.run(["git", "ls-files", *folders], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return {name for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()}


def test_nothing_that_git_ignores_is_in_it() -> None:
    """Such as what mypy leaves where it was killed."""
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout == ""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without what was built in it."""
    directory = tmp_path_factory.mktemp("release") / "source"
    for name in tracked():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, directory / name)
    return directory


def run_setup(source: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "setup.py", "-q", *arguments], cwd=source, check=True, capture_output=True)


def test_the_source_distribution_has_every_file_of_the_packages(source: Path, tmp_path: Path) -> None:
    run_setup(source, "sdist", "--dist-dir", str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert path.name == f"dynamo_logits_worker-{worker.__version__}.tar.gz"
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    others = {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "THIRD_PARTY_NOTICES.md", "constraints.txt"}
    assert tracked(*PACKAGES) | others | {"pyproject.toml", "setup.py"} <= found
    assert not any(name.endswith(".so") for name in found)


def test_the_wheel_has_every_file_but_the_sources_in_c(source: Path, tmp_path: Path) -> None:
    run_setup(source, "build_py", "--build-lib", str(tmp_path))
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in tracked(*PACKAGES) if not name.endswith((".c", ".h"))} <= found


def test_every_c_source_is_named_by_a_module_that_is_built() -> None:
    modules = runpy.run_path(str(REPOSITORY / "setup.py"))["MODULES"]
    named = {name for module in modules for name in (*module.sources, *module.depends)}
    assert named == {name for name in tracked("worker") if name.endswith((".c", ".h"))}
    for module in modules:
        flags = set(module.extra_compile_args)
        assert not flags & {"-march=native", "-mtune=native"}  # would run on the machine that built it alone


def test_the_changelog_begins_with_the_version() -> None:
    first = re.search(
        r"^## \[(.+)\] - (unreleased|\d{4}-\d{2}-\d{2})$", (REPOSITORY / "CHANGELOG.md").read_text(), re.M
    )
    assert first is not None
    assert first[1] == worker.__version__


def test_notices_list_the_licence_of_every_distribution() -> None:
    text = (REPOSITORY / "THIRD_PARTY_NOTICES.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", text, re.MULTILINE)
    listed = {canonicalize_name(name): version for name, version, _ in rows if name != "distribution" and name != "---"}
    needed = closure(requirements(("disagg", "nats", "otel")))
    assert listed == {name: pins()[name] for name in needed if not CUDA.match(name)}
    assert set(PYPROJECT["project"]["license-files"]) == {"LICENSE", "THIRD_PARTY_NOTICES.md"}


@pytest.mark.campaign
def test_the_pins_resolve_for_a_stranger(tmp_path: Path) -> None:
    """On every supported Python and architecture: what the public package index has, and wheels of
    all that is compiled.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "pyproject.toml", "--extra", "dev"),
        *("--constraints", "constraints.txt", "--only-binary", ":all:", "--no-binary", "nkeys"),
    ]
    resolving = {}
    for version, architecture in product(("3.11", "3.12", "3.13", "3.14"), ("x86_64", "aarch64")):
        here = (*command, "--python-version", version, "--python-platform", f"{architecture}-manylinux_2_31")
        environ = kept | {"UV_CACHE_DIR": str(tmp_path / f"{version}-{architecture}")}
        pipe = subprocess.PIPE
        process = subprocess.Popen(here, cwd=REPOSITORY, env=environ, stdout=pipe, stderr=pipe, text=True)
        resolving[version, architecture] = process
    every_pin = {f"{name}=={version}" for name, version in pins().items() if name != "pip"}
    for case, process in resolving.items():
        output, errors = process.communicate()
        assert process.returncode == 0, (case, errors)
        assert {line.split(" ")[0] for line in output.splitlines() if re.match(r"[a-z0-9]", line)} == every_pin, case


def test_the_notices_are_those_of_the_script() -> None:
    script = [sys.executable, "scripts/notices.py"]
    done = subprocess.run(script, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert done.stdout == (REPOSITORY / "THIRD_PARTY_NOTICES.md").read_text()


def test_the_default_model_is_in_the_notices() -> None:
    from worker.models.default_model import _REQUIREMENT, DEFAULT_MODEL

    text = (REPOSITORY / "THIRD_PARTY_NOTICES.md").read_text()
    assert DEFAULT_MODEL in text
    assert f"`{_REQUIREMENT.partition('==')[0]}`" in text


def test_entry_points_lead_somewhere() -> None:
    points = importlib.metadata.distribution(PROJECT["name"]).entry_points
    names = {"dynamo-logits-worker", "dlw-batch"}
    assert {each.name for each in points if each.group == "console_scripts"} == names == PROJECT["scripts"].keys()
    for each in points:
        assert each.load() is not None


HOOKS = {
    hook["id"]: hook
    for repository in yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]
}


def test_hooks_fetch_nothing() -> None:
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    assert {hook["language"] for hook in HOOKS.values()} <= {"system", "script"}
    assert not any("additional_dependencies" in hook for hook in HOOKS.values())
    assert os.access(REPOSITORY / HOOKS["check"]["entry"], os.X_OK)


@pytest.mark.parametrize(("hook", "bad"), [("ruff-format", "x=1\n"), ("ruff-check", "import os\n")])
def test_a_hook_refuses_what_ruff_does(hook: str, bad: str, tmp_path: Path) -> None:
    for text, refused in (("x = 1\n", False), (bad, True)):
        (tmp_path / "some.py").write_text(text)
        command = [*shlex.split(HOOKS[hook]["entry"]), str(tmp_path / "some.py")]
        environ = os.environ | {"DLW_VENV": sys.prefix}
        done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True)
        assert (done.returncode != 0) == refused


def test_the_smoke_test_takes_no_options_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a file of API keys, without one of which the front door answers nobody."""
    names = ("DYN_NAMESPACE", "FRONT_DOOR_API_KEY_FILE", "WORKER_ENGINE")
    for name in names:
        monkeypatch.setenv(name, "/nowhere")
    environ = runpy.run_path(str(REPOSITORY / "scripts/smoke.py"))["environ_in"](tmp_path)
    assert not environ.keys() & set(names)
    assert environ["PATH"] == os.environ["PATH"]
