"""Prefill and decode by TensorRT-LLM's stand-in behind Dynamo's own prefill router: as one
worker, token for token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import STAND_IN, Stack, running_stack, wait_for
from processor_requests import PATIENT
from test_tensorrt_e2e import REQUESTS, chat

from adapters.client import logits_processors

pytestmark = pytest.mark.timeout(300)  # several processes start, each loads torch


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, trtllm: Stack) -> Iterator[tuple[Stack, Stack]]:
    """A stack with a prefill and a decode worker, and one that does both in one."""
    with running_stack(tmp_path_factory.mktemp("pair"), tiny_model) as pair:
        pair.start_frontend()
        for role in ("prefill", "decode"):
            options = ("--engine", "trtllm", *PATIENT, "--disaggregation-mode", role)
            pair.wait_endpoint(pair.start_worker(*options, wait=False, **STAND_IN))  # type: ignore[arg-type]
        for worker in pair.workers:
            pair.wait_registered(worker)
        wait_for(lambda: pair.post("completions", prompt="hi", max_tokens=1)[0] == 200, "an answer")
        yield pair, trtllm


def answer(stack: Stack, number: int) -> dict[str, Any]:
    entries, options = REQUESTS[number]
    status, reply = chat(stack, *entries, **options)
    assert status == 200, reply
    choice = reply["choices"][0]
    tokens = [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    return {"choice": choice["message"]["content"], "reason": choice["finish_reason"], "tokens": tokens}


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_answers_are_those_of_one_worker(both: tuple[Stack, Stack], number: int) -> None:
    pair, alone = both
    assert answer(pair, number) == answer(alone, number)


def test_the_seed_in_a_receipt_is_that_of_both_workers(both: tuple[Stack, Stack]) -> None:
    """Prefill samples the first token, decode the others: with one seed, drawn by a worker."""
    pair, _ = both
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 1.5}
    answers: list[tuple[str, dict[str, Any]]] = []
    for _ in range(2):
        seed = {"seed": answers[0][1]["seed"]} if answers else {}
        status, text = pair.post("chat/completions", **asked, **seed, **logits_processors(receipt=True))
        assert status == 200, text
        reply = json.loads(text)
        receipt = reply["nvext"]["engine_data"]["logits_processors"]
        answers.append((reply["choices"][0]["message"]["content"], receipt))
    assert answers[0] == answers[1]
    assert answers[0][1]["mode"] == "disaggregated"


def test_refused_on_prefill(both: tuple[Stack, Stack]) -> None:
    pair, _ = both
    prefill, decode = pair.workers
    before = prefill.metric("dlw_requests_total", outcome="refused")
    status, text = chat(pair, {"name": "no_such_processor"})
    assert (status, "no_such_processor" in text) == (400, True)
    assert prefill.metric("dlw_requests_total", outcome="refused") == before + 1
    assert decode.metric("dlw_requests_total", outcome="refused") == 0


def test_nothing_stays_in_flight(both: tuple[Stack, Stack]) -> None:
    pair, _ = both
    assert json.loads(pair.post("completions", prompt="hi", max_tokens=2)[1])["usage"]["completion_tokens"] == 2
    for worker in pair.workers:
        wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 0, "no request in flight")
