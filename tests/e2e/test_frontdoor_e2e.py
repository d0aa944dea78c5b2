"""Clients, the front door, Dynamo's frontends and our worker."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from e2e_stack import MODEL, Process, Stack, Worker, http, leave_until_cancelled, running_stack, wait_for
from front_door_process import Door
from ports import free_port

from adapters.catalog import Catalog
from adapters.client import logits_processors, processor

MESSAGES = [{"role": "user", "content": "Hello there"}]
PATIENT = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Stack, Worker, Door]]:
    with running_stack(tmp_path_factory.mktemp("served"), tiny_model) as stack:
        stack.start_frontend()
        worker = stack.start_worker(*PATIENT)
        yield stack, worker, Door(stack)


def test_processors_from_a_stock_client(served: tuple[Stack, Worker, Door]) -> None:
    _, _, door = served
    bias = processor("logit_bias", bias={"40": 100})
    with door.client() as client:
        for extra in ({"logits_processors": [bias]}, logits_processors(bias)):
            answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, extra_body=extra)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == "DDDDDD"
        answer = client.completions.create(  # type: ignore[assignment]
            model=MODEL,
            prompt="a",
            max_tokens=4,
            extra_body={"logits_processors": {"processors": [bias], "receipt": True}},
        )
        assert answer.model_extra is not None
        assert "logit_bias" in json.dumps(answer.model_extra["nvext"]["engine_data"])
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt="a", suffix="b", stream=True)
        assert refused.value.param == "suffix"


def test_what_is_not_the_front_doors_is_the_frontends(served: tuple[Stack, Worker, Door]) -> None:
    stack, _, door = served
    for path in ("/v1/models", f"/v1/models/{MODEL}", f"/v1/models/{MODEL}/ready", "/live"):
        assert http(door.url + path) == http(stack.url + path)
    catalogue = json.loads(http(f"{door.url}/v1/logits_processors")[1])
    assert [each["name"] for each in catalogue["processors"]] == Catalog.default().names
    status, text = http(f"{door.url}/v1/chat/completions", {"model": "other", "messages": MESSAGES})
    error = json.loads(text)["error"]
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


def test_what_the_frontend_has_besides_is_out_of_reach(served: tuple[Stack, Worker, Door]) -> None:
    """Every path and method that this version of it documents."""
    stack, _, door = served
    theirs = json.loads(http(f"{stack.url}/openapi.json")[1])["paths"]
    ours = json.loads(http(f"{door.url}/openapi.json")[1])["paths"]
    assert "/busy_threshold" in theirs
    assert "/busy_threshold" not in ours
    for path, methods in theirs.items():
        if path not in ours and "{" not in path:
            for method in methods:
                status, text = http(door.url + path, None if method == "get" else {})
                assert (status, json.loads(text)["error"]["code"]) == (404, "unsupported_endpoint"), path
                assert path in text
    assert http(f"{stack.url}/busy_threshold")[0] != 404


def test_health_and_metrics(served: tuple[Stack, Worker, Door]) -> None:
    stack, worker, door = served
    assert "127.0.0.1:" in http(f"{stack.url}/health")[1]
    assert json.loads(http(f"{door.url}/health")[1]) == {"status": "healthy", "instances": 1}
    text = http(f"{door.url}/metrics")[1]
    assert "dynamo_frontend" in text
    assert "dlw_" in text.splitlines()[-1]
    assert "--worker-metrics" in text.splitlines()[-1]
    url = f"http://127.0.0.1:{worker.port}"
    text = http(f"{Door(stack, '--worker-metrics', url).url}/metrics")[1]
    assert "dynamo_frontend" in text
    assert f'dlw_max_num_seqs{{worker="{url}",' in text
    assert text.count("# TYPE process_cpu_seconds_total ") <= 1


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "Hello there"}, {"messages": [*MESSAGES, {"role": "assistant", "content": "é"}, *MESSAGES]}],
    ids=["prompt", "chat"],
)
def test_tokens_are_those_that_a_request_has(
    fields: dict[str, Any], served: tuple[Stack, Worker, Door], tiny_model: Path
) -> None:
    stack, _, _ = served
    door = Door(stack, "--model-path", str(tiny_model))
    status, text = http(f"{door.url}/tokenize", {"model": MODEL, "return_token_strs": True, **fields})
    assert status == 200, text
    found = json.loads(text)
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    usage = json.loads(http(door.url + path, {"model": MODEL, "max_tokens": 1, **fields})[1])["usage"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == usage["prompt_tokens"]
    status, text = http(f"{door.url}/detokenize", {"model": MODEL, "tokens": found["tokens"]})
    assert (status, "Hello there" in json.loads(text)["prompt"]) == (200, True)
    beyond = {"model": MODEL, "prompt": "Hello " * 100_000}
    assert http(f"{door.url}/tokenize", beyond)[0] == 400


def test_every_answer_has_an_id(served: tuple[Stack, Worker, Door]) -> None:
    _, _, door = served
    asked = [
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, "n": 2}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, "stream": True}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, "stream": True, "n": 2}),
        ("POST", "/v1/completions", {"model": "other", "prompt": "a"}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "x": 1}),
        *(("GET", path, None) for path in ("/v1/models", "/health", "/metrics", "/version", "/x", "/openapi.json")),
    ]
    for method, path, body in asked:
        for header in ({"x-request-id": "mine"}, {}):
            answer = httpx.request(method, door.url + path, json=body, headers=header)
            ids = answer.headers.get_list("x-request-id")
            assert len(ids) == 1, (path, body, ids)
            assert ids[0] == header.get("x-request-id", ids[0])


async def test_a_client_that_leaves_frees_its_slot(served: tuple[Stack, Worker, Door]) -> None:
    _, worker, door = served
    async with door.async_client() as client:
        await leave_until_cancelled(client, worker)


async def test_200_streams_say_what_each_says_alone(served: tuple[Stack, Worker, Door]) -> None:
    _, _, door = served

    async def say(client: openai.AsyncOpenAI, number: int) -> str:
        bias = {"40": 100 if number % 2 else -100}
        stream = await client.completions.create(
            model=MODEL, prompt=f"number {number % 20}", max_tokens=8, stream=True, logit_bias=bias
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(limits=limits, timeout=100) as connections:
        client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", http_client=connections, max_retries=0)  # type: ignore[arg-type]
        together = await asyncio.gather(*(say(client, number) for number in range(200)))
    assert together[1::2] == ["D" * 8] * 100
    assert together[:20] == together[20:40] == together[180:]
    assert not any("D" in text for text in together[::2])


def test_frontends_take_turns_and_one_may_die(stack: Stack, tmp_path: Path) -> None:
    """A stream of the one that dies is cut; the next request is answered by the other."""
    first = stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    other = free_port()
    second = Process(second_frontend(other), stack.environ, tmp_path / "second.log")
    stack._processes.append(second)
    wait_for(lambda: f'"{MODEL}"' in http(f"http://127.0.0.1:{other}/v1/models")[1], "the second frontend")
    wait_for(lambda: http(f"http://127.0.0.1:{other}/v1/completions", {})[0] != 404, "its route, a moment later")
    door = Door(stack, upstream=f"{stack.url},http://127.0.0.1:{other}")
    long = {"model": MODEL, "prompt": "z", "max_tokens": 2000, "stream": True}
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{door.url}/v1/completions", json=long) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        begun = wait_for(lambda: [each for each in (first, second) if _serves(each, stack, other)], "its frontend")
        begun[0].end()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "slot freed")
    for _ in range(4):
        status, text = door.post("completions", prompt="z", max_tokens=2)
        assert status == 200, text


def second_frontend(port: int) -> list[str]:
    return [sys.executable, "-m", "dynamo.frontend", "--http-port", str(port)]


def _serves(frontend: Process, stack: Stack, other: int) -> bool:
    """Whether a request is being answered by this frontend."""
    port = other if frontend.log_path.name == "second.log" else stack.http_port
    text = http(f"http://127.0.0.1:{port}/metrics")[1]
    gauge = [line for line in text.splitlines() if line.startswith("dynamo_frontend_inflight_requests{")]
    return any(float(line.rpartition(" ")[2]) > 0 for line in gauge)


def test_keys_of_a_file(served: tuple[Stack, Worker, Door], tmp_path: Path) -> None:
    stack, _, _ = served
    (tmp_path / "keys").write_text("secret\n")
    door = Door(stack, "--api-key-file", str(tmp_path / "keys"))
    assert door.post("completions", prompt="a", max_tokens=1)[0] == 401
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="secret", max_retries=0) as client:
        assert client.models.list().data[0].id == MODEL
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices[0].text
    assert http(f"{door.url}/health")[0] == 200
    door.signal(signal.SIGTERM)
    assert door.wait() == 0


async def test_clients_take_turns(stack: Stack, tmp_path: Path) -> None:
    """One slot: the second key's request comes before the rest of the first one's."""
    (tmp_path / "keys").write_text("large\nsmall\n")
    stack.start_frontend()
    worker = stack.start_worker(*PATIENT, "--max-num-seqs", "1")
    door = Door(stack, "--api-key-file", str(tmp_path / "keys"))
    ended: list[str] = []

    async def ask(client: openai.AsyncOpenAI, name: str, key: str, max_tokens: int) -> None:
        client = client.with_options(api_key=key)
        await client.completions.create(
            model=MODEL, prompt=name, max_tokens=max_tokens, extra_body={"ignore_eos": True}, timeout=100
        )
        ended.append(name)

    async with door.async_client() as client:
        large = [asyncio.create_task(ask(client, f"large {n}", "large", 1900)) for n in range(5)]
        while await asyncio.to_thread(worker.metric, "dlw_in_flight_requests") < 5:
            assert ended == []
        await ask(client, "small", "small", 1)
        assert len(ended) <= 2
        await asyncio.gather(*large)
    assert sorted(ended) == [*(f"large {n}" for n in range(5)), "small"]
