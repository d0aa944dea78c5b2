"""Clients that people use run clean against ``ENGINE=vllm launch/agg.sh``, as they do against the
embedded engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_checks import run_checks
from client_page import Program, programs, run_program
from launched_script import LaunchedScript
from launched_vllm import agg
from vllm_stack import default_model

pytestmark = [pytest.mark.real_model, pytest.mark.campaign, pytest.mark.timeout(1200)]

CLIENTS = ("openai", "instructor", "litellm")
MEASURING = [program for program in programs() if program.client in ("aiperf", "guidellm")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedScript]:
    with agg(tmp_path_factory.mktemp("agg")) as script:
        script.wait_until_ready()
        yield script
        script.press_ctrl_c()
        assert script.finish() == 0, script.output


@pytest.mark.parametrize("client", CLIENTS)
def test_a_library_runs_clean(client: str, served: LaunchedScript, tmp_path: Path) -> None:
    results = run_checks(client, served.url, served.model, tmp_path)
    assert results
    assert {name: text for name, text in results.items() if text} == {}


@pytest.mark.parametrize("program", MEASURING, ids=lambda program: program.client)
def test_what_measures_runs_clean(program: Program, served: LaunchedScript, tmp_path: Path) -> None:
    """Each request of its report succeeded."""
    run_program(program, served.url, default_model(), tmp_path)
