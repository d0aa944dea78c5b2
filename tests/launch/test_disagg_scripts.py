"""The launch scripts of several workers, as a user runs them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from launched_script import REPOSITORY, LaunchedScript, is_loopback, launched

SECRET = "DLW_POOL_SECRET"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(script: LaunchedScript) -> str | None:
    with script.client() as client:
        answer = client.chat.completions.create(model=script.model, messages=HELLO, max_tokens=16)  # type: ignore[arg-type]
    return answer.choices[0].message.content


def test_disagg_answers_on_loopback_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "--device", "cpu", script="disagg.sh") as script:
        script.wait_until_ready()
        assert chat(script)
        children = script.children()
        assert len(children) == 4
        roles = [child for child in children if "--disaggregation-mode" in child.cmdline()]
        assert [child.cmdline()[-3] for child in sorted(roles, key=lambda child: child.create_time())] == [
            "prefill",  # which was found before decode was started
            "decode",
        ]
        assert any("waiting for 1 of the workers" in line for line in script.lines)
        assert_migration(script, is_on=True)
        assert [address for address in script.listening() if not is_loopback(address)] == []
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


def assert_migration(script: LaunchedScript, *, is_on: bool) -> None:
    """The frontend migrates, after a time-out too, and the workers go on exactly."""
    frontend = script.named("dynamo.frontend")
    assert (" --migration-limit 3" in " ".join(frontend.cmdline())) is is_on
    assert frontend.environ().get("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS") == ("60" if is_on else None)
    workers = [child.environ() for child in script.children() if "-m worker " in " ".join(child.cmdline())]
    stores = {worker.get("WORKER_BOUNDARY_STORE") for worker in workers}
    assert {worker["WORKER_MIGRATION"] for worker in workers} == {"on" if is_on else "off"}
    assert len(stores) == 1
    assert str(stores.pop()).startswith("file:/") is is_on


@pytest.mark.campaign
def test_every_run_has_a_secret_that_only_its_workers_know(tmp_path: Path) -> None:
    found = set()
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        with launched(directory, "--device", "cpu", script="disagg.sh") as script:
            script.probe()
            children = script.children()
            secrets = {name: child.environ().get(SECRET) for child in children for name in [" ".join(child.cmdline())]}
            workers = {secret for name, secret in secrets.items() if " -m worker " in name}
            shares = [child.environ().get("WORKER_LOCAL_WORKERS") for child in children]
            assert shares.count("2") >= 2
            (secret,) = workers
            assert secret is not None
            assert re.fullmatch("[0-9a-f]{64}", secret)
            assert [given for name, given in secrets.items() if "dynamo.frontend" in name] == [None]
            assert not any(secret in name for name in secrets)
            found.add(secret)
            script.press_ctrl_c()
            script.finish()
            assert secret not in script.output
    assert len(found) == 2


def test_a_secret_may_be_given(tmp_path: Path) -> None:
    with launched(tmp_path, "--device", "cpu", variables={SECRET: "short"}, script="disagg.sh") as script:
        assert script.finish() == 1
        assert f"worker: error: {SECRET} must be at least 32 characters, got 5" in script.output.splitlines()


@pytest.mark.parametrize(
    ("script_name", "count"), [pytest.param("agg_router.sh", 4, marks=pytest.mark.campaign), ("disagg_router.sh", 4)]
)
def test_the_routers_answer(tmp_path: Path, script_name: str, count: int) -> None:
    variables = {"PREFILL_WORKERS": "1", "DECODE_WORKERS": "1", "WORKERS": "2", "WORKER_MIGRATION": "off"}
    with launched(tmp_path, "--device", "cpu", variables=variables, script=script_name) as script:
        script.wait_until_ready()
        assert_migration(script, is_on=False)
        assert chat(script) == chat(script)
        children = script.children()
        assert len(children) == count
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


def workers_of(script: LaunchedScript) -> list[psutil.Process]:
    return [child for child in script.children() if "-m worker " in " ".join(child.cmdline())]


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within 60 s")


def answers(script: LaunchedScript) -> bool:
    with contextlib.suppress(openai.APIStatusError):
        return bool(chat(script))
    return False


@pytest.mark.campaign
def test_a_worker_that_was_killed_is_started_again(tmp_path: Path) -> None:
    """Once discovery has forgotten it."""
    with launched(tmp_path, "--device", "cpu", script="disagg.sh") as script:
        script.wait_until_ready()
        before = workers_of(script)
        for victim in before:
            victim.kill()
            script.read_until("ended with status 137; it is started again in 12 s")
        until(lambda: len(workers_of(script)) == len(before), "new workers")
        until(lambda: answers(script), "an answer")
        children = script.children()
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


def test_ctrl_c_while_a_worker_loads(tmp_path: Path) -> None:
    """After the script was ready: here in place of one that left in order."""
    with launched(tmp_path, "--device", "cpu", variables={"WORKERS": "2"}, script="agg_router.sh") as script:
        script.wait_until_ready()
        until(lambda: len(workers_of(script)) == 2, "both workers")
        before = workers_of(script)
        before[0].terminate()
        script.read_until("ended with status ")
        until(lambda: set(workers_of(script)) - set(before), "a new worker")
        children = script.children()
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


@pytest.mark.campaign
def test_the_engine_is_chosen_by_a_variable(tmp_path: Path) -> None:
    """On the stand-in for TensorRT-LLM, as on a machine that has it."""
    stand_in = REPOSITORY / "tests" / "trtllm_standin"
    variables = {"ENGINE": "trtllm", "PYTHONPATH": str(stand_in), "DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR": "1"}
    with launched(tmp_path, "--kv-lease-s", "2", variables=variables, script="disagg.sh") as script:
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
