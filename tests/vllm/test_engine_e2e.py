"""vLLM behind the worker and Dynamo's frontend: what clients ask for, and what they get."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, Stack, Worker, leave_until_cancelled, wait_for
from processor_requests import PATIENT, Reply, chat, check_failed, check_refused, of
from vllm_stack import start_vllm_worker, vllm_workers

from adapters.client import processor

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

Shared = tuple[Stack, Worker]
TEXT = "".join(f"line {number} of a text that one grammar allows\n" for number in range(12))
THIRD_PARTIES = ("acme/one=third_party_e2e:OneToken", "acme/raises=third_party_e2e:Raises")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    options = [part for name in THIRD_PARTIES for part in ("--logits-processor", name)]
    directory = tmp_path_factory.mktemp("vllm") / "stack"
    with vllm_workers(directory, 0, frontend=["--migration-limit", "3"]) as (stack, _):
        yield stack, start_vllm_worker(stack, *PATIENT, *options, *migration(stack))


def migration(stack: Stack) -> list[str]:
    return ["--migration", "on", "--boundary-store", f"file:{stack.directory / 'boundaries'}"]


def test_a_greedy_conversation(served: Shared) -> None:
    client = served[0].client()
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France? One word."}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16).choices[0]
    assert "Paris" in str(first.message.content)
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0).choices[0]
    assert again.message.content == first.message.content
    messages += [{"role": "assistant", "content": first.message.content}, {"role": "user", "content": "Are you sure?"}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_seed_fixes_the_tokens_of_each_choice(served: Shared) -> None:
    def ask(**body: Any) -> Reply:
        return chat(served[0], temperature=1.0, max_tokens=12, **body)

    first, again, other = ask(seed=7), ask(seed=7, stream=True), ask(seed=8)
    assert len(first.token_ids) == 12
    assert first.token_ids == again.token_ids != other.token_ids


def test_grammars_and_choices(served: Shared) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"type": "string", "maxLength": 8}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    reply = chat(served[0], processor("json_schema", schema=schema), max_tokens=40, temperature=1.0, seed=1)
    assert list(json.loads(reply.content)) == ["colour"]
    assert reply.finish_reason == "stop"
    assert chat(served[0], processor("choice", choices=["maybe"])).content == "maybe"


def test_a_slow_grammar_holds_nobody(served: Shared) -> None:
    """vLLM's process compiles it for longer than a step may wait."""
    stack, _ = served
    schema = {"type": "integer", "minimum": 0, "multipleOf": 99991}
    found: list[Reply] = []

    def send() -> None:
        found.append(chat(stack, processor("json_schema", schema=schema), max_tokens=16))

    sender = threading.Thread(target=send)
    sender.start()
    num_answered = 0
    while sender.is_alive():
        assert chat(stack, max_tokens=4).content
        num_answered += 1
    (reply,) = found
    assert reply.content.isdigit(), reply
    assert num_answered > 3


def test_a_chain_that_draws_and_its_receipt(served: Shared) -> None:
    xtc = processor("xtc", threshold=0.05, probability=0.9)

    def ask(**body: Any) -> Reply:
        return chat(served[0], xtc, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True, receipt="debug", **body)

    first, again = ask(), ask(stream=True)
    assert first.token_ids == again.token_ids
    receipt = first.receipts[-1]
    assert receipt is not None
    assert receipt["engine"]["name"] == "vllm"
    assert receipt["seed"] == 3
    (record,) = [each for each in receipt["processors"] if each["name"] == "xtc"]
    assert record["steps_active"] == 10
    assert record["last_position"] == receipt["prompt_length"] + 9


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_at_a_stop_string_has_a_receipt(served: Shared, stream: bool) -> None:
    forced = processor("forced_sequence", text="one two three four")
    reply = chat(served[0], forced, stop=[" three"], max_tokens=40, receipt="debug", stream=stream)
    assert (reply.content, reply.finish_reason) == ("one two", "stop")
    receipt = reply.receipts[-1]
    assert receipt is not None
    number = receipt["generated_tokens"]
    assert receipt["processors"][0]["tokens_forced"] == number == len(receipt["tokens"])
    assert receipt["processors"][0]["last_position"] == receipt["prompt_length"] + number - 1


def test_a_third_party_has_a_state_of_its_own_per_request(served: Shared) -> None:
    reply = chat(served[0], processor("acme/one", token_id=49, other=50), max_tokens=12, receipt=True)
    assert reply.token_ids == [49] * 9 + [50] + [49] * 2
    assert reply.receipts[-1] is not None
    assert reply.receipts[-1]["processors"][0]["steps_active"] == 12


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"temperature": 1.0, "seed": 2}])
def test_a_failing_processor_ends_its_request_with_an_error(served: Shared, options: dict[str, Any]) -> None:
    stack, worker = served
    failed = worker.metric("dlw_processor_errors_total", processor="acme/raises", reason="raised")
    reply = chat(stack, processor("acme/raises"), max_tokens=500, **options)
    check_failed(reply, "logits processor acme/raises: raised RuntimeError at position")
    assert "secret" not in reply.text
    assert worker.metric("dlw_processor_errors_total", processor="acme/raises", reason="raised") == failed + 1
    assert worker.metric("dlw_in_flight_requests") == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (processor("nonsense"), 'processors[0].name: unknown logits processor "nonsense"'),
        (processor("min_tokens", n=-1), "processors[0].args.n"),
        (processor("phrase_ban", phrases=["red"]), "phrase_ban, which takes tokens back, and vLLM cannot"),
        (processor("cfg", scale=2.0), "cfg, which needs a second row of logits, and vLLM computes one"),
    ],
)
def test_what_cannot_be_kept_is_refused(served: Shared, asked: Any, message: str) -> None:
    check_refused(chat(served[0], asked), message)


