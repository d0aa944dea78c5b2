"""The client packages as a stranger gets them: a wheel, and a package of npm's form."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from image_files import tomllib  # type: ignore[attr-defined]

import worker

CLIENTS = Path(__file__).resolve().parents[2] / "clients"

BUILD = """
import setuptools.build_meta as backend, sys
getattr(backend, sys.argv[1])(sys.argv[2])
"""

IMPORTED = """
import sys
from dynamo_logits_client import Client, logits_processors, processors, receipt_of, replay_request

assert logits_processors(processors.min_tokens(n=8))["nvext"]["annotations"]
alien = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
assert alien <= {"dynamo_logits_client", "__main__", "_distutils_hack", "sitecustomize"}, alien
try:
    from dynamo_logits_client import AsyncClient
except ModuleNotFoundError as error:
    assert (error.name, "pip install" in str(error)) == ("httpx", True), error
else:
    raise AssertionError("there is no httpx here")
from dynamo_logits_client import *
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    directory = tmp_path_factory.mktemp("client")
    source = copytree(
        CLIENTS / "python", directory / "source", ignore=ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    for kind in ("build_wheel", "build_sdist"):
        command = [sys.executable, "-c", BUILD, kind, str(directory)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
    return directory


def test_the_wheel_has_the_client_and_nothing_else(built: Path) -> None:
    (path,) = built.glob("*.whl")
    assert path.name == f"dynamo_logits_client-{worker.__version__}-py3-none-any.whl"
    modules = {
        str(each.relative_to(CLIENTS / "python")) for each in (CLIENTS / "python").glob("dynamo_logits_client/*.py")
    }
    with zipfile.ZipFile(path) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        fields = message_from_string(archive.read(metadata).decode())
    assert found == modules | {"dynamo_logits_client/py.typed"}
    assert fields.get_all("Requires-Dist") == ['httpx>=0.27; extra == "httpx"']
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-Expression"] == "Apache-2.0"


def test_a_bare_environment_imports_it(built: Path, tmp_path: Path) -> None:
    """One without torch, httpx or pip."""
    venv.create(tmp_path / "bare", symlinks=True)
    (wheel,) = built.glob("*.whl")
    (packages,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    command = [str(tmp_path / "bare" / "bin" / "python"), "-I", "-c", IMPORTED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_its_sources_are_those_of_python_3_10(built: Path) -> None:
    """mypy knows which names the standard library of that version has."""
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.10", "--config-file", ""]
    done = subprocess.run(
        [*command, "--cache-dir", str(built / "mypy"), str(built / "source" / "dynamo_logits_client")],
        cwd=built,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert tomllib.loads((CLIENTS / "python" / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.10"


def test_the_javascript_package_is_one_module_with_types() -> None:
    folder = CLIENTS / "javascript"
    package = json.loads((folder / "package.json").read_text())
    assert package["type"] == "module"
    assert not package.keys() & {"dependencies", "peerDependencies", "scripts"}
    assert all((folder / name).is_file() for name in package["files"])
    assert set(package["files"]) == {package["main"], package["types"]}
    assert "import " not in "".join(
        line for line in (folder / package["main"]).read_text().splitlines() if not line.startswith((" *", "//"))
    )


def test_both_have_the_projects_licence() -> None:
    text = (CLIENTS.parent / "LICENSE").read_text()
    assert [(CLIENTS / each / "LICENSE").read_text() for each in ("python", "javascript")] == [text, text]
