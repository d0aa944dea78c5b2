"""A prefill and a decode worker on vLLM behind Dynamo's frontend, with vLLM's NixlConnector."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_stack import MODEL, Stack, Worker, wait_for
from endpoints import NUM_TOKENS, Endpoint, tokens, transferred
from processor_requests import PATIENT, Reply, chat, check_failed, check_refused, send
from vllm_stack import OPTIONS, START_S, vllm_workers

from adapters.client import processor

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1800)]

LEASE_S = 12
LONG = "Tell me, in the words of a sailor, of the sea and of its storms. " * 12
ENGINE_ARGS = '{"enforce_eager": true, "block_size": 32}'

IDS = list(range(300, 400))

Pair = tuple[Stack, Worker, Worker]


def start(stack: Stack, role: str, *more: str) -> Worker:
    options = (*OPTIONS[:-1], ENGINE_ARGS, *PATIENT, "--kv-lease-s", str(LEASE_S), "--disaggregation-mode", role)
    raises = ("--logits-processor", "acme/raises=third_party_e2e:Raises")
    worker = stack.start_worker(*options, *raises, *more, wait=False)
    wait_for(lambda: "Registered endpoint" in worker.log or not worker.running, f"a {role} worker", START_S)
    assert worker.running, worker.log
    return worker


def start_pair(stack: Stack) -> tuple[Worker, Worker]:
    prefill = start(stack, "prefill")
    decode = start(stack, "decode")
    stack.wait_registered(decode)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "the pair", 60)
    return prefill, decode


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with vllm_workers(tmp_path_factory.mktemp("disagg") / "stack", 0) as (stack, _):
        yield stack, *start_pair(stack)


def transfers(worker: Worker, outcome: str) -> float:
    return worker.metric("dlw_kv_transfers_total", outcome=outcome)


def settled(pair: Pair) -> None:
    """All leases are over, and no request is in flight."""
    for worker in pair[1:]:
        wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 0, "no request in flight")
    wait_for(lambda: pair[1].metric("dlw_kv_leased_prompts") == 0, "no prompt leased", 2 * LEASE_S)


def mode(reply: Reply) -> str:
    return next(str(receipt["mode"]) for receipt in reversed(reply.receipts) if receipt is not None)


def test_a_prompt_computed_in_one_and_answered_by_another(pair: Pair) -> None:
    stack, prefill, decode = pair
    before, leased = transfers(decode, "received"), transfers(prefill, "leased")
    reply = chat(stack, content=LONG, max_tokens=12, ignore_eos=True, receipt=True)
    assert (len(reply.token_ids), mode(reply)) == (12, "disaggregated")
    settled(pair)
    assert transfers(decode, "received") == before + 1
    assert transfers(prefill, "leased") == leased + 1
    assert transfers(prefill, "timed_out") == 0
    assert decode.metric("dlw_kv_received_bytes_total") > 0
    assert prefill.metric("dlw_tokens_total", kind="generated") == 0


def test_prefix_hits_of_both_sides(pair: Pair) -> None:
    """What the decode worker has is not pulled again, and the client learns what prefill had."""
    stack, *_ = pair
    first, again = (chat(stack, content="Of rivers. " + LONG, max_tokens=8, temperature=0) for _ in range(2))
    assert first.token_ids == again.token_ids
    usage = again.events[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 32
    settled(pair)


@pytest.mark.parametrize("stream", [False, True])
def test_processors_from_the_first_token_on(pair: Pair, stream: bool) -> None:
    stack = pair[0]
    forced = [23919, 4, 23919, 4]
    reply = chat(stack, processor("forced_prefix", token_ids=forced), stream=stream, max_tokens=4, content=LONG)
    assert reply.token_ids == forced
    assert chat(stack, processor("choice", choices=["maybe"]), stream=stream).content == "maybe"
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    reply = chat(stack, processor("json_schema", schema=schema), stream=stream, max_tokens=40, temperature=1.0, seed=1)
    assert json.loads(reply.content)["colour"] in ("red", "blue")
    settled(pair)


@pytest.mark.parametrize("body", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seeded"])
def test_an_aggregated_worker_decides_the_same(pair: Pair, tmp_path: Path, body: dict[str, Any]) -> None:
    """The answer in an aggregated vLLM, and each decision on the embedded engine's logits."""
    stack, content = pair[0], "Tell me of the sea, and of ships."
    chosen = [processor("xtc", threshold=0.05, probability=0.9)] if body.get("seed") else []
    chosen += [processor("repetition_penalty", penalty=1.3), processor("min_tokens", n=24)]
    reply = chat(stack, *chosen, content=content, max_tokens=24, receipt=True, **body)
    assert mode(reply) == "disaggregated"
    (tmp_path / "response.json").write_text(reply.text)
    (tmp_path / "request.json").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))

    def replayed(*options: str) -> str:
        command = [sys.executable, "-m", "worker", "replay", str(tmp_path / "response.json")]
        command += ["--prompt-file", str(tmp_path / "request.json"), "--model-path", str(stack.model_path)]
        command += ["--context-length", "1024", *options]
        done = subprocess.run(command, env=stack.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = replayed("--kv-cache-memory", "1GiB", "--engine", "vllm", "--engine-args", ENGINE_ARGS)
    assert said.endswith("answer: 24 tokens, equal to those recorded\n")
    said = replayed("--engine", "embedded", "--device", "cpu", "--answer-file", str(tmp_path / "response.json"))
    assert "decisions: 24 of 24 tokens are allowed by the processors" in said
    settled(pair)


def test_a_failing_processor_fails_on_the_decode_worker(pair: Pair) -> None:
    stack, prefill, decode = pair
    reply = chat(stack, processor("acme/raises"), max_tokens=200, ignore_eos=True)
    check_failed(reply, "logits processor acme/raises: raised RuntimeError at position")
    errors = [each.metric("dlw_processor_errors_total", processor="acme/raises", reason="raised") for each in pair[1:]]
    assert errors == [0, 1]
    assert prefill.running
    assert decode.running
    settled(pair)


def test_what_cannot_be_handed_over_is_refused_by_name(pair: Pair) -> None:
    stack, prefill, _ = pair
    before = transfers(prefill, "leased")
    check_refused(chat(stack, processor("nonsense")), 'processors[0].name: unknown logits processor "nonsense"')
    check_refused(chat(stack, processor("phrase_ban", phrases=["red"])), "phrase_ban, which takes tokens back")
    reply = send(stack, "completions", {"prompt": "Once", "max_tokens": 2, "echo": True, "logprobs": 1})
    assert reply.status == 400
    assert "output_options.prompt_logprobs: vLLM reports none of a prompt whose KV another worker" in reply.text
    assert transfers(prefill, "leased") == before
    settled(pair)


async def test_clients_that_leave_give_blocks_back(pair: Pair) -> None:
    """At any moment: while the prompt is computed, while its KV goes over, while it is answered."""
    stack, *_ = pair
    async with stack.async_client() as client:
        for number in range(8):
            body: dict[str, Any] = {
                "prompt": f"{number}. {LONG}",
                "max_tokens": 400,
                "extra_body": {"ignore_eos": True},
            }
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.completions.create(model=MODEL, **body), 0.2 * number)
    await asyncio.to_thread(settled, pair)
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"


