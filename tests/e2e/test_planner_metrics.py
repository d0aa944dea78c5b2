"""What Dynamo's planner is told of a worker: its forward passes, by Dynamo's own subscriber."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import STAND_IN, Process, Stack, wait_for

RECEIVER = Path(__file__).with_name("pass_receiver.py")
PROMPT, TOKENS = [5] * 40, 30
LONGER = [5] * 56
"""A prompt of which no pass of an answer to `PROMPT` has as many tokens as the last one."""


@pytest.fixture
def receiver(stack: Stack) -> Process:
    process = Process(
        [sys.executable, str(RECEIVER), "dynamo.backend.generate"], stack.environ, stack.directory / "passes"
    )
    stack.keep(process)
    return process


def passes(receiver: Process) -> list[dict[str, Any]]:
    """The forward passes so far, without the heartbeats of an idle engine."""
    written = receiver.log.rpartition("\n")[0]  # it may be about to write the rest of a line
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    return [one for one in lines if one["wall_time"] > 0]


def is_said(receiver: Process, decode_kv_tokens: int) -> bool:
    """Whether the newest pass decoded one request of so many tokens."""
    said = passes(receiver)
    return bool(said) and said[-1]["scheduled_requests"]["sum_decode_kv_tokens"] == decode_kv_tokens


def complete(stack: Stack, prompt: list[int] = PROMPT) -> None:
    status, text = stack.post("completions", prompt=prompt, max_tokens=TOKENS, ignore_eos=True)
    assert status == 200, text


def test_planner_is_told_of_each_step(stack: Stack, receiver: Process) -> None:
    stack.start_frontend()
    plain = '{"method": "none"}'  # a step for each token
    stack.start_worker("--publish-forward-pass-metrics", "true", "--speculative-config", plain)

    def is_heard() -> bool:
        complete(stack)
        return is_said(receiver, len(PROMPT) + TOKENS - 1)

    wait_for(is_heard, "forward passes")  # what was computed before the subscription is not told
    last = len(LONGER) + TOKENS - 1
    complete(stack, LONGER)
    wait_for(lambda: is_said(receiver, last), "the last pass of the request")

    said = passes(receiver)[-TOKENS:]
    (instance,) = (path.name.rpartition("%2F")[2] for path in stack.registered())
    assert {int(one["worker_id"]) for one in said} == {int(instance, 16)}
    scheduled = [one["scheduled_requests"] for one in said]
    prompt, decoded = scheduled[0], scheduled[1:]
    kinds = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")
    assert [prompt[kind] for kind in kinds] == [1, 24, 32]
    assert [(one["num_decode_requests"], one["sum_decode_kv_tokens"]) for one in decoded] == [
        (1, length) for length in range(len(LONGER) + 1, last + 1)
    ]


def test_planner_is_told_of_tensorrt_llms_steps(stack: Stack, receiver: Process) -> None:
    stack.start_frontend()
    stack.start_worker("--engine", "trtllm", "--publish-forward-pass-metrics", "true", **STAND_IN)  # type: ignore[arg-type]

    def heard() -> list[dict[str, Any]]:
        complete(stack)
        return passes(receiver)

    said = wait_for(heard, "forward passes")
    assert said[-1]["scheduled_requests"]["sum_decode_kv_tokens"] == len(PROMPT)
