"""Several choices of a request: frontends that answer each, and the one answer made of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import h11
import pytest
from test_frontdoor_server import CHAT_BODY, House, chunked, error_of, house, post

from adapters.catalog import ANNOTATION
from worker.frontdoor import requests
from worker.frontdoor.choices import Choices
from worker.frontdoor.errors import Refused
from worker.frontdoor.upstreams import UpstreamConnection

BODY = json.dumps({**json.loads(CHAT_BODY), "n": 3, "stream": False}).encode()
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def choice_of(request: bytes) -> int:
    """Which choice a frontend is asked for."""
    fields = json.loads(request.partition(b"\r\n\r\n")[2])
    assert "n" not in fields
    annotations = fields.get("nvext", {}).get("annotations", [])
    return next((json.loads(one[len(ANNOTATION) :]).get("choice", 0) for one in annotations), 0)


def read(answer: bytes) -> tuple[h11.Response, bytes]:
    """The head and the body of an answer."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "door")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(answer)
    parser.receive_data(b"")
    response, body = parser.next_event(), b""
    assert isinstance(response, h11.Response)
    while isinstance(event := parser.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    return response, body


def json_answer(data: Any, status: bytes = b"200 OK") -> bytes:
    body = json.dumps(data).encode()
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Frontends:
    """Answers each choice with what `answers` has for it, the last choice first."""

    def __init__(self, *answers: list[bytes]) -> None:
        self.answers = answers
        self.asked: list[int] = []
        self.at: House
        self._all_here = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        choice = choice_of(self.at.frontends[0].requests[-1])
        self.asked.append(choice)
        if len(self.asked) == len(self.answers):
            self._all_here.set()
        await self._all_here.wait()
        for part in self.answers[choice]:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.001 * (len(self.answers) - choice))


async def ask(frontends: Frontends, body: bytes = BODY, *headers: str) -> bytes:
    async with house(frontends) as at:
        frontends.at = at
        return await at.ask(post(body, *headers))


def answer_to(choice: int, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"answer {choice}"}
    chosen = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": f"id-{choice}", "created": 100 + choice, "choices": chosen, "usage": dict(USAGE), **more}


async def test_answers_are_put_together() -> None:
    frontends = Frontends(*([json_answer(answer_to(i))] for i in range(3)))
    response, body = read(await ask(frontends))
    assert response.status_code == 200
    assert sorted(frontends.asked) == [0, 1, 2]
    answer = json.loads(body)
    assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [
        (0, "answer 0"), (1, "answer 1"), (2, "answer 2")
    ]  # fmt: skip
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert answer["id"].startswith("id-")
    assert "nvext" not in answer


async def test_extensions_stay_those_of_their_choice() -> None:
    answers = [json_answer(answer_to(i, nvext={"engine_data": {"seed": i}})) for i in range(3)]
    _, body = read(await ask(Frontends(*([each] for each in answers))))
    assert json.loads(body)["nvext"] == {"choices": [{"engine_data": {"seed": i}} for i in range(3)]}


async def test_choices_of_a_list_of_prompts_come_prompt_by_prompt() -> None:
    """As in OpenAI's API: choices of the first prompt first."""

    def of_two(choice: int) -> dict[str, Any]:
        return {"id": "a", "choices": [{"index": k, "text": f"{k}{choice}"} for k in range(2)]}

    _, body = read(await ask(Frontends(*([json_answer(of_two(i))] for i in range(3)))))
    assert [one["text"] for one in json.loads(body)["choices"]] == ["00", "01", "02", "10", "11", "12"]


def event(choice: int, text: str, **more: Any) -> bytes:
    chunk = {"id": f"id-{choice}", "choices": [{"index": 0, "delta": {"content": text}}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-odd: kept\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def stream(choice: int, *, done: bool = True) -> list[bytes]:
    usage = b"data: " + json.dumps({"id": "b", "choices": [], "usage": USAGE}).encode() + b"\n\n"
    whole = event(choice, "a") + b": alive\n\n" + event(choice, "\u00e9") + usage + b"data: [DONE]\n\n" * done
    pieces = [chunked(whole[i : i + 7]) for i in range(0, len(whole), 7)]
    return [STREAM_HEAD, *pieces, LAST]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_streams_come_as_one(version: str) -> None:
    frontends = Frontends(*(stream(i) for i in range(3)))
    async with house(frontends) as at:
        frontends.at = at
        response, body = read(await at.ask(post(BODY).replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)))
    assert dict(response.headers)[b"x-odd"] == b"kept"
    *events, last = body.decode().split("\n\n")
    assert last == ""
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(one[6:]) for one in events if one != ": alive"]
    assert len(events) - len(chunks) == 3
    assert chunks.pop() == {
        "id": chunks[0]["id"], "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
    }  # fmt: skip
    texts = ["", "", ""]
    for chunk in chunks:
        assert chunk["id"] == chunks[0]["id"]
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
    assert texts == ["a\u00e9"] * 3


