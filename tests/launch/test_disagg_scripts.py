"""The launch scripts of several workers, as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_script import REPOSITORY, LaunchedScript, is_loopback, launched

HELLO = [{"role": "user", "content": "Hello"}]


def chat(script: LaunchedScript) -> str | None:
    with script.client() as client:
        answer = client.chat.completions.create(model=script.model, messages=HELLO, max_tokens=16)
    return answer.choices[0].message.content


def test_disagg_answers_on_loopback_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "--device", "cpu", script="disagg.sh") as script:
        script.wait_until_ready()
        assert chat(script)
        children = script.children()
        assert len(children) == 3
        assert [address for address in script.listening() if not is_loopback(address)] == []
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


@pytest.mark.parametrize(("script_name", "count"), [("agg_router.sh", 3), ("disagg_router.sh", 3)])
def test_the_routers_answer(tmp_path: Path, script_name: str, count: int) -> None:
    variables = {"PREFILL_WORKERS": "1", "DECODE_WORKERS": "1", "WORKERS": "2"}
    with launched(tmp_path, "--device", "cpu", variables=variables, script=script_name) as script:
        script.wait_until_ready()
        assert chat(script) == chat(script)
        children = script.children()
        assert len(children) == count
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


def test_the_engine_is_chosen_by_a_variable(tmp_path: Path) -> None:
    """On the stand-in for TensorRT-LLM, as on a machine that has it."""
    stand_in = REPOSITORY / "tests" / "trtllm_standin"
    variables = {"ENGINE": "trtllm", "PYTHONPATH": str(stand_in), "DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR": "1"}
    with launched(tmp_path, "--kv-hold-s", "2", variables=variables, script="disagg.sh") as script:
        script.wait_until_ready()
        assert chat(script) == "Hello world!"
        children = script.children()
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


@pytest.mark.parametrize("name", ["PREFILL_WORKERS", "DECODE_WORKERS"])
def test_counts_are_numbers(tmp_path: Path, name: str) -> None:
    with launched(tmp_path, variables={name: "many"}, script="disagg.sh") as script:
        assert script.finish() == 1
        assert f"{name} must be a number from 1 to 99, got 'many'" in script.output
