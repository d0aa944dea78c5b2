"""The NATS runtime with a real server: a worker and its clients in one process."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.errors import MaxPayloadError
from nats_workers import connected, running
from servers import NatsServer

from worker.engines.embedded import Engine
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.nats import protocol
from worker.runtimes.nats.client import ConnectionClosed, NoWorkers, RequestError, WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions
from worker.runtimes.nats.runtime import NatsWorker
from worker.sampling import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPOSITORY = Path(__file__).parents[2]
PROMPT = [9, 30, 41, 77, 30, 41, 12]
GREEDY: dict[str, Any] = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 12, "ignore_eos": True}}
PICTURE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:,"}}
LONG_KEY = {**PICTURE, "k" * 600_000: 1}
"""A part with an unknown field whose name would not fit into an answer twice."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(nats_server: NatsServer, tiny_model: Path) -> AsyncIterator[NatsWorker]:
    async with running(tiny_model, nats_server.url, "tiny/a.b") as worker:
        yield worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: NatsServer, worker: NatsWorker) -> AsyncIterator[WorkerClient]:
    async with await connected(nats_server.url, "tiny/a.b") as client:
        yield client


async def idle(worker: NatsWorker) -> None:
    """Until nothing is in flight."""
    while len(worker.server.in_flight) or worker.server.engine.num_unfinished():
        await asyncio.sleep(0.005)


async def test_the_worker_is_found_as_a_service(client: WorkerClient) -> None:
    nats = client.connection
    reply = await nats.request("$SRV.INFO.dlw-tiny_a_b-1")
    info = json.loads(reply.data)
    assert info["metadata"]["model"] == "tiny/a.b"
    endpoints = {each["name"]: each for each in info["endpoints"]}
    assert endpoints["generate"]["subject"] == "dlw.tiny_a_b.1.generate"
    assert endpoints["generate"]["queue_group"] == "workers"
    await client.generate(**GREEDY)
    stats = json.loads((await nats.request(f"$SRV.STATS.dlw-tiny_a_b-1.{info['id']}")).data)
    generate = next(each for each in stats["endpoints"] if each["name"] == "generate")
    assert generate["num_requests"] >= 1
    assert generate["data"]["requests"]["length"] >= 1
    described = await client.info()
    assert (described["model"], described["draining"]) == ("tiny/a.b", False)


async def test_an_answer_streams_in_order(client: WorkerClient) -> None:
    chunks = [chunk async for chunk in client.stream(**GREEDY)]
    whole = await client.generate(**GREEDY)
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole.choices[0].token_ids
    assert len(whole.choices[0].token_ids) == 12
    assert "".join(chunk["text"] for chunk in chunks) == whole.choices[0].text
    assert chunks[-1]["finish_reason"] == "length"
    assert whole.usage == {"prompt_tokens": len(PROMPT), "completion_tokens": 12}


async def test_messages_text_and_token_ids_are_prompts(client: WorkerClient, worker: NatsWorker) -> None:
    tokenizer = worker.server.chains.vocabulary.tokenizer
    messages = [{"role": "user", "content": "Hello world!"}]
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    rest = {"stop_conditions": {"max_tokens": 6, "ignore_eos": True}}
    chat = await client.generate(messages=messages, **rest)
    text = await client.generate(prompt=made, **rest)
    ids = await client.generate(token_ids=tokenizer.encode(made, add_special_tokens=False), **rest)
    assert chat.choices == text.choices == ids.choices
    decoded = tokenizer.decode(chat.choices[0].token_ids, skip_special_tokens=True)
    assert chat.choices[0].text == decoded


async def test_processors_are_a_plain_field(client: WorkerClient) -> None:
    forced = {"name": "json_schema", "args": {"schema": {"const": {"a": 1}}}}
    answer = await client.generate(
        token_ids=PROMPT,
        logits_processors={"processors": [forced], "receipt": True},
        stop_conditions={"max_tokens": 40},
    )
    assert json.loads(answer.choices[0].text) == {"a": 1}
    assert answer.choices[0].engine_data is not None
    names = [each["name"] for each in answer.choices[0].engine_data["logits_processors"]["processors"]]
    assert names == ["json_schema"]