def test_many_clients_at_a_time(pair: Pair) -> None:
    stack, *_ = pair
    words, found = ["red", "green", "blue", "white", "black"], [""] * 12

    def ask(number: int) -> None:
        word = words[number % 5]
        found[number] = chat(
            stack, processor("choice", choices=[word]), content=f"{number} {LONG[: 60 * number]}"
        ).content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [words[number % 5] for number in range(len(found))]
    settled(pair)


def test_a_prefill_worker_that_dies_between(pair: Pair) -> None:
    """The last test of this pair: a lease that is over, a dead worker, a new one in its place."""
    stack, prefill, decode = pair
    first, second = Endpoint(stack, "dynamo.prefill"), Endpoint(stack, "dynamo.backend")

    def answer(given: dict[str, Any]) -> list[int]:
        return tokens(second.ask(IDS, prefill_result={"disaggregated_params": given}))

    lost = transfers(decode, "lost")
    expected = answer(transferred(first, IDS))
    assert len(expected) == NUM_TOKENS
    assert transfers(decode, "lost") == lost
    late = transferred(first, IDS)
    wait_for(lambda: transfers(prefill, "timed_out") >= 1, "the end of the lease", 3 * LEASE_S)
    assert answer(late) == expected
    assert transfers(decode, "lost") == lost + 1
    orphaned = transferred(first, IDS)
    engine = [each for each in psutil.Process(prefill.child.pid).children(recursive=True) if "VLLM" in each.name()]
    assert engine
    prefill.signal(signal.SIGKILL)
    prefill.wait()
    assert psutil.wait_procs(engine, timeout=10)[1] == []
    assert answer(orphaned) == expected
    assert transfers(decode, "lost") == lost + 2
    first.end()
    second.end()
    start(stack, "prefill")
    reply = wait_for(lambda: answered(stack), "the new prefill worker", 60)
    assert (reply.content, mode(reply)) == ("ok", "disaggregated")


def answered(stack: Stack) -> Reply | None:
    reply = chat(stack, processor("choice", choices=["ok"]), receipt=True)
    return reply if reply.status == 200 else None
