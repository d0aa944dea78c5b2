"""Requests from bytes: what is accepted h11 reads alike, and pieces change nothing."""

from __future__ import annotations

import asyncio
import itertools
import json

import h11
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frontdoor_server import CHAT_BODY, WAIT_S, chunked, error_of, get, house, post, say_ok

from worker.frontdoor.errors import Refused
from worker.frontdoor.http import MAX_HEAD
from worker.frontdoor.request_reader import MAX_CHUNK_LINE, MAX_CHUNKS, Head, RequestReader, read_head

MAX_BODY = 2**20
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

NAMES = st.sampled_from(["Host", "host", "Content-Length", "X-A", "Expect", "Transfer-Encoding", "Upgrade", "X A", ""])
VALUES = st.text(st.characters(max_codepoint=255), max_size=6) | st.sampled_from(["3", "+3", "chunked", " 3 ", "a\tb"])


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A head, mostly as it should be."""
    method = draw(st.sampled_from(["GET", "POST", "get", "CONNECT", "", "G E"]))
    target = draw(st.sampled_from(["/", "/v1/a?b=c#d", "/\xe9", "*", "http://a/", "/a b", ""]))
    version = draw(st.sampled_from(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/1.1 ", "http/1.1", "HTTP/2.0"]))
    headers = draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))
    lines = [f"{method} {target} {version}", *(f"{name}: {value}" for name, value in headers)]
    if draw(st.booleans()):
        lines.insert(1, "Host: localhost")
    if draw(st.integers(0, 9)) == 0:
        lines.insert(
            draw(st.integers(0, len(lines))), draw(st.sampled_from([" folded", "\tfolded", "X : a", ":a", ""]))
        )
    ends = ["\r\n"] * (len(lines) + 1)
    if draw(st.integers(0, 9)) == 0:
        ends[draw(st.integers(0, len(lines)))] = draw(st.sampled_from(["\n", "\r", "\r\r\n"]))
    return "".join(itertools.chain.from_iterable(zip([*lines, ""], ends, strict=True))).encode("latin-1")


@given(heads())
@settings(max_examples=examples(500))
def test_h11_reads_alike_what_is_accepted(data: bytes) -> None:
    reader = RequestReader(MAX_BODY)
    reader.feed(data)
    try:
        head = reader.next()
    except Refused:
        return
    if head is None:
        return
    assert isinstance(head, Head)
    if head.is_chunked and b"content-length" in head.headers:
        assert not head.may_stay_open
        return  # of the two h11 leaves one out
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(data)
    request = parser.next_event()
    assert isinstance(request, h11.Request)
    assert (head.method, head.target, head.version) == (request.method, request.target, request.http_version)
    lines = [(bytes(name), bytes(value)) for name, value in request.headers.raw_items()]
    assert [
        (name, value.lower() if name.lower() == b"transfer-encoding" else value) for name, value in head.lines
    ] == lines
    assert head.num_bytes == int(dict(request.headers).get(b"content-length", b"0"))


def outcome(pieces: list[bytes]) -> tuple[object, ...]:
    """The parts that were read of a request that comes in these pieces, or why none were."""
    reader, head, body = RequestReader(MAX_BODY), None, b""
    for piece in pieces:
        reader.feed(piece)
        try:
            while (part := reader.next()) is not None:
                if part is RequestReader.END:
                    break
                if isinstance(part, Head):
                    head = part
                else:
                    body += part
        except Refused as refused:
            return refused.status, refused.message
    done = part is RequestReader.END
    return head, body, done, reader.trailing if done else None


CHUNK_LINES = st.sampled_from(
    [b"5", b"05", b"5;a=b", b"5 ", b"A", b"0", b"", b"-5", b"5;" + b"a" * MAX_CHUNK_LINE, b"fffff"]
)


@st.composite
def bodies_in_chunks(draw: st.DrawFn) -> bytes:
    """A chunked body, sometimes not as it should be."""
    out = b""
    for _ in range(draw(st.integers(0, 4))):
        data = draw(st.binary(min_size=1, max_size=9))
        line = draw(CHUNK_LINES) if draw(st.integers(0, 4)) == 0 else b"%x" % len(data)
        out += line + draw(st.sampled_from([b"\r\n"] * 9 + [b"\n"])) + data
        out += draw(st.sampled_from([b"\r\n"] * 9 + [b"\n", b"x\r\n", b""]))
    out += draw(st.sampled_from([b"0\r\n", b"0\r\nA: b\r\n", b"0\n", b"0\r\nA\n", b"0\r\n\x01\r\n"]))
    return out + b"\r\n" + draw(st.binary(max_size=5))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request and what follows it."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(heads()) + draw(st.binary(max_size=20))
    if kind == 1:
        return CHUNKED + draw(bodies_in_chunks())
    if kind == 2:
        return post(CHAT_BODY, close=False) + draw(st.binary(max_size=20))
    size = draw(st.integers(MAX_HEAD - 60, MAX_HEAD + 10))
    filler = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
    return (
        filler
        + b"a" * (size - len(filler))
        + draw(st.sampled_from([b"\r\n\r\n", b"\n", b"\r\nY: \n\r\n\r\n"]))
        + b"rest"
    )


@given(requests(), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_pieces_change_nothing(data: bytes, choose: st.DataObject) -> None:
    whole = outcome([data])
    cuts = sorted(choose.draw(st.sets(st.integers(0, len(data)), max_size=12)))
    near_end = list(range(max(0, len(data) - 80), len(data))) if choose.draw(st.booleans()) else []
    bounds = sorted({0, *cuts, *near_end, len(data)})
    assert outcome([data[start:end] for start, end in itertools.pairwise(bounds)]) == whole


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "data", [post(CHAT_BODY, close=False), CHUNKED + chunked(b"abc") + chunked(b"d") + b"0\r\nA: b\r\n\r\n"]
)
def test_a_request_is_read_however_it_is_cut(data: bytes, step: int) -> None:
    whole = outcome([data + b"next"])
    assert whole[2:] == (True, b"next")
    assert outcome([(data + b"next")[at : at + step] for at in range(0, len(data) + 4, step)]) == whole


def test_blanks_before_a_value_are_read_once() -> None:
    """A reader that goes back over them takes seconds for one head of this size."""
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX:" + b" " * 60_000
    for _ in range(20):
        with pytest.raises(Refused):
            read_head(head + b"\x01")
    assert read_head(head + b"a \t").headers[b"x"] == b"a"


REFUSED = {
    "bare LF": (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
    "one bare LF": (b"GET / HTTP/1.1\r\nHost: localhost\nX: a\r\n\r\n", 400),
    "folded": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", 400),
    "bare CR": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\rb\r\n\r\n", 400),
    "NUL": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n", 400),
    "empty line first": (b"\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    "two equal lengths": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        400,
    ),
    "two codings": (CHUNKED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: identity\r\n\r\n"), 400),
    "coding in 1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    "HTTP/2": (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    "huge head": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    "LF in chunks": (CHUNKED + b"1\na\r\n0\r\n\r\n", 400),
    "LF behind a chunk": (CHUNKED + b"1\r\na\n0\r\n\r\n", 400),
    "LF in trailers": (CHUNKED + b"0\r\nA: b\n\r\n", 400),
    "chunk beyond its size": (CHUNKED + b"1\r\nab\r\n0\r\n\r\n", 400),
    "long chunk line": (CHUNKED + b"1;" + b"a" * 5000 + b"\r\na\r\n0\r\n\r\n", 400),
    "huge trailers": (CHUNKED + b"0\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 431),
    "many chunks": (CHUNKED + b"1\r\na\r\n" * (MAX_CHUNKS + 1), 413),
    "huge chunk": (CHUNKED + b"fffffff\r\n", 413),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_two_servers_may_read_in_two_ways_is_refused(name: str) -> None:
    """In one piece and in two, and the connection ends: nothing behind it is a request."""
    data, expected = REFUSED[name]
    for pieces in ([data], [data[: len(data) // 2], data[len(data) // 2 :]]):
        assert outcome(pieces)[0] == expected
    async with house(say_ok, body_limit_mib=1) as at:
        said = await at.ask(data + get("/v1/models"))
        assert error_of(said)[0] == expected
        assert said.count(b"content-length: ") == 1
        assert at.frontends[0].requests == []


async def test_a_body_with_two_framings_is_chunked_and_the_last() -> None:
    """Whoever forwarded it may have read the other one, and taken the rest for another request."""
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 4\r\n\r\n")
    body = json.dumps({"model": "m", "prompt": "a"}).encode()
    async with house(say_ok) as at:
        said = await at.ask(head + chunked(body) + b"0\r\n\r\n" + get("/v1/models"))
        assert said == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
        (request,) = at.frontends[0].requests
        assert request.endswith(body)
        assert b"content-length: %d\r\n" % len(body) in request
        assert b"ransfer" not in request


async def test_all_connection_lines_count() -> None:
    async with house(say_ok) as at:
        lines = (
            "Connection: keep-alive, X-Hop",
            "Connection: close",
            "Connection: keep-alive",
            "X-Hop: 1",
            "X-Kept: 2",
        )
        said = await at.ask(post(CHAT_BODY, *lines, close=False) + get("/v1/models"))
        assert said.count(b"HTTP/1.1 200") == 1
        (request,) = at.frontends[0].requests
        assert b"X-Hop" not in request
        assert b"X-Kept: 2\r\n" in request


@pytest.mark.parametrize(
    "header", ["x-dynamo-meta-logits-processors", "Authorization", "x-dynamo-request-id", "traceparent"]
)
async def test_connection_takes_nothing_from_what_is_behind(header: str) -> None:
    lines = (f"Connection: {header.upper()}", f'{header}: {{"version": 1}}')
    async with house(say_ok) as at:
        for order in (lines, lines[::-1]):
            status, error = error_of(await at.ask(post(CHAT_BODY, *order, close=False)))
            assert (status, error["param"]) == (400, "connection")
            assert header.lower() in error["message"]
        assert at.frontends[0].requests == []


async def test_a_connection_takes_a_request_byte_by_byte() -> None:
    """However many pieces a body comes in, the frontend gets the same."""
    body = json.dumps({**json.loads(CHAT_BODY), "user": "a" * 10_000}).encode()
    in_chunks = CHUNKED.replace(b"/v1/completions", b"/v1/chat/completions")
    in_chunks = in_chunks.replace(b"\r\n", b"\r\nX-Request-Id: same\r\n", 1)
    in_chunks += chunked(body[:5000]) + chunked(body[5000:]) + b"0\r\n\r\n"
    async with house(say_ok) as at:
        for data in (
            post(body, "X-Request-Id: same", close=False),
            in_chunks.replace(b"/v1/completions", b"/v1/chat/completions").replace(
                b"\r\n", b"\r\nX-Request-Id: same\r\n", 1
            ),
        ):
            for step in (len(data), 1):
                reader, writer = await at.connect()
                while not at.door.connections:
                    await asyncio.sleep(0)
                (client,) = at.door.connections
                for start in range(0, len(data), step):
                    client.data_received(data[start : start + step])  # type: ignore[attr-defined]
                answer = await asyncio.wait_for(reader.readexactly(len(OK)), WAIT_S)
                assert answer == OK
                writer.close()
                while at.door.connections:
                    await asyncio.sleep(0.001)
        whole, *others = at.frontends[0].requests
        assert others[0] == whole
        assert others[1] == others[2]
        assert all(request.endswith(body) for request in at.frontends[0].requests)