async def test_an_unset_temperature_is_the_models(nats_server: NatsServer, tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = model / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "do_sample": True, "temperature": 0.6}))
    asked = {**GREEDY, "logits_processors": {"receipt": True}}
    async with running(model, nats_server.url, "sampled"), await connected(nats_server.url, "sampled") as client:
        answer = await client.generate(**asked)
        seeded, equal = [
            (await client.generate(**{**asked, "sampling_options": {"seed": 7, **more}})).choices[0]
            for more in ({}, {"temperature": 0.6})
        ]
    assert answer.choices[0].engine_data is not None
    sampling = answer.choices[0].engine_data["logits_processors"]["sampling"]
    assert sampling == {"temperature": {"value": 0.6, "from": "model"}}
    assert seeded.token_ids == equal.token_ids


async def test_choices_differ_and_equal_those_of_the_offline_engine(client: WorkerClient, tiny_model: Path) -> None:
    sampled = {**GREEDY, "sampling_options": {"temperature": 1.0, "seed": 7, "n": 3}}
    first, again = await client.generate(**sampled), await client.generate(**sampled)
    assert first.choices == again.choices
    assert len({tuple(choice.token_ids) for choice in first.choices}) == 3
    assert first.usage["completion_tokens"] == 36
    one = await client.generate(**{**GREEDY, "sampling_options": {"temperature": 1.0, "seed": 7}})
    assert one.choices[0].token_ids == first.choices[0].token_ids
    offline = Engine(tiny_model, device="cpu", dtype="float32", numerics="exact", kv_blocks=512)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=3, ignore_eos=True, top_p=1.0)
    (result,) = await asyncio.to_thread(offline.generate, [PROMPT], params, False)
    assert [list(each.token_ids) for each in result.outputs] == [each.token_ids for each in first.choices]
    unseeded = await client.generate(**{**GREEDY, "sampling_options": {"temperature": 1.0, "n": 2}})
    assert unseeded.choices[0].token_ids != unseeded.choices[1].token_ids


async def test_a_stop_string_ends_the_answer_and_frees_it(client: WorkerClient, worker: NatsWorker) -> None:
    long = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 60, "ignore_eos": True}}
    text = (await client.generate(**long)).choices[0].text
    stop = text[20:23]
    answer = (
        await client.generate(token_ids=PROMPT, stop_conditions={**long["stop_conditions"], "stop": [stop]})
    ).choices[0]
    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) < 60
    await idle(worker)


async def test_a_stop_string_is_an_end_in_receipt_usage_and_metrics(client: WorkerClient, worker: NatsWorker) -> None:
    def ended() -> list[float]:
        registry = worker.server.metrics.registry
        return [
            registry.get_sample_value("dlw_requests_total", {"outcome": name}) or 0.0 for name in ("stop", "cancelled")
        ]

    conditions = {"max_tokens": 60, "ignore_eos": True}
    text = (await client.generate(token_ids=PROMPT, stop_conditions=conditions)).choices[0].text
    before = ended()
    asked = {"token_ids": PROMPT, "stop_conditions": {**conditions, "stop": [text[20:23]]}}
    chunks = [chunk async for chunk in client.stream(**asked, logits_processors={"receipt": True})]
    await idle(worker)
    last, usage = chunks[-1], chunks[-1]["completion_usage"]
    receipt = last["engine_data"]["logits_processors"]
    assert (last["finish_reason"], last["stop_string"]) == ("stop", text[20:23])
    assert receipt["generated_tokens"] == usage["completion_tokens"] < 60
    assert "prompt_tokens_details" in usage
    assert [now - then for now, then in zip(ended(), before, strict=True)] == [1, 0]


async def test_parts_of_a_message_are_one_text_for_a_template_of_texts(
    nats_server: NatsServer, tiny_model: Path, tmp_path: Path
) -> None:
    """The prompt had Python's form of the list."""
    template = tmp_path / "texts.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world!"}]
    rest = {"stop_conditions": {"max_tokens": 4, "ignore_eos": True}}
    options = ("--custom-jinja-template", str(template))
    async with (
        running(tiny_model, nats_server.url, "texts", *options),
        await connected(nats_server.url, "texts") as client,
    ):
        joined = await client.generate(messages=[{"role": "user", "content": parts}], **rest)
        text = await client.generate(messages=[{"role": "user", "content": "Hello\nworld!"}], **rest)
    assert (joined.usage, joined.choices) == (text.usage, text.choices)


