"""Files and batches through the front door: stock clients, hostile ones, a process that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from batch_services import WAIT_S, form, jsonl, line
from openai.types import Batch
from ports import free_port
from test_frontdoor_server import Frontend, House, error_of, get, house, post, say_ok

from worker.frontdoor import routes
from worker.frontdoor.batch_lines import LineAnswers
from worker.frontdoor.batches import runner
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.exchange import Exchange
from worker.frontdoor.process import make_batches
from worker.frontdoor.routes import Routes, handled

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TYPE = "Content-Type: multipart/form-data; boundary=xyz"


class EchoFrontend:
    """Says each message back; a script of `Frontend`.

    Attributes:
        frontend: The frontend that it is the script of.
        asked: How often each message came.
        delay_s: Seconds that an answer takes.
    """

    def __init__(self) -> None:
        self.frontend = Frontend(self)
        self.asked: Counter[str] = Counter()
        self.labels: set[bytes] = set()
        self.delay_s = 0.0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = self.frontend.requests[-1]
        head, _, body = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models "):
            content: Any = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        else:
            fields = json.loads(body)
            text = fields["prompt"] if "prompt" in fields else fields["messages"][-1]["content"]
            self.asked[text] += 1
            self.labels |= set(re.findall(rb"x-dynamo-meta-client: (\w+)", head))
            await asyncio.sleep(self.delay_s)
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            content = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        data = json.dumps(content).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        await writer.drain()


@contextlib.asynccontextmanager
async def batch_house(directory: Path, echo: EchoFrontend, **options: Any) -> AsyncIterator[House]:
    await echo.frontend.start()
    at = House([echo.frontend], batch_dir=str(directory / "batches"), **options)
    at.door.batches = make_batches(at.door)
    assert at.door.batches is not None
    await at.start()
    await at.door.batches.start()
    try:
        yield at
    finally:
        await at.stop()
        await at.door.batches.close()
        assert at.door.batches.uploads.room.num_bytes == 0
        assert list((directory / "batches/files/incoming").iterdir()) == []


def client_of(port: int, name: str = "a", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        timeout=WAIT_S,
        default_headers={"x-client": name},
        **{"max_retries": 0} | options,
    )


async def submitted(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def finished(client: openai.AsyncOpenAI, batch: Batch, poll_s: float = 0.02) -> Batch:
    async with asyncio.timeout(WAIT_S):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(poll_s)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def output_of(client: openai.AsyncOpenAI, batch: Batch) -> dict[str, Any]:
    """The answers by id; every line has one."""
    assert batch.output_file_id is not None
    lines = (await client.files.content(batch.output_file_id)).text.splitlines()
    found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def uploading(body: bytes, *headers: str, content_type: str = TYPE) -> bytes:
    lines = ["POST /v1/files HTTP/1.1", "Host: localhost", content_type, *headers, "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def test_a_stock_client_submits_polls_and_fetches(tmp_path: Path) -> None:
    echo = EchoFrontend()
    async with batch_house(tmp_path, echo) as at, client_of(at.port) as client:
        content = jsonl(line(f"r{n}") for n in range(30))
        file = await client.files.create(
            file=("../in.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.filename, file.bytes, file.purpose) == ("../in.jsonl", len(content), "batch")
        assert file.expires_at == file.created_at + 3600
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == content
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "night"}
        )
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "night"})
        done = await finished(client, batch)
        assert done.request_counts is not None
        assert (done.status, done.request_counts.total, done.request_counts.completed) == ("completed", 30, 30)
        answers = await output_of(client, done)
        assert {key: each["choices"][0]["message"]["content"] for key, each in answers.items()} == {
            f"r{n}": f"r{n}" for n in range(30)
        }
        online = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "r7"}])
        assert online.model_dump(exclude_unset=True) == answers["r7"]
        assert len(echo.labels) == 1  # the batch takes turns as its client does
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


async def test_checks_are_those_of_clients(tmp_path: Path) -> None:
    echo = EchoFrontend()
    async with batch_house(tmp_path, echo) as at, client_of(at.port) as client:
        body = {"model": "m", "prompt": "a"}
        lines = [
            line("good", url=COMPLETIONS, body=body),
            line("bad", url=COMPLETIONS, body=body | {"suffix": "b"}),
            line("large", url=COMPLETIONS, body=body | {"prompt": "x" * 8 * 2**20}),
        ]
        done = await finished(client, await submitted(client, jsonl(lines), COMPLETIONS))
        assert set(await output_of(client, done)) == {"good"}
        assert done.error_file_id is not None
        errors = (await client.files.content(done.error_file_id)).text.splitlines()
        found = {each["custom_id"]: each["response"] for each in map(json.loads, errors)}
        assert (found["bad"]["status_code"], found["bad"]["body"]["error"]["param"]) == (400, "suffix")
        assert found["large"]["status_code"] == 413


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with batch_house(tmp_path, EchoFrontend()) as at, client_of(at.port) as client:
        batches = [await submitted(client, jsonl([line(f"r{n}")])) for n in range(5)]
        for batch in batches:
            await finished(client, batch)
        assert [each.id async for each in client.batches.list(limit=2)] == [each.id for each in batches[::-1]]
        files = [each.input_file_id for each in batches]
        found = [each.id async for each in client.files.list(limit=2, order="asc", purpose="batch")]
        assert found == files
        assert len([each async for each in client.files.list()]) == 10
        for query in ("limit=0", "limit=x", "order=up", "nonsense=1", "limit=1&limit=2", "after=file-x", "purpose=x"):
            assert error_of(await at.ask(get(f"/v1/files?{query}")))[0] == 400


async def test_clients_do_not_see_each_other(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        at = await stack.enter_async_context(batch_house(tmp_path, EchoFrontend(), client_header="x-client"))
        own, other = [await stack.enter_async_context(client_of(at.port, name)) for name in "ab"]
        batch = await finished(own, await submitted(own, jsonl([line("r")])))
        assert batch.output_file_id is not None
        assert (await other.files.list()).data == []
        assert (await other.batches.list()).data == []
        for asked in (
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
        assert len((await own.files.list()).data) == 2


async def test_twenty_clients_at_once(tmp_path: Path) -> None:
    echo = EchoFrontend()
    async with batch_house(tmp_path, echo, client_header="x-client") as at:

        async def one(name: str) -> None:
            async with client_of(at.port, name) as client:
                content = jsonl(line(f"{name}-{n}") for n in range(20))
                done = await finished(client, await submitted(client, content), poll_s=0.5)
                answers = await output_of(client, done)
                assert set(answers) == {f"{name}-{n}" for n in range(20)}
                assert len((await client.files.list()).data) == 2

        await asyncio.gather(*(one(f"client{n}") for n in range(20)))
    assert set(echo.asked.values()) == {1}
    assert len(echo.labels) == 20


async def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    echo = EchoFrontend()
    echo.delay_s = 0.05
    async with batch_house(tmp_path, echo) as at, client_of(at.port) as client:
        batch = await submitted(client, jsonl(line(f"r{n}") for n in range(500)))
        while not echo.asked:
            await asyncio.sleep(0.01)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        done = await finished(client, batch)
        assert done.status == "cancelled"
        num_asked = len(echo.asked)
        await asyncio.sleep(0.2)
        assert len(echo.asked) == num_asked < 500
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("request_", "status", "problem"),
    [
        (uploading(b"x", content_type="Content-Type: application/json"), 415, "multipart/form-data"),
        (uploading(b"x", content_type="X: y"), 415, "multipart/form-data"),
        (uploading(b"x", content_type="Content-Type: multipart/form-data"), 400, "no boundary"),
        (uploading(b""), 400, "does not begin"),
        (uploading(form(("purpose", b"batch"), ("file", b"x")), content_type=f"{TYPE}x"), 400, "does not begin"),
        (uploading(form(("file", b"x"))), 400, "purpose: must be batch"),
        (uploading(form(("purpose", b"assistants"), ("file", b"x"))), 400, "purpose: must be batch"),
        (uploading(form(("purpose", b"batch"))), 400, "file: is missing"),
        (uploading(form(("purpose", b"batch"), ("file", b"x"), ("file", b"y"))), 400, "file: occurs twice"),
        (uploading(form(("purpose", b"batch"), ("file", b"x"), filename="x" * 300)), 400, "file.filename"),
        (uploading(form(("purpose", b"batch"), ("file", b"x"), filename="x" * 20_000)), 400, "bytes of them"),
        (uploading(form(("purpose", b"batch"), ("file", b"x" * (2**20 + 1)))), 413, "file: has more than"),
        (uploading(form(("purpose", b"batch"), ("file", b"x" * (3 * 2**20)))), 413, "the body has more than"),
        (uploading(b"x", "X-Huge: " + "x" * 70_000), 431, "head"),
        (post(b"{}", path="/v1/batches"), 400, "input_file_id"),
        (post(b"[]", path="/v1/batches"), 400, "object"),
        (post(b"{}", path="/v1/batches?x=1"), 400, "x: no parameter"),
        (post(b'{"x": 1}', path="/v1/batches/batch_1/cancel"), 400, "no fields"),
        (get("/v1/batches/batch_1"), 404, "no batch"),
        (get("/v1/files/../../etc/passwd"), 404, "not served"),
        (get("/v1/files/%2e%2e%2fbatches.sqlite/content"), 404, "not served"),
        (get("/v1/files/incoming/content"), 404, "no file"),
    ],
)
async def test_a_bad_request_is_refused_alone(tmp_path: Path, request_: bytes, status: int, problem: str) -> None:
    async with batch_house(tmp_path, EchoFrontend(), batch_file_limit_mib=1) as at:
        found, error = error_of(await at.ask(request_))
        assert (found, problem in error["message"]) == (status, True), error
        async with client_of(at.port) as client:
            await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")


async def test_uploads_in_chunks_and_larger_than_bodies(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(9 * 2**20)
    body = form(("purpose", b"batch"), ("file", content))
    async with batch_house(tmp_path, EchoFrontend(), body_limit_mib=1) as at, client_of(at.port) as client:
        head = post(b"", path="/v1/files").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        head = head.replace(b"Content-Type: application/json", TYPE.encode())
        size = 3000  # more chunks than other bodies may have in a MiB
        chunks = [body[n : n + size] for n in range(0, len(body), size)]
        answer = await at.ask(head + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n")
        file_id = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
        assert (await client.files.content(file_id)).content == content
        whole = await client.files.create(file=("in", content), purpose="batch")
        assert (await client.files.content(whole.id)).content == content


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with batch_house(tmp_path, EchoFrontend()) as at:
        assert at.door.batches is not None
        incoming = tmp_path / "batches/files/incoming"
        whole = uploading(form(("purpose", b"batch"), ("file", b"x" * 10**6)))
        _, writer = await at.connect()
        writer.write(whole[: len(whole) // 2])
        await writer.drain()
        async with asyncio.timeout(WAIT_S):
            while not list(incoming.iterdir()):
                await asyncio.sleep(0.01)
            writer.close()
            while list(incoming.iterdir()):
                await asyncio.sleep(0.01)


async def test_all_files_together_have_a_limit(tmp_path: Path) -> None:
    options = {"batch_file_limit_mib": 1, "batch_storage_mib": 2}
    async with batch_house(tmp_path, EchoFrontend(), **options) as at, client_of(at.port) as client:
        content = b"x" * 1_000_000
        first = await client.files.create(file=("in", content), purpose="batch")
        await client.files.create(file=("in", content), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="delete files") as refused:
            await client.files.create(file=("in", content), purpose="batch")
        assert refused.value.status_code == 413
        await client.files.delete(first.id)
        await client.files.create(file=("in", content), purpose="batch")


async def test_rubbish_fails_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "AWAY_S", 0.0)
    async with batch_house(tmp_path, EchoFrontend()) as at, client_of(at.port) as client:
        for content, code in (
            (random.Random(2).randbytes(200_000), "invalid_json_line"),
            (b"", "empty_file"),
            (jsonl([line("a"), line("a")]), "duplicate_custom_id"),
            (jsonl([line("a", model="other")]), "model_not_found"),
            (b"{}\n" * 100_000, "too_many_requests"),
        ):
            done = await finished(client, await submitted(client, content))
            assert done.status == "failed"
            assert done.errors is not None
            assert done.errors.data
            assert done.errors.data[0].code == code


async def test_a_line_may_be_for_a_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers, one that refuses, and one that fails in the middle of a stream."""
    path = "/v1/things"

    async def handler(exchange: Exchange) -> None:
        fields = exchange.fields()
        if fields["do"] == "refuse":
            raise FieldRefused("do", "must not")
        if fields["do"] == "answer":
            await exchange.answer(200, {"owner": exchange.owner, "id": exchange.request_id})
            return
        await exchange.begin_events()
        await exchange.send(b"data: 1\n\n")
        raise Refused(503, "gone")

    monkeypatch.setattr(routes, "ROUTES", (*routes.ROUTES, handled(path, ("POST",), "Things.")))
    async with house(say_ok) as at:
        at.door.routes = Routes()
        answers = LineAnswers(at.door, {("POST", path): handler}, {})
        status, body = await answers.ask("owner-a", path, b'{"do": "answer"}', "id-1")
        assert (status, json.loads(body)) == (200, {"owner": "owner-a", "id": "id-1"})
        status, body = await answers.ask("owner-a", path, b'{"do": "refuse"}', "id-1")
        assert (status, json.loads(body)["error"]["param"]) == (400, "do")
        assert (await answers.ask("owner-a", path, b'{"do": "stream"}', "id-1"))[0] == 502


