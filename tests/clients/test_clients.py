"""Clients that people use run clean against the launch scripts: each in an environment of its own
(`scripts/clients`), without a word of the worker's in their code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmark_reports import CHECKS
from client_checks import CASES, CHECKED, run_checks
from client_environments import REPOSITORY, REQUIREMENTS, version_of
from client_page import PAGE, Program, programs, run_program
from launched_script import LaunchedScript, launched

from worker.models import model_cache, prepare_default_model

WORKER = ("--device", "cpu", "--context-length", "4096")
RESULTS = REPOSITORY / "benchmarks" / "results" / "clients.md"
PROGRAMS = programs()  # of docs/clients.md
DISAGGREGATED = ("openai", "instructor", "litellm")
MEASURING = [program for program in PROGRAMS if program.client in CHECKS]

campaign = [pytest.mark.campaign, pytest.mark.real_model, pytest.mark.timeout(1200)]


def test_the_table_has_the_versions_that_are_run() -> None:
    table = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", RESULTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(table) == {client: version_of(client) for client in REQUIREMENTS}


def test_every_client_has_a_section() -> None:
    sections = [program.client for program in PROGRAMS if program.client != "curl"]
    assert set(sections) == set(REQUIREMENTS)
    assert PAGE.read_text(encoding="utf-8").count("\n## ") == len(set(sections)) + 1


def test_every_check_is_of_a_case() -> None:
    for client, files in CHECKED.items():
        for file in files:
            names = re.findall(r"^(?:async )?def check_(\w+)|^  async (\w+)\(\) \{", file.read_text(), re.MULTILINE)
            assert names, client
            assert [one for pair in names for one in pair if one and not one.startswith(tuple(CASES))] == [], client


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model: a client's checks need answers that make sense."""
    return prepare_default_model(model_cache(os.environ), lambda line: None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LaunchedScript]:
    yield from _serving("agg.sh", tmp_path_factory.mktemp("agg"), model)


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LaunchedScript]:
    yield from _serving("disagg.sh", tmp_path_factory.mktemp("disagg"), model)


def _serving(script: str, directory: Path, model: Path) -> Iterator[LaunchedScript]:
    variables = {"MODEL_PATH": str(model), "WORKER_DTYPE": "float32"}
    with launched(directory, *WORKER, variables=variables, script=script) as running:
        running.wait_until_ready()
        yield running
        running.press_ctrl_c()
        assert running.finish() == 0, running.output


class TestAggregated:
    pytestmark = campaign

    @pytest.mark.parametrize("client", CHECKED)
    def test_a_client_runs_clean(self, client: str, served: LaunchedScript, tmp_path: Path) -> None:
        results = run_checks(client, served.url, served.model, tmp_path)
        assert results
        assert {name: text for name, text in results.items() if text} == {}

    @pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.client}{program.suffix}")
    def test_a_program_of_the_page_runs(
        self, program: Program, served: LaunchedScript, model: Path, tmp_path: Path
    ) -> None:
        assert run_program(program, served.url, model, tmp_path).strip()


class TestDisaggregated:
    pytestmark = campaign

    @pytest.mark.parametrize("client", DISAGGREGATED)
    def test_a_library_runs_clean(self, client: str, disaggregated: LaunchedScript, tmp_path: Path) -> None:
        results = run_checks(client, disaggregated.url, disaggregated.model, tmp_path)
        assert {name: text for name, text in results.items() if text} == {}

    @pytest.mark.parametrize("program", MEASURING, ids=lambda program: program.client)
    def test_what_measures_runs_clean(
        self, program: Program, disaggregated: LaunchedScript, model: Path, tmp_path: Path
    ) -> None:
        run_program(program, disaggregated.url, model, tmp_path)