async def test_64_at_once(client: WorkerClient) -> None:
    requests = [{**GREEDY, "token_ids": [*PROMPT, 20 + number]} for number in range(64)]
    together = await asyncio.gather(*(client.generate(**request) for request in requests))
    for number in (0, 31, 63):
        alone = await client.generate(**requests[number])
        assert together[number].choices == alone.choices


@pytest.mark.parametrize(
    ("request_", "field", "problem"),
    [
        ({}, "request", "exactly one of messages, prompt, token_ids, got none"),
        ({"prompt": "a", "token_ids": [1]}, "request", "got prompt and token_ids"),
        ({"token_ids": [10**9]}, "token_ids", "not in the vocabulary"),
        ({"token_ids": [10**12]}, "token_ids", "not in the vocabulary"),
        ({"token_ids": [-1]}, "token_ids", "not in the vocabulary"),
        ({"token_ids": 7}, "token_ids", "must be a list of token ids"),
        ({"token_ids": {"a": 1}}, "token_ids", "must be a list of token ids"),
        ({"prompt": 7}, "prompt", "must be a text"),
        ({"token_ids": [1], "stop_conditions": {"stop": "a"}}, "stop_conditions.stop", "must be a list of texts"),
        ({"token_ids": [1], "sampling_options": {"n": 0}}, "sampling_options.n", "from 1 to 128"),
        ({"token_ids": [1], "sampling_options": 3}, "sampling_options", "must be a mapping"),
        ({"token_ids": [1], "temperature": 3}, "temperature", "unknown field"),
        ({"prompt": "a\ud800"}, "prompt", "half of a surrogate pair in prompt"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content", "half of a surrogate pair"),
        ({"token_ids": [1], "stop_conditions": {"stop": ["\ud800"]}}, "stop_conditions.stop[0]", "half of a surrogate"),
        ({"token_ids": [1], "stop_conditions": {"stop": ["a", ""]}}, "stop_conditions.stop[1]", "that is not empty"),
        ({"messages": "hi"}, "messages", "must be a list of messages"),
        ({"messages": [{"role": "user", "content": "a " * 4000}]}, "messages", "prompt is too long: "),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0]", "serves text only"),
        ({"token_ids": [1], "model": "tiny_a_b"}, "model", "must be 'tiny/a.b', got 'tiny_a_b'"),
        ({"token_ids": [1], "model": ["tiny/a.b"]}, "model", "must be 'tiny/a.b', got a list of 1"),
        ({"messages": [{"role": "user", "content": [LONG_KEY]}]}, r"messages[0].content[0].kkk", "unknown in a part"),
        ({"token_ids": [1], "logits_processors": [{"name": "chioce"}]}, "logits_processors", "did you mean choice"),
    ],
)
async def test_what_is_refused_names_its_field(
    client: WorkerClient, request_: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        await client.generate(**request_)
    assert caught.value.code == 400
    assert (caught.value.field or "").startswith(field)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b'{"prompt": "a", "prompt": "b"}', b"\xff", b"[" * 100_000, b'{"a": NaN}']
)
async def test_malformed_messages_get_an_error_header(client: WorkerClient, data: bytes) -> None:
    reply = await client.connection.request(client.subjects.generate, data)
    assert reply.headers is not None
    assert reply.headers["Nats-Service-Error-Code"] == "400"
    assert json.loads(reply.data)["error"]["field"] == ("prompt" if data.startswith(b'{"prompt"') else "request")
    assert (await client.generate(**GREEDY)).choices[0].finish_reason == "length"


async def test_an_oversized_request_is_the_clients_error(client: WorkerClient) -> None:
    with pytest.raises(RequestError, match="larger than NATS takes, 1048576 bytes") as caught:
        await client.generate(prompt="a" * 2**20)
    with pytest.raises(RequestError, match="larger than NATS takes"):  # with its headers alone
        await client.generate(prompt="a" * (2**20 - 32))
    assert caught.value.code == 413
    with pytest.raises(MaxPayloadError):
        await client.connection.publish(client.subjects.generate, b"a" * 2**20 + b"a")
    assert (await client.generate(**GREEDY)).choices[0].finish_reason == "length"


async def test_bad_headers(client: WorkerClient) -> None:
    for headers in ({protocol.REQUEST_ID: "a.b"}, {protocol.WINDOW: "-1"}, {protocol.WINDOW: "9999999"}):
        data = protocol.encoded(GREEDY)
        reply = await client.connection.request(client.subjects.generate, data, headers=headers)
        assert json.loads(reply.data)["error"]["field"] in headers