async def test_a_frontend_that_is_away_is_an_answer_to_try_again() -> None:
    async with house(say_ok) as at:
        await at.frontends[0].stop()
        answers = LineAnswers(at.door, {}, {})
        assert await answers.models() == frozenset()
        assert (await answers.ask("owner-a", COMPLETIONS, b'{"model": "m", "prompt": "a"}', "id-1"))[0] == 503


async def test_a_line_on_which_the_front_door_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the answer that a client would have, and its batch the other ones."""

    def failing(*_: Any) -> None:
        raise AttributeError("a bug")

    async with house(say_ok) as at:
        monkeypatch.setattr(at.door, "rewrite", failing)
        body = b'{"model": "m", "prompt": "a"}'
        online, _ = error_of(await at.ask(post(body, "X-Request-Id: mine", path=COMPLETIONS)))
        status, found = await LineAnswers(at.door, {}, {}).ask("owner-a", COMPLETIONS, body, "id-1")
        assert (online, status, json.loads(found)["error"]["message"]) == (500, 500, "internal error")
        errors = [one.message for one in caplog.records if one.levelname == "ERROR"]
        assert errors == ["request mine failed", "request id-1 of a batch failed"]


async def test_switched_off_they_say_how_to_have_them() -> None:
    async with house(say_ok) as at:
        for request in (
            uploading(form(("purpose", b"batch"), ("file", b"x" * 10**6))),
            get("/v1/files"),
            get("/v1/batches/batch_1"),
            post(b"{}", path="/v1/batches"),
        ):
            status, error = error_of(await at.ask(request))
            assert (status, "--batch-dir" in error["message"]) == (404, True)


@contextlib.asynccontextmanager
async def front_door_process(port: int, upstream: int, directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """``python -m worker.frontdoor`` once it answers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker.frontdoor", "--port", str(port)),
        *("--upstream", f"http://127.0.0.1:{upstream}", "--batch-dir", str(directory)),
    )
    try:
        async with client_of(port) as client, asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(openai.APIConnectionError):
                    await client.batches.list()
                    break
                assert process.returncode is None
                await asyncio.sleep(0.1)
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