def test_controls_that_run_natively(served: Shared) -> None:
    plain = chat(served[0], max_tokens=24).token_ids
    penalised = chat(served[0], max_tokens=24, repetition_penalty=1.9, min_tokens=24, frequency_penalty=2.0).token_ids
    assert len(penalised) == 24
    assert plain != penalised
    assert chat(served[0], max_tokens=24, top_k=1, temperature=1.0).token_ids == plain


def test_log_probabilities(served: Shared) -> None:
    plain = chat(served[0], max_tokens=4)
    masked = chat(served[0], processor("banned_tokens", token_ids=[plain.token_ids[0]]), max_tokens=4)
    assert [len(entry["top_logprobs"]) for entry in plain.logprobs] == [5] * 4
    banned, top = plain.logprobs[0], masked.logprobs[0]["top_logprobs"][0]
    assert top["token"] == banned["token"]  # raw: what a processor masks is still there
    assert top["logprob"] == pytest.approx(banned["logprob"], abs=1e-3)
    assert masked.token_ids[0] != plain.token_ids[0]


async def test_twenty_clients_at_a_time(served: Shared) -> None:
    words = ["red", "green", "blue", "white", "black"]
    async with served[0].async_client() as client:

        async def ask(number: int) -> str:
            body = of(processor("choice", choices=[words[number % 5]])) if number % 2 else {"temperature": 1.0}
            answer = await client.completions.create(model=MODEL, prompt="A colour:", max_tokens=12, extra_body=body)
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 12
            return answer.choices[0].text

        answers = await asyncio.gather(*map(ask, range(20)))
    assert answers[1::2] == [words[number % 5] for number in range(1, 20, 2)]


async def test_a_client_that_leaves_frees_its_request(served: Shared) -> None:
    async with served[0].async_client() as client:
        await asyncio.wait_for(leave_until_cancelled(client, served[1]), 100)
    assert chat(served[0], processor("choice", choices=["ok"])).content == "ok"


def test_an_answer_and_its_decisions_are_made_again(served: Shared, tmp_path: Path) -> None:
    """The answer in another vLLM, which has nothing else to do either; the decisions in the
    embedded engine.
    """
    stack, content = served[0], "Tell me of the sea."
    xtc = processor("xtc", threshold=0.05, probability=0.9)
    reply = chat(stack, xtc, content=content, temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, receipt=True)
    (tmp_path / "response.json").write_text(reply.text)
    (tmp_path / "request.json").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    response = str(tmp_path / "response.json")

    def replayed(*options: str) -> str:
        command = [sys.executable, "-m", "worker", "replay", response, "--prompt-file", str(tmp_path / "request.json")]
        command += ["--model-path", str(stack.model_path), "--context-length", "1024", *options]
        done = subprocess.run(command, env=stack.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    said = replayed("--kv-cache-memory", "1GiB", "--engine", "vllm", "--engine-args", '{"enforce_eager": true}')
    assert said.startswith("engine: vllm 0.32.0, computed by vLLM, float32, cpu\n")
    assert "note: the answer was made with fast numerics" in said
    assert said.endswith("answer: 24 tokens, equal to those recorded\n")
    said = replayed("--engine", "embedded", "--device", "cpu", "--answer-file", response)
    assert "decisions: 24 of 24 tokens are allowed by the processors" in said


async def test_a_forced_text_goes_on_in_another_worker(served: Shared, tmp_path: Path) -> None:
    """Two clients: a second worker leaves with one of the answers, and the first finishes both."""
    stack, first = served
    second = start_vllm_worker(stack, *migration(stack), "--drain-timeout-s", "0")
    texts = ["", ""]

    async def leave() -> None:
        while min(map(len, texts)) < 20:
            await asyncio.sleep(0.02)
        assert all(worker.metric("dlw_in_flight_requests") == 1 for worker in (first, second))
        second.signal(signal.SIGTERM)

    async with stack.async_client() as client:

        async def ask(number: int) -> tuple[str | None, str]:
            mode, finish_reason = "", None
            extra = of(processor("choice", choices=[TEXT]), receipt=True)
            stream = await client.completions.create(
                model=MODEL, prompt="Once", max_tokens=400, stream=True, extra_body=extra
            )
            async for chunk in stream:
                texts[number] += "".join(choice.text or "" for choice in chunk.choices)
                finish_reason = next((one.finish_reason for one in chunk.choices if one.finish_reason), finish_reason)
                data = (getattr(chunk, "nvext", None) or {}).get("engine_data")
                mode = data["logits_processors"]["mode"] if data else mode
            return finish_reason, mode

        *answers, _ = await asyncio.wait_for(asyncio.gather(ask(0), ask(1), leave()), 200)
    assert texts == [TEXT, TEXT]
    assert [finish_reason for finish_reason, _ in answers] == ["stop", "stop"]
    assert sorted(mode.partition(" at ")[0] for _, mode in answers) == ["aggregated", "migrated"]
    assert await asyncio.to_thread(second.wait) == 0
    wait_for(lambda: "drained: 0 finished, 1 migrated" in second.log, "the line of the drain")


async def test_a_worker_that_drains_finishes_its_requests(served: Shared) -> None:
    """The last test of these workers."""
    stack, worker = served
    async with stack.async_client() as client:
        stream = await client.completions.create(
            model=MODEL, prompt="Once", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
        )
        num_chunks = 0
        async for chunk in stream:
            num_chunks += bool(chunk.choices and chunk.choices[0].text)
            if num_chunks == 1:
                worker.signal(signal.SIGTERM)
        assert num_chunks > 20
    assert worker.wait() == 0
    assert "drained: 1 finished, 0 migrated" in worker.log
