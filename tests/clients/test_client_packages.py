"""The client packages against ``launch/agg.sh``: Python, Node, and the Vercel AI SDK."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environments import HERE, REQUIREMENTS, output_of
from launched_script import REPOSITORY, LaunchedScript, launched
from test_clients import WORKER

from worker.models import model_cache, prepare_default_model

pytestmark = [pytest.mark.campaign, pytest.mark.real_model, pytest.mark.timeout(1200)]

JAVASCRIPT = HERE / "javascript"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedScript]:
    model = prepare_default_model(model_cache(os.environ), lambda line: None)
    variables = {"MODEL_PATH": str(model), "WORKER_DTYPE": "float32"}
    with launched(tmp_path_factory.mktemp("served"), *WORKER, variables=variables) as script:
        script.wait_until_ready()
        yield script
        script.press_ctrl_c()
        assert script.finish() == 0, script.output


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment that has the client and the openai package alone."""
    folder = tmp_path_factory.mktemp("python")
    source = shutil.copytree(REPOSITORY / "clients" / "python", folder / "source")
    (openai,) = REQUIREMENTS["openai"]
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    options = ["--quiet", "--no-input", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *options, f"{source}[httpx]", openai], check=True)
    return python


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs, their packages, and the client as npm installs a folder."""
    folder = tmp_path_factory.mktemp("javascript")
    shutil.copytree(JAVASCRIPT, folder, dirs_exist_ok=True)
    options = ["--no-audit", "--no-fund", "--loglevel=error", str(REPOSITORY / "clients" / "javascript")]
    subprocess.run(["npm", "install", *options], cwd=folder, check=True)
    return folder


def test_python_runs_clean(installed: Path, served: LaunchedScript, tmp_path: Path) -> None:
    command = [str(installed), str(HERE / "ask_client_package.py"), served.url, served.model]
    assert output_of("python", command, tmp_path).count("passed ") >= 10


@pytest.mark.parametrize(("program", "checks"), [("ask_module.mjs", 8), ("ask_vercel.mjs", 3)])
def test_node_runs_clean(program: str, checks: int, project: Path, served: LaunchedScript) -> None:
    output = output_of("node", ["node", str(project / program), served.url, served.model], project)
    assert output.count("passed ") == checks


def test_typescript_takes_the_types(project: Path) -> None:
    compiler = project / "node_modules" / "typescript" / "bin" / "tsc"
    assert output_of("node", ["node", str(compiler), "--project", str(project)], project) == ""
