"""Durable batches over JetStream: OpenAI's format, exactly one result, and equal bytes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.kv import KeyValue
from nats_workers import connected, running
from ports import free_port
from servers import NatsServer
from test_nats_faults import until_served, worker_process

from worker.engines.weights import ChangesWeights
from worker.errors import ConfigurationError
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.command import main
from worker.runtimes.nats.batch.consumer import BatchConsumer
from worker.runtimes.nats.batch.store import BatchStore, MalformedLine
from worker.runtimes.nats.connection import ConnectionOptions, connect
from worker.runtimes.nats.protocol import Subjects

QUICK = ("--batch", "--batch-ack-wait-s", "1.5")


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def mixed_lines(number: int, model: str = "tiny") -> list[str]:
    """Greedy and sampled, chats and completions, one and several choices, some that are refused."""
    lines = []
    for index in range(number):
        body: dict[str, Any] = {"model": model, "max_tokens": 4 + index % 13, "ignore_eos": True}
        if index % 3:
            body["temperature"] = 0.9
        if index % 10 == 7:
            body["n"] = 2
        if index % 10 == 9:
            body["top_p"] = 7
        if index % 2:
            messages = [{"role": "user", "content": f"Say {index}"}]
            lines.append(line(f"chat {index}", "/v1/chat/completions", messages=messages, **body))
        else:
            lines.append(line(f"text-{index}", prompt=[9, 30, 41 + index % 50], **body))
    return lines


@asynccontextmanager
async def connection(server: NatsServer) -> AsyncIterator[Client]:
    client = await connect(ConnectionOptions(url=server.url), "test")
    try:
        yield client
    finally:
        await client.close()


async def completed(store: BatchStore, batch: str) -> list[dict[str, Any]]:
    """The results, once there are all of them."""
    while (await store.status(batch)).state != "completed":
        await asyncio.sleep(0.05)
    return [each async for each in store.results(batch)]


async def emptied(client: Client, stream: str) -> None:
    """Until the server has taken every acknowledgement."""
    while (await client.jetstream().stream_info(stream)).state.messages:
        await asyncio.sleep(0.02)


async def test_a_batch_and_its_re_run_give_the_same_bytes(nats_server: NatsServer, tiny_model: Path) -> None:
    lines = mixed_lines(30)
    async with connection(nats_server) as client:
        store = BatchStore(client)
        first = await store.submit(lines, "same")  # before there is a worker
        async with running(tiny_model, nats_server.url, "same", *QUICK):
            results = await completed(store, first.id)
        async with running(tiny_model, nats_server.url, "same", *QUICK, "--max-num-seqs", "3"):
            again = await store.submit(list(reversed(lines)), "same", priority="low")
            others = await completed(store, again.id)
    assert [each["custom_id"] for each in results] == [json.loads(each)["custom_id"] for each in lines]
    assert json.dumps(results) == json.dumps(list(reversed(others)))
    refused = results[9]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "body.top_p")
    chat = results[1]["response"]["body"]
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["completion_tokens"] == 5
    assert len(results[7]["response"]["body"]["choices"]) == 2


async def test_results_are_whole_if_the_mark_of_their_end_comes_first(
    nats_server: NatsServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library puts it there if the server has sent all and the client has read none."""
    watch_all = KeyValue.watchall

    async def hurried(bucket: KeyValue, **options: Any) -> KeyValue.KeyWatcher:
        watcher = await watch_all(bucket, **options)
        late, watcher._updates = watcher._updates, asyncio.Queue()
        watcher._updates.put_nowait(None)
        while not late.empty():
            watcher._updates.put_nowait(late.get_nowait())
        return watcher

    lines = mixed_lines(8)
    async with connection(nats_server) as client, running(tiny_model, nats_server.url, "hurried", *QUICK):
        store = BatchStore(client)
        batch = await store.submit(lines, "hurried")
        expected = await completed(store, batch.id)
        monkeypatch.setattr(KeyValue, "watchall", hurried)
        assert [each async for each in store.results(batch.id)] == expected
    assert len(expected) == len(lines)