async def test_what_did_not_end_does_not_end() -> None:
    _, body = read(await ask(Frontends(stream(0), stream(1, done=False), stream(2))))
    assert b"[DONE]" not in body


async def test_a_refusal_is_the_answer() -> None:
    error = {"error": {"message": "top_p: no", "type": "invalid_request_error"}}
    response, body = read(await ask(Frontends(*([json_answer(error, b"400 Bad Request")] for _ in range(3)))))
    expected = {"message": "top_p: no", "type": "invalid_request_error", "param": "top_p", "code": None}
    assert (response.status_code, json.loads(body)) == (400, {"error": expected})


async def test_one_that_fails_ends_the_others() -> None:
    refused = json_answer({"error": {"message": "busy"}}, b"503 Service Unavailable")
    response, body = read(await ask(Frontends([json_answer(answer_to(0))], [json_answer(answer_to(1))], [refused])))
    assert (response.status_code, json.loads(body)["error"]["message"]) == (503, "busy")


@pytest.mark.parametrize(
    "body", [{"error": {"message": "busy"}}, {"message": "busy", "type": "Service Unavailable", "code": 503}]
)
async def test_an_error_behind_the_beginning_of_a_stream_is_an_event(body: dict[str, Any]) -> None:
    """In OpenAI's form, whatever the frontend's is. It is the last one: there is no ``[DONE]``."""
    refused = json_answer(body, b"503 Service Unavailable")
    _, events = read(await ask(Frontends(stream(0), stream(1), [*[b""] * 8, refused])))
    last = events.removesuffix(b"\n\n").split(b"\n\n")[-1]
    expected = {"message": "busy", "type": "server_error", "param": None, "code": None}
    assert json.loads(last.removeprefix(b"data: ")) == {"error": expected}


@pytest.mark.parametrize("parts", [[], [STREAM_HEAD, chunked(event(1, "a"))]])
async def test_a_frontend_that_dies(parts: list[bytes]) -> None:
    """Before the answer has begun it is a 502; later the answer is cut."""
    begun = bool(parts)
    answer = await ask(Frontends(parts, parts, parts))
    assert answer.startswith(b"HTTP/1.1 200" if begun else b"HTTP/1.1 502")
    assert answer.endswith(LAST) is False


async def test_an_answer_that_cannot_be_read_is_a_502() -> None:
    """Though it is complete: nothing goes on with a connection that is closed because of it."""
    broken: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, problem: broken.append(problem.get("protocol")))
    bad = json_answer(answer_to(0)).replace(b"\r\n", b"\r\nno header\r\n", 1)
    assert (await ask(Frontends([bad], [bad], [bad]))).startswith(b"HTTP/1.1 502")
    assert not any(broken)


async def test_a_client_that_leaves_ends_all() -> None:
    """Their connections are closed."""
    left = 0
    here, gone = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        left += 1
        if left == 3:
            here.set()
        writer.write(STREAM_HEAD)
        with contextlib.suppress(ConnectionError):  # what was not read yet makes it a reset
            assert await reader.read() == b""
        left -= 1
        if not left:
            gone.set()

    async with house(script) as at:
        _, writer = await at.connect()
        writer.write(post(BODY))
        await here.wait()
        writer.close()
        await asyncio.wait_for(gone.wait(), 30)


async def test_no_frontend() -> None:
    async with house() as at:
        assert (await at.ask(post(BODY))).startswith(b"HTTP/1.1 503")


async def test_the_clients_id_is_that_of_the_first() -> None:
    frontends = Frontends(*([json_answer(answer_to(i))] for i in range(3)))
    async with house(frontends) as at:
        frontends.at = at
        await at.ask(post(BODY, "X-Request-Id: mine", "X-Dynamo-Request-Id: my own", "X-Other: yes"))
        requests = {choice_of(one): one.lower() for one in at.frontends[0].requests}
    assert all(one.count(b"x-request-id: mine") == 1 for one in requests.values())
    assert [b"x-dynamo-request-id: my own" in requests[i] for i in range(3)] == [True, False, False]
    assert all(b"x-other: yes" in one for one in requests.values())


