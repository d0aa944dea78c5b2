"""A decode worker on vLLM that is killed while it answers, and while a prompt's KV waits for it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e_stack import MODEL, Stack, Worker, wait_for
from processor_requests import Reply, chat
from test_disagg_in_vllm import LEASE_S, LONG, mode, start, transfers
from vllm_stack import START_S, vllm_workers

from adapters.client import logits_processors, processor

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1800)]

NUM_TOKENS = 80
ANSWER_S = 300.0
"""Time for an answer behind others, seconds: threads of NIXL take the cores."""

WORDS = "of a sailor, who knew the sea"


def streamed(stack: Stack, body: Mapping[str, Any], lines: list[str]) -> Reply:
    """A chat whose events are added to ``lines`` as they come."""
    url = f"{stack.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={"model": MODEL, "stream": True, **body}, timeout=ANSWER_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                lines.append(line)
    return Reply(answer.status_code, "\n".join(lines), [json.loads(line.removeprefix("data: ")) for line in lines])


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[tuple[Stack, Worker, list[Worker]]]:
    """A prefill worker, and two decode workers that answer one request at a time."""
    with vllm_workers(tmp_path / "stack", 0, frontend=["--migration-limit", "3"]) as (stack, _):
        migration = ("--migration", "on", "--boundary-store", f"file:{tmp_path / 'boundaries'}")
        prefill = start(stack, "prefill", *migration)
        decoding = [start(stack, "decode", *migration, "--max-num-seqs", "1") for _ in range(2)]
        wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "the pool", START_S)
        for worker in decoding:
            stack.wait_registered(worker)
        yield stack, prefill, decoding


def test_answers_go_on_exactly_and_leases_end(pool: tuple[Stack, Worker, list[Worker]]) -> None:
    """One answer under way and one request in the queue on each decode worker; one worker dies."""
    stack, prefill, decoding = pool
    sampled = [processor("xtc", threshold=0.05, probability=0.9), processor("repetition_penalty", penalty=1.3)]
    asking: dict[str, Any] = {
        **logits_processors(*sampled, receipt=True),
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": 5,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
        "messages": [{"role": "user", "content": LONG}],
    }

    def waiting(number: int) -> Reply:
        return chat(stack, processor("choice", choices=[WORDS]), content=f"{number}. {LONG}", timeout_s=ANSWER_S)

    expected = streamed(stack, asking, [])
    assert mode(expected) == "disaggregated"
    assert len(expected.token_ids) == NUM_TOKENS
    wait_for(lambda: prefill.metric("dlw_kv_used_blocks") == 0, "no block in use", 2 * LEASE_S)
    ended, kept = transfers(prefill, "timed_out"), transfers(prefill, "leased")
    dying = decoding[0]
    seen: tuple[list[str], list[str]] = ([], [])
    with ThreadPoolExecutor(4) as threads:
        asked: list[Future[Reply]] = [threads.submit(streamed, stack, asking, lines) for lines in seen]
        for worker in decoding:
            wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 1, "an answer on each worker")
        asked += [threads.submit(waiting, number) for number in range(len(decoding))]
        for worker in decoding:
            wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 2, "one more on each worker")
        wait_for(lambda: transfers(prefill, "leased") == kept + 4, "all prompts computed")
        wait_for(lambda: min(map(len, seen)) > 4, "the middle of both answers", ANSWER_S)
        assert not any(each.done() for each in asked)
        engine = [each for each in psutil.Process(dying.child.pid).children(recursive=True) if "VLLM" in each.name()]
        dying.signal(signal.SIGKILL)
        dying.wait()
        assert psutil.wait_procs(engine, timeout=10)[1] == []
        replies = [each.result() for each in asked]
    assert [reply.token_ids for reply in replies[:2]] == [expected.token_ids] * 2
    assert sorted(mode(reply).partition(" at ")[0] for reply in replies[:2]) == ["disaggregated", "migrated"]
    assert [reply.content for reply in replies[2:]] == [WORDS] * 2
    wait_for(lambda: transfers(prefill, "timed_out") > ended, "the end of the dead worker's lease", 3 * LEASE_S)
    wait_for(lambda: prefill.metric("dlw_kv_used_blocks") == 0, "no block in use")
    for worker in (prefill, decoding[1]):
        assert worker.running, worker.log
        assert worker.metric("dlw_in_flight_requests") == 0
    decoding[1].signal(signal.SIGKILL)
    decoding[1].wait()
    reply = chat(stack, processor("choice", choices=[WORDS]))
    assert not reply.choices, reply.text
    assert reply.error["message"]
