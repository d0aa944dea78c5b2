"""One prefill and one decode worker behind Dynamo's own prefill router: as one worker, token for token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, Stack, Worker, running_stack, wait_for

from worker.smoke import SMOKE_VARIABLES

ENGINE = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16")


def start_pair(stack: Stack, *arguments: str, **environ: str) -> tuple[Worker, Worker]:
    """A prefill and a decode worker; the model is listed once both are there."""
    prefill = stack.start_worker(*ENGINE, *arguments, "--disaggregation-mode", "prefill", wait=False, **environ)
    decode = stack.start_worker(*ENGINE, *arguments, "--disaggregation-mode", "decode", wait=False, **environ)
    for worker in (prefill, decode):
        stack.wait_registered(worker)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "the pair")
    return prefill, decode


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Stack, Worker, Worker]]:
    with running_stack(tmp_path_factory.mktemp("disagg"), tiny_model) as stack:
        stack.start_frontend()
        yield stack, *start_pair(stack)


def settled(prefill: Worker, decode: Worker) -> None:
    """Every prompt that was held has been taken, and nobody is in flight."""
    for worker in (prefill, decode):
        wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 0, "no request in flight")
    wait_for(lambda: prefill.metric("dlw_kv_held_prompts") == 0, "no prompt held")


def complete(stack: Stack, **body: Any) -> dict[str, Any]:
    status, text = stack.post("completions", **body)
    assert status == 200, text
    return dict(json.loads(text))


def test_a_prompt_is_computed_in_one_and_answered_by_the_other(pair: tuple[Stack, Worker, Worker]) -> None:
    stack, prefill, decode = pair
    before = decode.metric("dlw_kv_handoffs_total", outcome="received")
    answer = complete(stack, prompt="one two three four five six seven eight nine ten", max_tokens=20)
    assert answer["usage"]["completion_tokens"] == 20 or answer["choices"][0]["finish_reason"] == "stop"
    settled(prefill, decode)
    assert decode.metric("dlw_kv_handoffs_total", outcome="received") == before + 1
    assert decode.metric("dlw_kv_received_bytes_total") > 0
    assert prefill.metric("dlw_kv_handoffs_total", outcome="timed_out") == 0
    assert prefill.metric("dlw_tokens_total", kind="generated") == 0
