"""Suites of the front door before Dynamo's frontend, before workers behind OpenEngine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = {
    "test_tool_calls_e2e": "",
    # a receipt comes with the last chunk of a choice, not with each
    "test_completion_scores": "not (prompt_logprobs_of_a_chat and True)",
    # the first has a template without tools, which are written as text where known; the second
    # a temperature that Dynamo's frontend refuses
    "test_messages_e2e": "not a_single_call and not (name_what and fields0)",
    "test_rollouts_e2e": "not ten_thousand",
}
"""Names of the suites, and expressions that leave out what is meant to differ."""


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("suite", "without"), SUITES.items())
def test_suite(suite: str, without: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"{suite}.py"), "-k", without]
    found = subprocess.run(
        command, env={**os.environ, "DLW_UPSTREAM": "grpc"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-5000:]
