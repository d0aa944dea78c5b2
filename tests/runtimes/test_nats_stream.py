"""Flow control and resending of one answer, with a connection and a clock of the test's own."""

from __future__ import annotations

import asyncio
import json

import pytest
from nats.errors import MaxPayloadError

from worker.errors import InvalidRequest, RequestFailed
from worker.runtimes.nats.protocol import END, GONE, HEARTBEAT_S, KIND, RESUME, SEQUENCE
from worker.runtimes.nats.service import _fail
from worker.runtimes.nats.stream import ABSENT_S, RESEND_S, STALL_S, AnswerStream

NOBODY = {"Status": "503"}


class Connection:
    """Remembers what was sent; too large a message is refused as NATS does."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, bytes]] = []
        self.now_s = 100.0
        self.num_gone = 0

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        assert (subject, reply) == ("inbox", "ack")
        if len(payload) > 100:
            raise MaxPayloadError
        assert headers is not None
        self.sent.append((headers[KIND], headers[SEQUENCE], payload))

    def gone(self) -> None:
        self.num_gone += 1

    def stream(self, window: int) -> AnswerStream:
        return AnswerStream(self, "inbox", "ack", window, self.gone, lambda: self.now_s)

    @property
    def numbers(self) -> list[int]:
        return [int(number) for _, number, _ in self.sent]


async def filled(connection: Connection, window: int = 3) -> AnswerStream:
    stream = connection.stream(window)
    for number in range(window):
        await stream.send({"number": number})
    return stream


async def test_a_full_window_waits_for_acknowledgements() -> None:
    connection = Connection()
    stream = await filled(connection)
    blocked = asyncio.create_task(stream.send({"number": 3}))
    await asyncio.sleep(0)
    assert not blocked.done()
    await stream.acknowledged({SEQUENCE: "2"})
    await blocked
    assert connection.numbers == [0, 1, 2, 3]
    await stream.acknowledged({SEQUENCE: "3", KIND: RESUME})
    assert connection.numbers == [0, 1, 2, 3, 3]
    await stream.end()
    assert not stream.is_settled
    sent = connection.numbers
    await stream.send({"number": 5})
    await stream.end()
    assert connection.numbers == sent, "nothing comes behind an end"
    await stream.acknowledged({SEQUENCE: "5"})
    assert stream.is_settled


async def test_acknowledgements_that_mean_nothing() -> None:
    connection = Connection()
    stream = await filled(connection)
    for headers in ({}, {SEQUENCE: "x"}, {SEQUENCE: "99"}, {SEQUENCE: "-1"}):
        await stream.acknowledged(headers)
    await stream.acknowledged({SEQUENCE: "0", KIND: RESUME})
    assert connection.numbers == [0, 1, 2] * 2


async def test_the_end_ignores_the_window_and_stays_till_acknowledged() -> None:
    connection = Connection()
    stream = await filled(connection)
    await stream.end()
    await stream.acknowledged(NOBODY)  # the client connects again
    await stream.acknowledged({SEQUENCE: "1", KIND: RESUME})
    assert connection.sent[-1][:2] == (END, "3")
    assert connection.numbers == [0, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("ends", [False, True])
async def test_a_client_that_never_acknowledges_is_given_up(ends: bool) -> None:
    connection = Connection()
    stream = await filled(connection)
    if ends:
        await stream.end()
    connection.now_s += STALL_S - 1
    await stream.heartbeat()
    assert not stream.is_gone
    connection.now_s += 2
    await stream.heartbeat()
    assert stream.is_settled
    assert connection.num_gone == 1
    await stream.send({})
    assert stream.is_gone


async def test_a_client_may_be_absent_for_a_while_if_it_has_a_window() -> None:
    connection = Connection()
    stream = await filled(connection)
    for _ in range(5):
        await stream.acknowledged(NOBODY)
        connection.now_s += ABSENT_S / 4
    assert not stream.is_gone
    await stream.acknowledged(NOBODY)
    assert stream.is_gone
    without = connection.stream(0)
    await without.send({})
    await without.acknowledged(NOBODY)
    assert without.is_gone


async def test_an_absence_ends_when_somebody_is_found() -> None:
    connection = Connection()
    stream = await filled(connection)
    await stream.acknowledged(NOBODY)
    connection.now_s += ABSENT_S + 0.1
    await stream.heartbeat()  # nobody complains about it
    await stream.acknowledged(NOBODY)
    assert not stream.is_gone


async def test_a_message_that_cannot_be_sent_leaves_its_number() -> None:
    connection = Connection()
    stream = connection.stream(3)
    await stream.send({"a": 1})
    with pytest.raises(MaxPayloadError):
        await stream.send({"a": "a" * 100})
    await stream.fail(InvalidRequest("a", "is wrong"))
    await stream.acknowledged({SEQUENCE: "0", KIND: RESUME})
    assert connection.numbers == [0, 1, 0, 1]
    await stream.acknowledged({KIND: GONE})
    assert stream.is_settled


async def test_a_chunk_that_no_message_can_hold_comes_in_parts() -> None:
    connection = Connection()
    stream = connection.stream(9)
    whole = {"token_ids": list(range(20)), "log_probs": [-1.5] * 20, "index": 1, "text": "abc", "finish_reason": "stop"}
    await stream.send(whole)
    parts = [json.loads(payload) for _, _, payload in connection.sent]
    assert connection.numbers == list(range(len(parts)))
    for key in ("token_ids", "log_probs"):
        assert [each for part in parts for each in part[key]] == whole[key]
    assert [part["text"] for part in parts] == [*[""] * (len(parts) - 1), "abc"]
    assert [index for index, part in enumerate(parts) if "finish_reason" in part] == [len(parts) - 1]
    assert {part["index"] for part in parts} == {1}


async def test_an_end_that_cannot_be_sent_is_silence() -> None:
    """With heartbeats behind it, its client would wait for ever."""
    connection = Connection()
    stream = connection.stream(3)
    await stream.send({"a": 1})
    await _fail(stream, RequestFailed("a" * 100))
    connection.now_s += HEARTBEAT_S
    await stream.heartbeat()
    assert connection.numbers == [0]
    assert stream.is_settled


async def test_repeated_requests_to_resend_are_rate_limited() -> None:
    connection = Connection()
    stream = await filled(connection)
    for _ in range(100):
        await stream.acknowledged({SEQUENCE: "0", KIND: RESUME})
    assert connection.numbers == [0, 1, 2] * 2
    connection.now_s += RESEND_S
    await stream.acknowledged({SEQUENCE: "1", KIND: RESUME})
    assert connection.numbers == [0, 1, 2] * 2 + [1, 2]


@pytest.mark.parametrize("error", [ConnectionResetError(), MaxPayloadError()])
async def test_an_answer_whose_end_cannot_be_sent_is_given_up(error: Exception) -> None:
    """The socket may break beside it: the id of the request is free again, and nothing beats on."""
    connection = Connection()
    stream = await filled(connection)

    async def publish(*_: object) -> None:
        raise error

    connection.publish = publish  # type: ignore[assignment]
    await _fail(stream, RequestFailed("the answer cannot be sent"))
    assert stream.is_settled
    assert connection.num_gone == 1
