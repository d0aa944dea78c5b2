"""The front door before a worker behind OpenEngine with the stand-in for TensorRT-LLM.

vLLM is in tests/vllm/test_upstream_in_vllm.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_stack import STAND_IN
from engine_stack import EXACT, running_engines
from front_door_process import Door
from upstream_checks import check_controls, check_refusals

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]


def test_tensorrt_llms_stand_in(tmp_path: Path, tiny_model: Path) -> None:
    with running_engines(tmp_path, tiny_model) as stack:
        for name in EXACT:
            del stack.environ[f"WORKER_{name}"]
        stack.environ |= STAND_IN
        stack.start_engine("--engine", "trtllm")
        door = Door(stack)
        check_controls(door, "trtllm")
        check_refusals(door, ({"logprobs_mode": "train"}, "logprobs_mode"), ({"prompt_logprobs": 0}, "prompt_logprobs"))
