"""Clients that people use run clean against the launch scripts, aggregated and disaggregated: each
in an environment of its own (`scripts/clients`), without a word of the worker's in their code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_script import REPOSITORY, LaunchedScript, launched

from worker.models import model_cache, prepare_default_model

HERE = Path(__file__).parent
REQUIREMENTS = dict(re.findall(r"^([\w-]+)==(\S+)", (HERE / "requirements.txt").read_text(), re.MULTILINE))
LIBRARIES = ("openai", "anthropic", "instructor", "litellm")
BENCHMARKS = ("aiperf", "guidellm")
WORKER = ("--device", "cpu", "--context-length", "2048")
REQUESTS = 24


def test_the_table_has_the_versions_that_are_run() -> None:
    table = (REPOSITORY / "benchmarks" / "results" / "clients.md").read_text()
    assert dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", table, re.MULTILINE)) == REQUIREMENTS


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model: a client's checks need answers that make sense."""
    return prepare_default_model(model_cache(os.environ), lambda line: None)


@pytest.fixture(scope="module", params=["agg.sh", "disagg.sh"])
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedScript]:
    variables = {"MODEL_PATH": str(model), "WORKER_DTYPE": "float32"}
    with launched(tmp_path_factory.mktemp("served"), *WORKER, variables=variables, script=request.param) as script:
        script.wait_until_ready()
        yield script
        script.press_ctrl_c()
        assert script.finish() == 0, script.output


def environment_of(client: str) -> Path:
    """The folder of the client's programs."""
    done = subprocess.run([REPOSITORY / "scripts/clients", client], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / client / "bin"


def run(command: list[str], directory: Path) -> str:
    """What it printed. Raises with that if it failed."""
    # offline aiperf takes a directory for the name of a repository, and ends
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    # litellm would fetch its list of prices
    environ = kept | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(directory), "NO_COLOR": "1"}
    done = subprocess.run(command, env=environ, cwd=directory, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.campaign
@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("client", LIBRARIES)
def test_a_library_runs_clean(client: str, served: LaunchedScript, tmp_path: Path) -> None:
    python = environment_of(client) / "python"
    output = run([str(python), str(HERE / f"ask_{client}.py"), served.url, served.model], tmp_path)
    assert output.count("passed ") >= 6


@pytest.mark.campaign
@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_aiperf_runs_clean(served: LaunchedScript, model: Path, tmp_path: Path) -> None:
    command = [
        *(str(environment_of("aiperf") / "aiperf"), "profile", "--model", served.model),
        *("--url", served.url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", "4", "--request-count", str(REQUESTS), "--random-seed", "7"),
        *("--tokenizer", str(model), "--isl", "100", "--osl", "32", "--extra-inputs", "ignore_eos:true"),
        *("--ui", "none", "--artifact-dir", str(tmp_path / "artifacts")),
    ]
    run(command, tmp_path)
    (path,) = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")


@pytest.mark.campaign
@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_guidellm_runs_clean(served: LaunchedScript, model: Path, tmp_path: Path) -> None:
    command = [
        *(str(environment_of("guidellm") / "guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={served.url.removesuffix('/v1')},model={served.model}"),
        *("--profile", "kind=concurrent,streams=[4]", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=32"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    ]
    run(command, tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