@pytest.mark.slow
async def test_a_killed_process_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Kills it by its pid at any point of two batches, and starts it again."""
    echo, port, chance = EchoFrontend(), free_port(), random.Random(time.time_ns())
    echo.delay_s = 0.02
    await echo.frontend.start()
    batches: list[Batch] = []
    num_kills, num_lines = 2, 200
    for _ in range(num_kills):
        async with front_door_process(port, echo.frontend.port, tmp_path) as process, client_of(port) as client:
            if not batches:
                for name in "ab":
                    batches.append(await submitted(client, jsonl(line(f"{name}{n}") for n in range(num_lines))))
            await asyncio.sleep(chance.uniform(0.0, 0.4))
            counts = [(await client.batches.retrieve(each.id)).request_counts for each in batches]
            process.kill()
            await process.wait()
    async with front_door_process(port, echo.frontend.port, tmp_path) as process, client_of(port) as client:
        for name, batch, count in zip("ab", batches, counts, strict=True):
            done = await finished(client, batch)
            assert (done.status, done.error_file_id) == ("completed", None)
            assert set(await output_of(client, done)) == {f"{name}{n}" for n in range(num_lines)}
            assert count is not None
            assert done.request_counts is not None
            assert count.completed <= done.request_counts.completed == num_lines
    await echo.frontend.stop()
    assert process.returncode == 0
    assert sum(echo.asked.values()) - 2 * num_lines <= num_kills * 8  # as many as were under way
