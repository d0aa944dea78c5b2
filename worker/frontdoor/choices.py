"""Several choices of one request: a request to the frontends for each, one answer made of theirs.

Dynamo's unified backend ends a request at its first finish reason, so that a worker cannot answer
several choices at once. Each choice is a request of its own: with its own place in the batch, its
own random numbers (`Selection.choice`) and its own migration; their prompts share KV.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from worker.frontdoor.answers import ParsedAnswer
from worker.frontdoor.http import COMMENT, HOP_BY_HOP, INTERIM, AnswerEnd
from worker.frontdoor.upstreams import Client, NoUpstream, Upstreams

MAX_ANSWER = 64 * 2**20
"""Bytes of all answers together that are not streamed, and of an event."""

_DONE = b"data: [DONE]"


class Asker(Client, Protocol):
    """Whom the answer made of all goes to."""

    def unreachable(self) -> None:
        """No frontend can be reached; nothing has been sent."""


class Choices:
    """Asks for every choice and passes one answer on.

    The first head decides what it is: an error of one choice is the answer, a stream has the events
    of all as they come, and other answers are put together once all have come.

    Args:
        client: Whom it goes to.
        requests: A request per choice, head and body.
        chunked: Whether the client reads a chunked body; else a stream ends with its connection.
    """

    def __init__(self, client: Asker, requests: Sequence[bytes], *, chunked: bool) -> None:
        self._client = client
        self._requests = list(requests)
        self._answers = [ParsedAnswer(self, index) for index in range(len(requests))]
        self._chunked = chunked
        self._first: ParsedAnswer | None = None
        self._num_bytes = 0
        self._begun = False
        self._over = False
        self._paused = False
        self._asking: list[asyncio.Task[None]] = []
        self._usages: dict[int, Mapping[str, Any]] = {}
        self._last: dict[str, Any] | None = None  # the event behind all choices, with their usage
        self._stamp: dict[str, Any] = {}

    def ask(self, upstreams: Upstreams) -> None:
        """Send the requests, each on a connection of its own."""
        loop = asyncio.get_running_loop()
        self._asking = [loop.create_task(self._ask(upstreams, answer)) for answer in self._answers]

    async def _ask(self, upstreams: Upstreams, answer: ParsedAnswer) -> None:
        try:
            await upstreams.connect(upstreams.in_turn(), answer.connection)
        except NoUpstream:
            if answer.ended:
                return  # another choice's error is the answer
            if self._begun:
                self._fail("no frontend can be reached")
            elif not self._over:
                self.abort()
                self._client.unreachable()
            return
        if self._over or answer.ended:
            answer.connection.abort()  # a cancellation may come too late to be noticed
            return
        if self._paused:
            answer.connection.pause()
        answer.connection.begin(answer, AnswerEnd(), self._requests[answer.index])
        self._requests[answer.index] = b""  # answers take long, and a request may be large

    # What a client's connection does with the one that answers it.

    def pause(self) -> None:
        """Read no more for now."""
        self._paused = True
        for answer in self._answers:
            answer.connection.pause()

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        for answer in self._answers:
            answer.connection.resume()

    def abort(self) -> None:
        """End all requests. Idempotent."""
        self._over = True
        for task in self._asking:
            task.cancel()
        for answer in self._answers:
            if not answer.ended:
                answer.connection.abort()

    def filler(self) -> bytes | None:
        """See `UpstreamConnection.filler`."""
        if not self._begun:
            return INTERIM
        return self._framed(COMMENT)

    # What the answers say.

    def headed(self, answer: ParsedAnswer) -> None:
        """The head of an answer has come."""
        if self._first is None:
            self._first = answer
            if answer.status == 200 and answer.is_stream:
                self._begin(answer)
        if answer.status == 200:
            return
        if self._begun:
            answer.collects = True
        else:
            self._first = answer
            self._drop_others(answer)

    def data(self, answer: ParsedAnswer, data: bytes) -> None:
        """Bytes of an answer's body."""
        if self._over:
            return
        answer.body += data
        if self._begun and not answer.collects:
            *events, answer.body = answer.body.split(b"\n\n")
            self._pass_on(answer, events)
        self._num_bytes += len(data)
        if len(answer.body) > MAX_ANSWER or (not self._begun and self._num_bytes > MAX_ANSWER):
            self._fail(f"an answer beyond {MAX_ANSWER} bytes")

    def ended(self, answer: ParsedAnswer) -> None:
        """An answer is complete."""
        answer.ended = True
        if self._over:
            return
        if answer.collects:
            self._write(b"data: " + answer.body.replace(b"\n", b" ") + b"\n\n")
            self._fail(f"choice {answer.index} was answered with {answer.status}")
        elif self._first is not None and self._first.status != 200:
            self._finish(_whole(answer.status, answer.headers, answer.body))
        else:
            if self._begun and answer.body:
                self._pass_on(answer, [answer.body])  # an event without an empty line behind it
            if all(each.ended for each in self._answers):
                self._end()

    def failed(self, answer: ParsedAnswer, reason: str) -> None:
        """A frontend has gone before the end of its answer."""
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if not self._over:
            self.abort()
            self._client.failed(self._begun, reason)

    def _drop_others(self, kept: ParsedAnswer) -> None:
        for answer, asking in zip(self._answers, self._asking, strict=True):
            if answer is not kept:
                asking.cancel()  # it may not be connected yet
                answer.ended = True
                answer.connection.abort()

    # A stream.

    def _begin(self, answer: ParsedAnswer) -> None:
        self._begun = True
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b"connection: close\r\n"
        self._client.received(_head(200, answer.headers) + framing + b"\r\n")

    def _pass_on(self, answer: ParsedAnswer, events: Sequence[bytes]) -> None:
        out = b""
        for event in events:
            lines = [self._line(answer, line) for line in event.split(b"\n")]
            kept = b"\n".join(line for line in lines if line is not None)
            out += kept and kept + b"\n\n"
        if out:
            self._write(out)

    def _line(self, answer: ParsedAnswer, line: bytes) -> bytes | None:
        """A line of an event as it goes out, None for one that waits for the end of all."""
        if line == _DONE:
            answer.is_done = True
            return None
        if not line.startswith(b"data: {"):
            return line
        try:
            chunk = json.loads(line[6:])
        except ValueError:
            return line
        self._adapt(answer, chunk)
        if chunk.get("choices") == [] and chunk.get("usage"):
            self._last = chunk
            return None
        return b"data: " + _encoded(chunk)

    def _adapt(self, answer: ParsedAnswer, chunk: dict[str, Any]) -> None:
        """Make a chunk, or an answer, of one choice that of all."""
        for name in ("id", "created"):
            if name in chunk:
                chunk[name] = self._stamp.setdefault(name, chunk[name])
        for choice in chunk.get("choices") or ():
            choice["index"] = choice.get("index", 0) * len(self._answers) + answer.index
        if chunk.get("usage"):
            self._usages[answer.index] = chunk["usage"]
            chunk["usage"] = merged_usage([self._usages[index] for index in sorted(self._usages)])

    # The end.

    def _end(self) -> None:
        if not self._begun:
            try:
                merged = self._merged()
            except (ValueError, KeyError, TypeError, AttributeError):
                self._fail("an answer is not in OpenAI's form")
            else:
                self._finish(merged)
            return
        out = b"" if self._last is None else b"data: " + _encoded(self._last) + b"\n\n"
        if all(answer.is_done for answer in self._answers):
            out += _DONE + b"\n\n"
        if out:
            self._write(out)
        self._finish(b"0\r\n\r\n" if self._chunked else b"")

    def _merged(self) -> bytes:
        """The answer made of answers that are not streamed."""
        first = self._answers[0]
        bodies = [json.loads(answer.body) for answer in self._answers]
        for answer, body in zip(self._answers, bodies, strict=True):
            self._adapt(answer, body)
        choices = sorted((one for body in bodies for one in body["choices"]), key=lambda one: int(one["index"]))
        whole = {**bodies[0], "choices": choices}
        if bodies[-1].get("usage"):
            whole["usage"] = bodies[-1]["usage"]
        extensions = [body.get("nvext") for body in bodies]
        if any(extensions):
            whole["nvext"] = {"choices": extensions}
        return _whole(200, first.headers, _encoded(whole))

    def _write(self, data: bytes) -> None:
        self._client.received(self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _finish(self, data: bytes) -> None:
        self.abort()
        if data:
            self._client.received(data)
        self._client.answered(self._begun and not self._chunked)


def merged_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The usage of all choices: the prompt counts once, their tokens add up.

    Args:
        usages: OpenAI's ``usage`` of each choice, at least one.
    """
    merged = dict(usages[0])
    merged["completion_tokens"] = sum(each.get("completion_tokens", 0) for each in usages)
    merged["total_tokens"] = merged.get("prompt_tokens", 0) + merged["completion_tokens"]
    details = [each.get("completion_tokens_details") for each in usages]
    if any(details):
        names = {name for each in details if each for name in each}
        merged["completion_tokens_details"] = {
            name: sum(each.get(name) or 0 for each in details if each) for name in sorted(names)
        }
    return merged


def _encoded(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def _head(status: int, headers: Mapping[bytes, bytes]) -> bytes:
    """Status line and headers of an answer but those of one connection; no empty line."""
    kept = b"".join(b"%b: %b\r\n" % each for each in headers.items() if each[0] not in HOP_BY_HOP)
    return b"HTTP/1.1 %d \r\n" % status + kept


def _whole(status: int, headers: Mapping[bytes, bytes], body: bytes) -> bytes:
    kind = {} if b"content-type" in headers else {b"content-type": b"application/json"}
    return _head(status, {**headers, **kind}) + b"content-length: %d\r\n\r\n" % len(body) + body
