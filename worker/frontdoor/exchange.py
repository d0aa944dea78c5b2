"""One request of a client and its answer, for handlers that are coroutines.

Ordinary chats and completions are forwarded byte for byte, by `ForwardedRequest`. What has to be
translated, or is answered by the front door itself, has a handler: a coroutine that gets an
`Exchange`, reads the request's fields, and writes one answer, whole or as a stream of events.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from worker.frontdoor.answering import Asker
from worker.frontdoor.bodies import Body
from worker.frontdoor.encoding import encoded, encoded_in_turns
from worker.frontdoor.errors import Refused, internal_error
from worker.frontdoor.http import COMMENT, INTERIM, Document, chunk, stream_head
from worker.frontdoor.query import query_of
from worker.frontdoor.request_intake import AdmittedRequest
from worker.frontdoor.request_reader import Head
from worker.frontdoor.requests import parsed
from worker.frontdoor.rewriting import AT_ONCE
from worker.frontdoor.server import FrontDoor
from worker.frontdoor.uploads import Upload

logger = logging.getLogger(__name__)

Handler = Callable[["Exchange"], Awaitable[None]]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""Last event of a stream in OpenAI's form."""

_EVENTS = b"text/event-stream"


class Client(Asker, Protocol):
    """Connection of the client."""

    def own_headers(self) -> bytes:
        """Header lines that every answer has, each with its CRLF."""

    def written(self, status: int, document: Document) -> bytes:
        """Bytes of a whole answer."""

    def refused(self, refused: Refused) -> None:
        """Answer with an error; nothing of the answer has been sent."""


