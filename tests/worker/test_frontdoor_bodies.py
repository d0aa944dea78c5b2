"""Room for bodies: no client keeps another's out, and none is waited for that does not get on."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rewritten_requests import rewritten
from test_frontdoor_server import (
    CATALOG,
    CHAT_BODY,
    STREAM_HEAD,
    WAIT_S,
    chunked,
    error_of,
    get,
    house,
    post,
    say_ok,
)

from adapters.contract import MAX_LIST
from worker.frontdoor import bodies, client_connection, field_processors, requests
from worker.frontdoor.bodies import HELD_AT_ONCE, LARGE_AT_ONCE, SMALL, WINDOW_S, Bodies, Body
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.rewriting import AT_ONCE

LARGEST = 2**20


class Coming:
    """A body that a client sends."""

    def __init__(self, at: Bodies) -> None:
        self.refused: Refused | None = None
        self.body: Body = at.begin(self._end)

    def _end(self, refused: Refused) -> None:
        self.refused = refused
        self.body.free()

    def send(self, num_bytes: int) -> None:
        try:
            self.body.add(b"a" * num_bytes)
        except Refused as refused:
            self._end(refused)


def room(clock: list[float], rate: float = 1024, timeout_s: float = 60) -> Bodies:
    return Bodies(LARGEST, rate, timeout_s, lambda: clock[0])


def test_stalled_bodies_keep_nobody_out() -> None:
    clock = [0.0]
    at = room(clock)
    stalled = [Coming(at) for _ in range(LARGE_AT_ONCE + 1)]
    for each in stalled:
        each.send(LARGEST - 1)
    clock[0] = 1.0
    small, large = Coming(at), Coming(at)
    small.send(81)
    assert [each.refused for each in (*stalled, small)].count(None) == len(stalled) + 1 - 1
    for _ in range(8):
        clock[0] += 0.01
        large.send(LARGEST // 8)
    assert (small.refused, large.refused) == (None, None)
    gone = [each.refused for each in stalled if each.refused is not None]
    assert [each.status for each in gone] == [408, 408]


def test_the_slowest_goes_first() -> None:
    clock = [0.0]
    at = room(clock)
    slow, steady = Coming(at), [Coming(at) for _ in range(LARGE_AT_ONCE)]
    for step in range(1, 17):
        clock[0] = float(step)
        slow.send(LARGEST // 64)
        for each in steady:
            each.send(LARGEST // 16)
    assert slow.refused is not None
    assert slow.refused.status == 408
    assert all(each.refused is None for each in steady)


def test_complete_bodies_are_not_taken_back() -> None:
    at = room([0.0])
    complete = [Coming(at) for _ in range(LARGE_AT_ONCE)]
    for each in complete:
        each.send(LARGEST)
        assert len(each.body.take()) == LARGEST
    late = Coming(at)
    late.send(SMALL + 1)
    assert late.refused is not None
    assert late.refused.status == 503
    complete[0].body.free()
    again = Coming(at)
    again.send(SMALL + 1)
    assert again.refused is None


def test_answered_bodies_have_room_of_their_own() -> None:
    at = room([0.0])
    small, *held = [Coming(at) for _ in range(HELD_AT_ONCE + 2)]
    small.send(SMALL)
    for each in held[:-1]:
        each.send(LARGEST)
        each.body.take()
        each.body.hold()
    held[-1].send(LARGEST)
    assert held[-1].refused is None  # those that come have theirs
    for each in (held[-1], small):
        each.body.take()
    small.body.hold()
    with pytest.raises(Refused, match="too many bodies"):
        held[-1].body.hold()
    held[0].body.free()
    held[-1].body.free()
    held[0].send(LARGEST)
    held[0].body.hold()
    for each in (small, *held):
        each.body.free()
    assert at.num_bytes == 0


def test_a_body_that_does_not_get_on_is_late() -> None:
    clock = [0.0]
    at = room(clock)
    body = at.begin(lambda refused: None)
    assert body.left_s() == WINDOW_S
    clock[0] = 9.0
    body.add(b"a" * 1024)
    assert body.left_s() == 1.0
    body.add(b"a" * int(1024 * WINDOW_S))
    assert body.left_s() == WINDOW_S
    clock[0] = 58.0
    body.add(b"a" * 100_000)
    assert body.left_s() == 2.0  # of the time that all of it has
    clock[0] = 61.0
    assert body.left_s() == 0.0


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "send", "send", "send", "take", "free"]), st.integers(0, 40)), max_size=80
)


@given(STEPS, st.data())
@settings(max_examples=examples(200), deadline=None)
def test_room_is_kept_and_given_back(steps: list[tuple[str, int]], choose: st.DataObject) -> None:
    """However bodies come and go: never more than there is, and nothing is left of those gone."""
    clock = [0.0]
    at = room(clock)
    coming: list[Coming] = []
    for step, number in steps:
        clock[0] += 0.1
        if step == "begin" or not coming:
            coming.append(Coming(at))
            continue
        one = coming[number % len(coming)]
        if one.refused is not None or (one.body.is_complete and step == "send"):
            continue
        if step == "send":
            one.send(choose.draw(st.sampled_from([0, 1, 81, SMALL, SMALL + 1, LARGEST // 2, LARGEST])))
        elif step == "take":
            one.body.take()
        else:
            one.body.free()
            coming.remove(one)
        assert at.large.num_bytes <= LARGE_AT_ONCE * LARGEST
        assert at.num_bytes == sum(each.body.num_bytes for each in coming)
    for each in coming:
        each.body.free()
    assert at.num_bytes == 0


async def test_sixteen_stalled_bodies_keep_no_chat_out() -> None:
    stalled = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % LARGEST
    large = json.dumps({**json.loads(CHAT_BODY), "user": "a" * (LARGEST - 1000)}).encode()
    async with house(say_ok, body_limit_mib=1) as at:
        writers = []
        for _ in range(LARGE_AT_ONCE + 1):
            _, writer = await at.connect()
            writer.write(stalled + b" " * (LARGEST - 1))
            writers.append(writer)
        while at.door.bodies.num_bytes < LARGE_AT_ONCE * (LARGEST - 1):
            await asyncio.sleep(0.001)
        assert (await at.ask(post())).endswith(b"{}")
        assert (await at.ask(post(large))).endswith(b"{}")
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_bodies_of_requests_that_wait_take_room(monkeypatch: pytest.MonkeyPatch, num_choices: int) -> None:
    """They stay until the answer begins, to learn why it failed; those of choices until it ends."""
    monkeypatch.setattr(bodies, "HELD_AT_ONCE", 4)
    size = (LARGEST - 1000) // num_choices
    large = json.dumps({**json.loads(CHAT_BODY), "user": "a" * size, "n": num_choices}).encode()
    begin, end = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await begin.wait()
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
        writer.write(STREAM_HEAD + chunked(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()))
        await end.wait()
        writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with house(wait, body_limit_mib=1) as at:
        num_fit = 4 * num_choices
        asked = [asyncio.create_task(at.ask(post(large))) for _ in range(num_fit)]
        while len(at.frontends[0].requests) < num_fit * num_choices:
            await asyncio.sleep(0.001)
        assert at.door.bodies.num_bytes == num_fit * len(large)
        assert error_of(await at.ask(post(large)))[0] == 503
        small = asyncio.create_task(at.ask(post()))
        begin.set()
        while num_choices == 1 and at.door.bodies.num_bytes:
            await asyncio.sleep(0.001)
        end.set()
        answers = await asyncio.gather(*asked, small)
    assert all(b"[DONE]" in answer for answer in answers)


async def test_a_body_below_the_least_rate_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "WINDOW_S", 0.2)
    async with house(say_ok) as at:
        reader, writer = await at.connect()
        data = post()
        writer.write(data[:-20])
        said = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        assert error_of(said)[0] == 408
        assert at.frontends[0].requests == []


async def test_large_bodies_of_clients_are_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many one has sent: a body takes tenths of a second, or the schemas of its tools."""
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()
    parse = requests.parsed

    def waiting(body: bytes) -> dict[str, Any]:
        begun.set()
        assert go_on.wait(WAIT_S)
        fields = parse(body)
        order.append(fields["user"][0])
        return fields

    def large(user: str) -> bytes:
        body = json.dumps({**json.loads(CHAT_BODY), "user": user * 2 * AT_ONCE}).encode()
        return post(body, f"Authorization: Bearer {user}")

    monkeypatch.setattr("worker.frontdoor.server.parsed", waiting)
    async with house(say_ok, keys=("a", "b")) as at:
        asked = [asyncio.create_task(at.ask(large("a"))) for _ in range(5)]
        while at.door.bodies.num_bytes < 5 * 2 * AT_ONCE or not begun.is_set():
            await asyncio.sleep(0.001)
        asked.append(asyncio.create_task(at.ask(large("b"))))
        while at.door.bodies.num_bytes < 6 * 2 * AT_ONCE:
            await asyncio.sleep(0.001)
        go_on.set()
        await asyncio.gather(*asked)
    assert "".join(order) == "aabaaa"  # the second waited before the other's came