async def test_bodies_count_for_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are made: 128 bodies of 8 MiB would be a gigabyte."""
    monkeypatch.setattr(requests, "_other_choices", None)
    body = json.dumps({**json.loads(BODY), "n": 128, "user": "u" * 10_000}).encode()
    async with house(Frontends(), body_limit_mib=1) as at:
        status, error = error_of(await at.ask(post(body)))
        assert (status, error["param"]) == (413, "n")


class Recorder:
    """A client of choices that keeps what it is told."""

    def __init__(self) -> None:
        self.data = b""
        self.ends: list[str] = []
        self.over = asyncio.Event()

    def received(self, data: bytes) -> None:
        self.data += data

    def answered(self, closes: bool) -> None:
        self._ended("answered")

    def failed(self, begun: bool, reason: str) -> None:
        self._ended(reason)

    def unreachable(self) -> None:
        self._ended("unreachable")

    def refused(self, refused: Refused) -> None:
        self._ended(f"refused: {refused.status} {refused.message}")

    def _ended(self, how: str) -> None:
        self.ends.append(how)
        self.over.set()


class Upstreams:
    """Frontends without sockets: connections are there when a test says so, cancelled or not."""

    def __init__(self) -> None:
        self.may_connect = [asyncio.Event() for _ in range(2)]
        self.transports: list[Transport] = []
        self._num_asked = 0

    def in_turn(self) -> list[Any]:
        return []

    async def connect(self, turn: list[Any], connection: UpstreamConnection) -> None:
        number = self._num_asked
        self._num_asked += 1
        while not self.may_connect[number].is_set():
            with contextlib.suppress(asyncio.CancelledError):  # as wait_for does in Python 3.11
                await self.may_connect[number].wait()
        transport = Transport(connection)
        self.transports.append(transport)
        connection.connection_made(transport)


class Transport(asyncio.Transport):
    family = socket.AF_INET

    def __init__(self, connection: UpstreamConnection) -> None:
        super().__init__()
        self.connection = connection
        self.written: list[bytes] = []
        self.is_read = True
        self.is_open = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self  # as the socket, of which options are set

    def setsockopt(self, *_: int) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return not self.is_open

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.is_open = False

    def abort(self) -> None:
        self.close()


async def two_choices(upstreams: Upstreams) -> tuple[Recorder, Choices]:
    client = Recorder()
    choices = Choices(client, [b"first", b"second"], chunked=True, refused=client.refused)
    choices.ask(upstreams)  # type: ignore[arg-type]
    upstreams.may_connect[0].set()
    while not upstreams.transports:
        await asyncio.sleep(0)
    return client, choices


async def test_a_choice_that_connects_behind_an_error_is_not_asked_for() -> None:
    upstreams = Upstreams()
    client, _ = await two_choices(upstreams)
    refused = json_answer({"error": {"message": "busy"}}, b"503 Service Unavailable")
    upstreams.transports[0].connection.data_received(refused[:-5])
    upstreams.may_connect[1].set()
    while len(upstreams.transports) < 2 or upstreams.transports[1].is_open:
        await asyncio.sleep(0)
    assert upstreams.transports[1].written == []
    upstreams.transports[1].connection.connection_lost(None)
    upstreams.transports[0].connection.data_received(refused[-5:])
    assert client.ends == ["refused: 503 busy"]


async def test_a_choice_that_connects_while_the_client_is_paused_waits() -> None:
    upstreams = Upstreams()
    _, choices = await two_choices(upstreams)
    choices.pause()
    upstreams.may_connect[1].set()
    while len(upstreams.transports) < 2 or not upstreams.transports[1].written:
        await asyncio.sleep(0)
    assert [each.is_read for each in upstreams.transports] == [False, False]
    choices.resume()
    assert [each.is_read for each in upstreams.transports] == [True, True]
    choices.abort()


async def test_an_answer_that_is_refused_at_its_end_ends_once() -> None:
    """A head that HTTP/1.1 does not allow, in the same bytes as the end of its answer."""
    upstreams = Upstreams()
    client, _ = await two_choices(upstreams)
    answer = json_answer(answer_to(0)).replace(b"content-type", b"content type")
    upstreams.transports[0].connection.data_received(answer)
    assert len(client.ends) == 1
    assert client.ends != ["answered"]
    upstreams.may_connect[1].set()