class Exchange:
    """One request, and the one answer to it; an `Answer` of the client's connection.

    Args:
        client: Connection of the client.
        door: State that all connections share.
        request: The admitted request.
        body: Bytes of its body.
        fields: The body's JSON object, if it has been parsed.
        held: Room that the body takes up; it is freed after the answer.

    Attributes:
        door: State that all connections share.
        request: The admitted request.
        head: Request line and headers.
        path: Target without the query.
        names: Values of the placeholders in the path of the route, as ``{"id": "resp_1"}``.
        owner: Label of the client: what one owner stores is invisible to others.
        request_id: Value of ``x-request-id``, the client's own or a new one.
        upload: The body of an upload, None of another request.
        has_begun: Whether bytes of the answer have been written.
    """

    def __init__(
        self,
        client: Client,
        door: FrontDoor,
        request: AdmittedRequest,
        body: bytes,
        fields: dict[str, Any] | None = None,
        held: Body | Upload | None = None,
    ) -> None:
        self.door = door
        self.head: Head = request.head
        self.path = request.path
        self.names: Mapping[str, str] = request.route.names(request.path)
        self.owner = request.label.decode()
        self.request_id = request.request_id.decode()
        self.has_begun = False
        self.body = body
        self.upload = held if isinstance(held, Upload) else None
        self.request = request
        self._fields = fields
        self._held = held
        self._client = client
        self._is_chunked = request.has_version_1_1
        self._is_event_stream = False
        self._has_ended = False
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._task: asyncio.Task[None] | None = None

    def run(self, handler: Handler) -> None:
        """Begin to answer."""
        self._task = asyncio.get_running_loop().create_task(self._run(handler))
        self._task.add_done_callback(lambda _: self.take_room()())

    def take_room(self) -> Callable[[], None]:
        """The room of the body is held beyond the answer, until the result is called."""
        held, self._held = self._held, None
        return _nothing if held is None else held.free

    async def _run(self, handler: Handler) -> None:
        try:
            if len(self.body) > AT_ONCE and self._fields is None and not self._has_other_content:
                self._fields = await self.door.rewriting.aside(self.request.label, partial(parsed, self.body))
            await handler(self)
            if not self._has_ended:
                raise RuntimeError(f"the handler of {self.path} did not answer")
        except Refused as refused:
            self._fail(refused)
        except Exception:  # the request's boundary
            logger.exception("request %s failed", self.request_id)
            self._fail(internal_error())

    def _fail(self, refused: Refused) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if self.has_begun:
            self._client.failed(True, refused.message)
        else:
            self._client.refused(refused)

    @property
    def _has_other_content(self) -> bool:
        return not self.head.headers.get(b"content-type", b"").lower().startswith(b"application/json")

    # The request.

    @cached_property
    def query(self) -> Mapping[str, str]:
        """The parameters of the query, decoded.

        Raises:
            Refused: 400, one occurs twice.
        """
        return query_of(self.head.target)

    def fields(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            Refused: 400, it is none, or one that two parsers may read in two ways; 415, its content
                type is another than JSON's, which a web page of any origin may send.
        """
        if self._has_other_content:
            raise Refused(415, "the body must have the content type application/json", "content-type")
        return self.json

    @property
    def json(self) -> dict[str, Any]:
        """The body as a JSON object, whatever its content type. Raises `Refused` (400)."""
        if self._fields is None:
            self._fields = parsed(self.body)
        return self._fields

    async def read(self, read: Callable[[dict[str, Any]], T]) -> T:
        """The result of ``read``, which looks at all of `fields`: those of a large body beside the
        event loop. Raises as both.
        """
        call = partial(read, self.fields())
        return await self.door.rewriting.by_size(self.request.label, len(self.body), call)

    # The answer.

    async def answer(self, status: int, content: Any, *, content_type: bytes = b"application/json") -> None:
        """Write a whole answer.

        Args:
            status: HTTP status.
            content: Bytes, or what is encoded as JSON.
            content_type: Value of that header.
        """
        body = content if isinstance(content, bytes) else await encoded_in_turns(content)
        self.has_begun = self._has_ended = True
        self._client.received(self._client.written(status, Document(content_type, body)))
        self._client.answered(closes=False)

    async def begin_events(self, content_type: bytes = _EVENTS) -> None:
        """Write the head of an answer of unknown length, status 200."""
        self.has_begun = True
        self._is_event_stream = content_type == _EVENTS
        self._client.received(stream_head(content_type, self._client.own_headers(), chunked=self._is_chunked))

    def continue_events(self) -> None:
        """Go on with a stream of events whose head and first events have been passed on."""
        self.has_begun = self._is_event_stream = True

    async def send(self, data: bytes) -> None:
        """Write bytes of the body, once the client keeps up; the first begin a stream of events."""
        if not self.has_begun:
            await self.begin_events()
        await self._may_send.wait()
        self._client.received(chunk(data) if self._is_chunked else data)

    async def send_event(self, content: Any) -> None:
        """Write an event of a stream, which may be large; see `server_sent`."""
        await self.send(b"data: %b\n\n" % await encoded_in_turns(content))

    async def end(self) -> None:
        """End an answer of unknown length."""
        self._has_ended = True
        if self._is_chunked:
            self._client.received(b"0\r\n\r\n")
        self._client.answered(closes=not self._is_chunked)

    @asynccontextmanager
    async def streaming(self, failed: Callable[[Refused], bytes]) -> AsyncIterator[None]:
        """End a stream of events when its last one has been written. An error before the first is
        the answer, and a later one ends the stream.

        Args:
            failed: Function from an error to the last bytes of a stream.

        Raises:
            Refused: nothing has been written.
        """
        try:
            yield
        except Refused as refused:
            if not self.has_begun:
                raise
            await self.send(failed(refused))
        await self.end()

    # An `Answer` of the client's connection.

    def pause(self) -> None:
        """Write no more for now: the client does not keep up."""
        self._may_send.clear()

    def resume(self) -> None:
        """Write again."""
        self._may_send.set()

    def abort(self) -> None:
        """End the handler: the client has gone. Idempotent."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def filler(self) -> bytes | None:
        """See `Answer.filler`."""
        if not self.has_begun:
            return INTERIM
        if not self._is_event_stream:
            return None
        return chunk(COMMENT) if self._is_chunked else COMMENT


def _nothing() -> None:
    """Free no room."""


def server_sent(content: Any, name: str | None = None) -> bytes:
    """A server-sent event with JSON as its data.

    Args:
        content: The data.
        name: Type of the event, None for one without.
    """
    line = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (line, encoded(content))


def annotation_event(name: str, value: Any) -> bytes:
    """The event of an annotation, as Dynamo's frontend has it: JSON in a comment."""
    return f"event: {name}\n: {json.dumps(value)}\n\n".encode()


def error_event(refused: Refused) -> bytes:
    """The event of an error in OpenAI's form."""
    return server_sent(refused.content())