def bias_of(num_entries: int) -> bytes:
    return json.dumps({**json.loads(CHAT_BODY), "logit_bias": {str(n): 1 for n in range(num_entries)}}).encode()


async def test_large_bodies_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get their answers meanwhile; small ones are read at once."""
    begun, go_on, threads = threading.Event(), threading.Event(), []
    parse = requests.parsed

    def waiting(body: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        if len(body) > client_connection.AT_ONCE:  # type: ignore[attr-defined]
            begun.set()
            assert go_on.wait(WAIT_S)
        return parse(body)

    monkeypatch.setattr("worker.frontdoor.server.parsed", waiting)
    async with house(say_ok) as at:
        asked = asyncio.create_task(at.ask(post(bias_of(100_000))))
        left_reader, left = await at.connect()  # one that waits for its turn, and leaves
        while not begun.is_set():
            await asyncio.sleep(0.001)
        left.write(post(bias_of(90_000)))
        assert (await at.ask(post())).endswith(b"{}")
        assert (await at.ask(get("/v1/models"))).endswith(b"{}")
        left.transport.abort()
        while len(at.door.connections) > 1:
            await asyncio.sleep(0.001)
        go_on.set()
        status, error = error_of(await asked)
        del left_reader
    assert (status, error["param"]) == (400, "logit_bias")
    assert error["message"] == f"logit_bias: must have at most {MAX_LIST} entries, got 100000"
    assert threads[-1] is threading.main_thread()
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


def refused(body: bytes) -> Refused:
    with pytest.raises(Refused) as found:
        rewritten(CHAT, body, {}, CATALOG)
    return found.value


def test_too_large_a_bias_is_refused_before_it_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(bias: object) -> Any:
        raise AssertionError("it was made")

    monkeypatch.setattr(field_processors, "from_openai_logit_bias", make)
    assert refused(bias_of(MAX_LIST + 1)).param == "logit_bias"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(n): -99.12345678901 for n in range(MAX_LIST)}}, "logit_bias"),
        (
            {
                "logit_bias": {str(n): -99.12345678901 for n in range(MAX_LIST)},
                "logits_processors": [{"name": "min_p"}],
            },
            "logit_bias",
        ),
        (
            {
                "logits_processors": [{"name": "phrase_ban", "args": {"phrases": ["a" * 70_000]}}],
                "logit_bias": {"1": 1},
            },
            "logits_processors",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "a" * 70_000}}},
            "response_format.format",
        ),
    ],
)
def test_too_large_a_selection_names_the_clients_field(fields: dict[str, Any], param: str) -> None:
    found = refused(json.dumps({**json.loads(CHAT_BODY), **fields}).encode())
    assert (found.status, found.param) == (400, param)
    assert found.message.startswith(param)


@pytest.mark.parametrize("num_entries", [1, 50_000])
async def test_an_error_of_its_own_leaves_no_client_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_entries: int
) -> None:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("worker.frontdoor.server.rewritten_fields", fail)
    async with house(say_ok) as at:
        assert error_of(await at.ask(post(bias_of(num_entries))))[0] == 500
    assert "ZeroDivisionError" in caplog.text