async def test_cancellation_by_subject(client: WorkerClient, worker: NatsWorker) -> None:
    finish = None
    async for chunk in client.stream(
        request_id="long-1", token_ids=PROMPT, stop_conditions={"max_tokens": 2000, "ignore_eos": True}
    ):
        await client.cancel("long-1")
        finish = chunk.get("finish_reason")
    assert finish == "cancelled"
    await idle(worker)


async def test_a_cancellation_before_the_engine_has_it(
    client: WorkerClient, worker: NatsWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices but the first had no end, and the end no text."""
    assert worker._service is not None
    reading, read_on, parsed = asyncio.Event(), asyncio.Event(), DirectServer.parsed

    async def slowly(self: Any, message: Any) -> Any:
        reading.set()
        await read_on.wait()
        return await parsed(self, message)

    monkeypatch.setattr(DirectServer, "parsed", slowly)
    asked = {**GREEDY, "sampling_options": {"n": 2}}
    answering = asyncio.create_task(client.generate(request_id="early", retries=0, **asked))
    await reading.wait()
    await client.cancel("early")
    while "early" not in worker._service._answers._cancelled:
        await asyncio.sleep(0.005)
    read_on.set()
    answer = await answering
    assert [(each.finish_reason, each.text, each.token_ids) for each in answer.choices] == [("cancelled", "", [])] * 2
    assert answer.usage == {"prompt_tokens": len(PROMPT), "completion_tokens": 0}


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_cancellation_while_choices_begin(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch, num_choices: int
) -> None:
    """That of several choices was lost where it came before they had begun."""
    chunks = DirectServer.chunks

    def ended(self: DirectServer, request_id: str, request: Any, *more: Any) -> Any:
        asyncio.get_running_loop().call_soon(self.end, request_id, request)
        return chunks(self, request_id, request, *more)

    monkeypatch.setattr(DirectServer, "chunks", ended)
    answer = await client.generate(retries=0, **{**GREEDY, "sampling_options": {"n": num_choices}})
    assert [each.finish_reason for each in answer.choices] == ["cancelled"] * num_choices


async def test_an_id_is_free_again_behind_an_error(nats_server: NatsServer, tiny_model: Path) -> None:
    """A request that was tried again under its id was refused as one that is being served."""
    options = ("--max-num-seqs", "1", "--max-queue", "0")
    async with (
        running(tiny_model, nats_server.url, "full", *options) as worker,
        await connected(nats_server.url, "full") as client,
    ):
        stream = client.stream(token_ids=PROMPT, stop_conditions={"max_tokens": 2000, "ignore_eos": True})
        await anext(stream)
        with pytest.raises(RequestError) as caught:
            await client.generate(request_id="again", retries=1, **GREEDY)
        assert caught.value.code == 429
        await stream.aclose()
        await idle(worker)
        assert (await client.generate(request_id="again", **GREEDY)).choices[0].finish_reason == "length"


async def test_a_stream_that_is_closed_is_cancelled(client: WorkerClient, worker: NatsWorker) -> None:
    for choices in (1, 3):
        stream = client.stream(
            token_ids=PROMPT,
            stop_conditions={"max_tokens": 2000, "ignore_eos": True},
            sampling_options={"n": choices},
        )
        await anext(stream)
        await stream.aclose()
        await idle(worker)


async def test_closing_a_client_ends_what_is_under_way(nats_server: NatsServer, worker: NatsWorker) -> None:
    """Whoever waited for an answer waited for ever."""
    client = await connected(nats_server.url, "tiny/a.b")
    long = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 2000, "ignore_eos": True}}
    answering = asyncio.create_task(client.generate(**long))
    while not client._inbox.receivers:
        await asyncio.sleep(0.005)
    await client.close()
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(answering, 10)
    await idle(worker)


async def test_a_client_that_has_gone_frees_its_requests(
    nats_server: NatsServer, client: WorkerClient, worker: NatsWorker
) -> None:
    for window in (0, 8):  # one that acknowledges nothing, and one that stopped doing so
        gone = await connected(nats_server.url, "tiny/a.b", window=window)
        stream = gone.stream(token_ids=PROMPT, stop_conditions={"max_tokens": 2000, "ignore_eos": True})
        await anext(stream)
        gone._inbox.close()
        await gone.connection.close()
        await idle(worker)
        await stream.aclose()


async def test_a_slow_consumer_holds_up_nobody_and_loses_nothing(nats_server: NatsServer, client: WorkerClient) -> None:
    async with await connected(nats_server.url, "tiny/a.b", window=4) as slow:
        long = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 400, "ignore_eos": True}}
        stream = slow.stream(**long)
        read = await anext(stream)
        quick = await client.generate(**long)  # passes it
        (receiver,) = slow._inbox.receivers.values()
        assert receiver._queue.qsize() <= 4
        tokens = list(read["token_ids"])
        async for chunk in stream:
            tokens += chunk["token_ids"]
        assert tokens == quick.choices[0].token_ids


async def test_nobody_serves_another_version(nats_server: NatsServer, worker: NatsWorker) -> None:
    async with await connected(nats_server.url, "another") as client:
        with pytest.raises(NoWorkers, match=r"no worker listens at dlw\.another\.1\.generate$"):
            await client.generate(retries=0, **GREEDY)
        with pytest.raises(NoWorkers, match=r"no worker listens at dlw\.another\.1\.info$"):
            await client.info()


async def test_two_workers_share_the_queue_group_and_one_leaves(nats_server: NatsServer, tiny_model: Path) -> None:
    async with (
        running(tiny_model, nats_server.url, "shared") as first,
        running(tiny_model, nats_server.url, "shared") as second,
        await connected(nats_server.url, "shared") as client,
    ):
        await asyncio.gather(*(client.generate(**GREEDY) for _ in range(24)))
        await idle(first)
        await idle(second)
        counts = [
            each.server.metrics.registry.get_sample_value("dlw_requests_total", {"outcome": "length"})
            for each in (first, second)
        ]
        assert sum(count or 0 for count in counts) == 24
        assert all(counts)
        long = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 400, "ignore_eos": True}}
        under_way = []
        while not len(first.server.in_flight):  # the server draws a worker for each request
            under_way.append(asyncio.create_task(client.generate(retries=0, **long)))
            await asyncio.sleep(0.01)
        first.shut_down()  # drains: what it has finishes
        answers = [await each for each in under_way]
        assert len({tuple(each.choices[0].token_ids) for each in answers}) == 1
        assert (await client.generate(**GREEDY)).choices[0].finish_reason == "length"


async def test_the_launch_script_waits_for_its_own_model(
    nats_server: NatsServer, worker: NatsWorker, tiny_model: Path
) -> None:
    """A worker of another model is at the same server, where there is one already."""
    script = REPOSITORY / "launch" / "await_nats.py"
    arguments = ["--runtime", "nats", "--model-path", str(tiny_model), "--served-model-name", "mine"]
    waiting = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), *arguments),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "WORKER_NATS_URL": nats_server.url},
    )
    async with running(tiny_model, nats_server.url, "mine"):
        output, _ = await waiting.communicate()
    assert output == b"mine\n"


async def test_the_launch_script_has_the_rights_of_its_worker(tiny_model: Path, tmp_path: Path) -> None:
    """On a server that lets nobody else in, where the worker answers to some inboxes alone."""
    server = NatsServer(tmp_path / "server", config='authorization { token: "right" }\n')
    server.start()
    options = ["--nats-token", "right", "--nats-reply-prefixes", "_INBOX_app."]
    arguments = ["--runtime", "nats", "--model-path", str(tiny_model), "--nats-url", server.url, *options]
    try:
        async with running(tiny_model, server.url, tiny_model.name, *options):
            waiting = await asyncio.create_subprocess_exec(
                *(sys.executable, str(REPOSITORY / "launch" / "await_nats.py"), *arguments),
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            )
            output, _ = await waiting.communicate()
    finally:
        server.kill()
    assert output == f"{tiny_model.name}\n".encode()


async def test_the_program_of_the_page_runs(
    nats_server: NatsServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "nats.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    connect, options = WorkerClient.connect, ConnectionOptions(url=nats_server.url)
    monkeypatch.setattr(WorkerClient, "connect", partial(connect, options=options))
    names: dict[str, Any] = {}
    async with running(tiny_model, nats_server.url, "tiny-model"):
        await eval(compile(program, "nats.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    assert capsys.readouterr().out
    assert names["answer"]