async def test_submitting_again_under_the_same_id_adds_nothing(nats_server: NatsServer, tiny_model: Path) -> None:
    lines = mixed_lines(8)
    async with connection(nats_server) as client:
        store = BatchStore(client)
        for some in (lines[:3], lines):
            record = await store.submit(some, "twice", batch="batch_twice")
        stream = layout.stream_name(record.subjects, "normal")
        assert (await client.jetstream().stream_info(stream)).state.messages == 8
        async with running(tiny_model, nats_server.url, "twice", *QUICK):
            assert len(await completed(store, record.id)) == 8
        await emptied(client, stream)


async def test_large_bodies_and_answers_go_into_the_object_store(nats_server: NatsServer, tiny_model: Path) -> None:
    large = line("large", prompt=[9, 30], max_tokens=3, ignore_eos=True, user="u" * 1_500_000)
    async with connection(nats_server) as client:
        store = BatchStore(client)
        async with running(tiny_model, nats_server.url, "large", *QUICK):
            record = await store.submit([large], "large")
            (result,) = await completed(store, record.id)
    assert result["response"]["status_code"] == 200


async def test_fields_are_honoured_or_refused(nats_server: NatsServer, tiny_model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
    url = "/v1/chat/completions"
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": [1]}}}
    lines = [
        line("schema", url, **chat, response_format=wanted),
        line("bias", prompt=[9], max_tokens=3, logit_bias={"30": 100}, ignore_eos=True, logprobs=1),
        line("unknown", url, **chat, temprature=1),
        line("stream", url, **chat, stream=True),
        line("nothing", url),
        line("tools", url, **chat, tools=[{"type": "function"}]),
        line("logprobs", url, **{**chat, "max_tokens": 2}, logprobs=True, top_logprobs=2, ignore_eos=True),
        line("forced", url, **chat, tool_choice="required"),
        line("prompts", prompt=["a", "b"]),
        line("beyond", prompt=[9], logit_bias={"99999999": 1}),
        line("range", url, **chat, top_p=7),
    ]
    async with connection(nats_server) as client, running(tiny_model, nats_server.url, "fields", *QUICK):
        store = BatchStore(client)
        record = await store.submit(lines, "fields")
        results = {each["custom_id"]: each["response"] for each in await completed(store, record.id)}
        status = await store.status(record.id, count_failed=True)
    assert json.loads(results["schema"]["body"]["choices"][0]["message"]["content"]) == [1]
    assert len(set(results["bias"]["body"]["choices"][0]["logprobs"]["tokens"])) == 1
    assert [len(each["top_logprobs"]) for each in results["logprobs"]["body"]["choices"][0]["logprobs"]["content"]] == [
        2,
        2,
    ]
    fields = {key: each["body"]["error"]["param"] for key, each in results.items() if each["status_code"] == 400}
    assert fields == {
        "unknown": "body.temprature",
        "stream": "body.stream",
        "nothing": "body.messages",
        "tools": "body.tools",
        "forced": "body.tool_choice",
        "prompts": "body.prompt",
        "beyond": "body.logit_bias",
        "range": "body.top_p",
    }
    assert status.num_failed == 8


async def test_deadlines_and_cancellation(nats_server: NatsServer, tiny_model: Path) -> None:
    long = [line(f"long-{index}", prompt=[9, 30], max_tokens=1900, ignore_eos=True) for index in range(40)]
    async with connection(nats_server) as client:
        store = BatchStore(client)
        late = await store.submit(mixed_lines(3), "ends", deadline_s=time.time() - 1)
        async with running(tiny_model, nats_server.url, "ends", *QUICK) as worker:
            results = await completed(store, late.id)
            assert {each["error"]["code"] for each in results} == {"batch_expired"}
            record = await store.submit(long, "ends")
            while not len(worker.server.in_flight):
                await asyncio.sleep(0.01)
            await store.cancel(record.id)
            while len(worker.server.in_flight):
                await asyncio.sleep(0.01)
            assert (await store.status(record.id)).state == "cancelled"
            stream = layout.stream_name(record.subjects, "normal")
            await emptied(client, stream)


async def test_a_cancellation_during_a_submission_stands(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what is queued behind it stays in the queue."""
    async with connection(nats_server) as client:
        store, other = BatchStore(client), BatchStore(client)
        queue = store._queue

        async def cancelled(record: layout.BatchRecord, index: int, *request: Any) -> None:
            if index == number:
                await other.cancel(record.id)
            await queue(record, index, *request)

        monkeypatch.setattr(store, "_queue", cancelled)
        for number in (0, 63, 64, 149):
            batch = f"cancelled-at-{number}"
            with pytest.raises(ConfigurationError, match="was cancelled; submit under another id"):
                await store.submit(mixed_lines(150), "unserved", batch=batch)
            assert (await store.status(batch)).state == "cancelled"
        name = layout.stream_name(Subjects("unserved", "1"), "normal")
        assert (await client.jetstream().stream_info(name)).state.messages == 0


async def test_no_result_is_lost_where_the_file_was_changed(nats_server: NatsServer, tiny_model: Path) -> None:
    """It has other lines before those that were queued: two requests have one place."""
    lines = mixed_lines(6)
    async with connection(nats_server) as client, running(tiny_model, nats_server.url, "changed", *QUICK):
        store = BatchStore(client)
        await store.submit(lines[:3], "changed", batch="changed")
        await store.submit(lines[3:] + lines[:3], "changed", batch="changed")
        results = await completed(store, "changed")
    assert sorted(each["custom_id"] for each in results) == sorted(json.loads(each)["custom_id"] for each in lines)


async def test_online_requests_go_first(nats_server: NatsServer, tiny_model: Path) -> None:
    """They get the slots of batches, whose requests are answered later, with the same bytes."""
    long = [line(f"long-{index}", prompt=[9, 30 + index], max_tokens=600, ignore_eos=True) for index in range(4)]
    online = {"token_ids": [9, 41], "stop_conditions": {"max_tokens": 30, "ignore_eos": True}}
    argv = (*QUICK, "--max-num-seqs", "2")
    async with (
        connection(nats_server) as client,
        running(tiny_model, nats_server.url, "busy", *argv) as worker,
        await connected(nats_server.url, "busy") as asking,
    ):
        store = BatchStore(client)
        record = await store.submit(long, "busy")
        while not len(worker.server.in_flight):
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(asking.generate(**online) for _ in range(4)))  # type: ignore[arg-type]
        assert (await store.status(record.id)).num_answered < 4
        assert len({tuple(each.choices[0].token_ids) for each in answers}) == 1
        results = await completed(store, record.id)
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 600 for each in results)


async def test_a_drain_gives_requests_back_without_counting_an_attempt(
    nats_server: NatsServer, tiny_model: Path
) -> None:
    long = [line(f"long-{index}", prompt=[9, 30 + index], max_tokens=400, ignore_eos=True) for index in range(3)]
    argv = ("--batch", "--batch-ack-wait-s", "60", "--batch-max-deliver", "1", "--drain-timeout-s", "0")
    async with connection(nats_server) as client:
        store = BatchStore(client)
        record = await store.submit(long, "drains")
        for _ in range(2):
            async with running(tiny_model, nats_server.url, "drains", *argv) as worker:
                while not worker.server.engine.num_unfinished():
                    await asyncio.sleep(0.01)
        async with running(tiny_model, nats_server.url, "drains", *argv):
            results = await completed(store, record.id)
    assert [each["response"]["body"]["usage"]["completion_tokens"] for each in results] == [400] * 3


async def test_what_a_trainer_aborts_is_answered_later(
    nats_server: NatsServer, tiny_model: Path, tmp_path: Path
) -> None:
    """A pause that aborts ends all in flight: a batch has no client that could go on."""
    (tmp_path / "keys").write_text("key\n")
    port = ("--engine-port", str(free_port()), "--engine-key-file", str(tmp_path / "keys"))
    argv = (*QUICK, *port, "--batch-max-deliver", "1")
    async with connection(nats_server) as client, running(tiny_model, nats_server.url, "aborts", *argv) as worker:
        assert isinstance(worker.server.engine, ChangesWeights)
        weights = worker.server.engine.weights
        assert weights is not None
        store = BatchStore(client)
        record = await store.submit([line("a", prompt=[9, 30], max_tokens=800, ignore_eos=True)], "aborts")
        while not worker.server.engine.num_unfinished():
            await asyncio.sleep(0.001)
        await weights.pause("abort")
        await weights.resume()
        (result,) = await completed(store, record.id)
        aborted = worker.server.metrics.registry.get_sample_value("dlw_requests_total", {"outcome": "failed"})
    assert result["response"]["body"]["usage"]["completion_tokens"] == 800
    assert aborted == 1


async def test_a_request_that_comes_again_while_it_is_answered(
    nats_server: NatsServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's signs of life are lost: it is delivered again and again, and answered once."""

    async def forget(consumer: BatchConsumer) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(BatchConsumer, "_hold_all", forget)
    argv = ("--batch", "--batch-ack-wait-s", "0.1", "--batch-max-deliver", "1")
    async with connection(nats_server) as client, running(tiny_model, nats_server.url, "again", *argv) as worker:
        store = BatchStore(client)
        record = await store.submit([line("a", prompt=[9, 30], max_tokens=1000, ignore_eos=True)], "again")
        (result,) = await completed(store, record.id)
        served = worker.server.metrics.registry.get_sample_value("dlw_requests_total", {"outcome": "length"})
        info = await client.jetstream().consumer_info(layout.stream_name(record.subjects, "normal"), layout.CONSUMER)
    assert result["response"]["body"]["usage"]["completion_tokens"] == 1000
    assert served == 1
    assert info.delivered is not None
    assert info.delivered.consumer_seq > 1


async def test_what_no_worker_can_answer_becomes_a_dead_letter(
    nats_server: NatsServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtimes.nats.batch.answerer.FAILURE_DELAY_S", 0.05)
    async with connection(nats_server) as client:
        store, js = BatchStore(client), client.jetstream()
        argv = (*QUICK, "--batch-max-deliver", "2")
        async with running(tiny_model, nats_server.url, "poison", *argv) as worker:
            monkeypatch.setattr(worker.server, "serve", None)  # so that every request raises
            record = await store.submit([line("a", prompt=[9], max_tokens=2)], "poison")
            (result,) = await completed(store, record.id)
            subject = layout.queue_subject(Subjects("poison", "1"), "normal", "stray")
            await js.publish(subject, b"no request")
            stream = layout.stream_name(record.subjects, "normal")
            await emptied(client, stream)
        assert result["error"] == {"code": "dead_letter", "message": "2 workers have not answered it"}
        reasons = []
        for sequence in range(1, (await js.stream_info(layout.DEAD_LETTERS)).state.last_seq + 1):
            letter = await js.get_msg(layout.DEAD_LETTERS, sequence)
            reasons.append((letter.headers or {})["Dlw-Reason"])
        assert reasons[-2] == "2 workers have not answered it"
        assert reasons[-1].startswith("malformed")


def test_malformed_files(tmp_path: Path, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*lines: str) -> str:
        (tmp_path / "file").write_text("\n".join(lines))
        assert main(["submit", str(tmp_path / "file"), "--model", "m", "--nats-url", nats_server.url]) == 2
        return capsys.readouterr().err.removeprefix("dlw-batch: error: ").strip()

    good = line("a", prompt="b")
    assert refused(good, good) == "line 2: custom_id 'a' occurs twice"
    assert refused(good, "{").startswith("line 2: the message is not JSON")
    assert refused(line("a", "/v1/embeddings")) == "line 1: url must be one of /v1/chat/completions, /v1/completions"
    assert refused(json.dumps({"custom_id": 3})) == "line 1: custom_id must be a text of 1 to 512 characters"
    assert refused(good, r'{"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "\ud800"}}') == (
        "line 2: the message has half of a surrogate pair in body.prompt"
    )
    assert refused("[" * 100_000) == "line 1: the message is nested too deep"
    assert refused(good, '{"a": ' * 200 + "1" + "}" * 200) == "line 2: the message is nested more than 128 deep"
    mixed = [line("a", model="m", prompt="b"), "", line("b", prompt="c"), line("c", model="n", prompt="d")]
    (tmp_path / "mixed").write_text("\n".join(mixed))
    assert main(["submit", str(tmp_path / "mixed"), "--nats-url", nats_server.url]) == 2
    assert "line 4: the model is 'n', and 'm' before it; submit a file for each" in capsys.readouterr().err
    (tmp_path / "latin").write_bytes(b"\n" + '{"custom_id": "é"}'.encode("latin-1"))
    assert main(["submit", str(tmp_path / "latin"), "--nats-url", nats_server.url]) == 2
    assert "latin: line 2: is not UTF-8" in capsys.readouterr().err
    assert refused("") == "the file has no requests"
    assert main(["status", "batch_none", "--nats-url", nats_server.url]) == 2
    assert "there is no batch 'batch_none'" in capsys.readouterr().err
    assert issubclass(MalformedLine, ConfigurationError)


async def test_the_command(
    nats_server: NatsServer, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"model": "command", "prompt": "a\u2028b\u0085c", "max_tokens": 1}  # ends of lines to Python, not to JSON
    lines = [
        *mixed_lines(3, model="command"),
        json.dumps({"custom_id": "o\u2028", "url": "/v1/completions", "body": odd}),
    ]
    lines[-1] = lines[-1].replace(r"\u2028", "\u2028").replace(r"\u0085", "\u0085").replace(", ", ",\r ")
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    url = ["--nats-url", nats_server.url]
    async with running(tiny_model, nats_server.url, "command", *QUICK):
        assert await asyncio.to_thread(main, ["submit", str(tmp_path / "in.jsonl"), *url]) == 0
        batch = capsys.readouterr().out.strip()
        assert await asyncio.to_thread(main, ["status", batch, "--watch", *url]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    assert await asyncio.to_thread(main, ["results", batch, "-o", str(tmp_path / "out.jsonl"), *url]) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["cancel", batch, *url]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"  # nothing was left to cancel


async def killed_at_random(
    server: NatsServer, model: Path, tmp_path: Path, lines: list[str], worker_kills: int, server_kills: int
) -> list[dict[str, Any]]:
    """The results of a batch whose workers and server are killed while it is answered."""
    log, rng = tmp_path / "log", random.Random(7)
    workers = [worker_process(model, server.url, log, *QUICK) for _ in range(2 if worker_kills > 1 else 1)]
    try:
        async with connection(server) as client, await connected(server.url, "tiny") as asking:
            await until_served(asking, workers[0], log)
            store = BatchStore(client)
            record = await store.submit(lines, "tiny")
            kills = ["worker"] * worker_kills + ["server"] * server_kills
            for number, what in enumerate(kills, 1):
                while (await answered(store, record.id)) < number * len(lines) // (len(kills) + 2):
                    await asyncio.sleep(0.01)
                if what == "server":
                    server.kill()
                    await asyncio.to_thread(server.start)
                else:
                    chosen = rng.randrange(len(workers))
                    workers[chosen].kill()
                    workers[chosen].wait(30)
                    workers[chosen] = worker_process(model, server.url, log, *QUICK)
            while (await answered(store, record.id)) < len(lines):
                assert any(each.poll() is None for each in workers), log.read_text()
                await asyncio.sleep(0.05)
            return [each async for each in store.results(record.id)]
    finally:
        for each in workers:
            each.kill()
            each.wait(30)


async def answered(store: BatchStore, batch: str) -> int:
    """Answers so far; none while the server is away."""
    try:
        return (await store.status(batch)).num_answered
    except Exception:  # whatever a server that is being killed makes of a request
        return -1


async def undisturbed(server: NatsServer, model: Path, lines: list[str]) -> list[dict[str, Any]]:
    async with connection(server) as client, running(model, server.url, "calm", *QUICK):
        store = BatchStore(client)
        return await completed(store, (await store.submit(lines, "calm")).id)


def check_once_and_equal(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    ids = [each["custom_id"] for each in results]
    assert len(ids) == len(set(ids))
    assert json.dumps(results) == json.dumps(expected)


async def test_a_worker_and_the_server_killed(
    nats_server: NatsServer, own_server: NatsServer, tiny_model: Path, tmp_path: Path
) -> None:
    lines = mixed_lines(40)
    results = await killed_at_random(own_server, tiny_model, tmp_path, lines, worker_kills=1, server_kills=1)
    check_once_and_equal(results, await undisturbed(nats_server, tiny_model, lines))


@pytest.mark.campaign
@pytest.mark.timeout(1200)
async def test_500_with_workers_and_server_killed(
    nats_server: NatsServer, own_server: NatsServer, tiny_model: Path, tmp_path: Path
) -> None:
    lines = mixed_lines(500)
    results = await killed_at_random(own_server, tiny_model, tmp_path, lines, worker_kills=6, server_kills=4)
    check_once_and_equal(results, await undisturbed(nats_server, tiny_model, lines))
