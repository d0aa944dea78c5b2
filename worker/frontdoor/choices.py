"""Several choices of one request: a request to the frontends for each, one answer made of theirs.

Dynamo's unified backend ends a request at its first finish reason, so that a worker cannot answer
several choices at once. Each choice is a request of its own: with its own row in the batch, its
own random numbers (`Selection.choice`) and its own migration; their prompts share KV.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from worker.frontdoor.answering import Asker
from worker.frontdoor.answers import ParsedAnswer
from worker.frontdoor.choice_merge import ChoiceMerge
from worker.frontdoor.choice_requests import ChoiceRequests
from worker.frontdoor.errors import Refused
from worker.frontdoor.frontend_errors import error_of
from worker.frontdoor.http import COMMENT, HOP_BY_HOP, INTERIM, chunk
from worker.frontdoor.opening import begins_with_error, streamed_error
from worker.frontdoor.upstreams import Upstreams

MAX_ANSWER = 64 * 2**20
"""Bytes of all answers together that are not streamed, and of an event."""


class Choices:
    """One `Answer` made of those to the requests for each choice.

    The first head decides its kind: an error of one choice is the answer, a stream has the events
    of all as they come, and other answers are merged once all have come.

    Args:
        client: Receiver of the answer.
        requests: A request per choice, head and body.
        chunked: Whether the client reads a chunked body; else a stream ends with its connection.
        added: Header lines to add to the answer, each with its CRLF.
        refused: Is told of the error that the answer is, which the client then does not get.
        late: Is told of the error that ends one of the streams once the client's has begun, and has
            to end that; None hands it on.
    """

    def __init__(
        self,
        client: Asker,
        requests: Sequence[bytes],
        *,
        chunked: bool,
        refused: Callable[[Refused], None],
        late: Callable[[Refused], None] | None = None,
        added: bytes = b"",
    ) -> None:
        self._client = client
        self._chunked = chunked
        self._refused = refused
        self._late = late
        self._added = added
        self._framed = chunk if chunked else _unframed
        self._requests = ChoiceRequests(self, requests, self._unreachable)
        self._merge = ChoiceMerge(len(requests))
        self._first: ParsedAnswer | None = None
        self._num_bytes = 0
        self._begun = False
        self._over = False

    def ask(self, upstreams: Upstreams) -> None:
        """Send the requests, each on a connection of its own."""
        self._requests.ask(upstreams)

    # An `Answer` of the client's connection.

    def pause(self) -> None:
        """Read no more for now."""
        self._requests.pause()

    def resume(self) -> None:
        """Read again."""
        self._requests.resume()

    def abort(self) -> None:
        """End all requests. Idempotent."""
        self._over = True
        self._requests.abort()

    def filler(self) -> bytes | None:
        """See `Answer.filler`."""
        return self._framed(COMMENT) if self._begun else INTERIM

    # A `Whole` of the choices' answers.

    def headed(self, answer: ParsedAnswer) -> None:
        """The head of an answer has come."""
        if self._first is None:
            self._first = answer
        if answer.status == 200:
            return
        if self._begun:
            answer.collects = True
        else:
            self._first = answer
            self._requests.keep(answer)

    def _begins(self, answer: ParsedAnswer) -> bool:
        """Whether the client's stream has begun, as it does with the first event; an error before
        it is the answer.
        """
        if not self._begun:
            found = begins_with_error(answer.body)
            if found:
                answer.collects, answer.status = True, 500
                self._first = answer
                self._requests.keep(answer)
            if found is not False:
                return False
            self._begun = True
            framing = b"transfer-encoding: chunked\r\n" if self._chunked else b"connection: close\r\n"
            self._client.received(_head(200, answer.headers) + self._added + framing + b"\r\n")
        return True

    def data(self, answer: ParsedAnswer, data: bytes) -> None:
        """Bytes of an answer's body."""
        if self._over:
            return
        answer.take(data)
        if answer.status == 200 and answer.is_stream and not answer.collects and self._begins(answer):
            events = answer.taken_events()
            error = None if self._late is None else next(filter(begins_with_error, events), None)
            if error is not None:
                del events[events.index(error) :]
            self._client.received(self._framed(self._merge.events(answer.index, events)))
            if error is not None and self._late is not None:
                self.abort()
                self._late(streamed_error(error))
                return
        self._num_bytes += len(data)
        if answer.num_bytes > MAX_ANSWER or (not self._begun and self._num_bytes > MAX_ANSWER):
            self.failed(answer, f"an answer beyond {MAX_ANSWER} bytes")

    def ended(self, answer: ParsedAnswer) -> None:
        """An answer is complete."""
        answer.ended = True
        if self._over:
            return
        last: bytes | None = None
        if self._first is not None and self._first.status != 200:
            self.abort()
            self._refused(streamed_error(answer.body) if answer.collects else error_of(answer.status, answer.body))
        elif answer.collects:
            refused = error_of(answer.status, answer.body)
            if self._late is not None:
                self.abort()
                self._late(refused)
                return
            self._client.received(self._framed(b"data: %b\n\n" % json.dumps(refused.content()).encode()))
            self.failed(answer, f"choice {answer.index} was answered with {answer.status}")
        else:
            if self._begun and answer.body:  # an event without an empty line behind it
                self._client.received(self._framed(self._merge.events(answer.index, [answer.body])))
            if all(each.ended for each in self._requests.answers):
                last = self._end(answer)
        if last is not None:
            self.abort()
            self._client.received(last)
            self._client.answered(self._begun and not self._chunked)

    def failed(self, answer: ParsedAnswer, reason: str) -> None:
        """A frontend has gone before the end of its answer, or has answered nonsense."""
        if not self._over:
            self.abort()
            self._client.failed(self._begun, reason)

    def _unreachable(self) -> None:
        self.abort()
        if self._begun:
            self._client.failed(True, "no frontend can be reached")
        else:
            self._client.unreachable()

    def _end(self, answer: ParsedAnswer) -> bytes | None:
        """The client's last bytes when all answers are complete, None if they cannot be merged."""
        if self._begun:
            return self._framed(self._merge.end()) + (b"0\r\n\r\n" if self._chunked else b"")
        answers = self._requests.answers
        try:
            merged = self._merge.whole([each.body for each in answers])
        except (ValueError, KeyError, TypeError, AttributeError):
            self.failed(answer, "an answer is not in OpenAI's form")
            return None
        return self._whole(200, answers[0].headers, merged)

    def _whole(self, status: int, headers: Mapping[bytes, bytes], body: bytes) -> bytes:
        kind = {} if b"content-type" in headers else {b"content-type": b"application/json"}
        head = _head(status, {**headers, **kind}) + self._added
        return head + b"content-length: %d\r\n\r\n" % len(body) + body


def _unframed(data: bytes) -> bytes:
    return data


def _head(status: int, headers: Mapping[bytes, bytes]) -> bytes:
    """Status line and headers of an answer but those of one connection; no empty line."""
    kept = b"".join(b"%b: %b\r\n" % each for each in headers.items() if each[0] not in HOP_BY_HOP)
    return b"HTTP/1.1 %d \r\n" % status + kept
