"""The front door before a worker behind OpenEngine that drives vLLM: no process of Dynamo."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_stack import REPOSITORY
from engine_stack import EXACT, running_engines
from front_door_process import Door
from tiny_vision import write_tiny_vision
from upstream_checks import check_controls, check_refusals
from vllm_stack import OPTIONS


@pytest.mark.timeout(900)
def test_vllm(tmp_path: Path) -> None:
    model = write_tiny_vision(tmp_path / "model")
    with running_engines(tmp_path / "stack", model) as stack:
        ours = {key: value for key, value in stack.environ.items() if not key.startswith(("VLLM_", "DLW_PROCESSOR"))}
        stack.environ = {key: value for key, value in ours.items() if key.removeprefix("WORKER_") not in EXACT}
        stack.environ["PYTHONPATH"] = f"{REPOSITORY}:{REPOSITORY / 'tests' / 'e2e'}"
        stack.start_engine(*OPTIONS)
        door = Door(stack)
        check_controls(door, "vllm")
        check_refusals(door, ({"logprobs_mode": "train"}, "logprobs_mode"))
