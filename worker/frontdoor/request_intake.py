"""Requests of one client's connection until they can be answered: received, admitted, complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.frontdoor.bodies import Body
from worker.frontdoor.client_names import METADATA_HEADER
from worker.frontdoor.error_forms import ErrorForm
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.query import check_query
from worker.frontdoor.request_ids import ID_HEADERS, id_lines, new_request_id, request_id_of
from worker.frontdoor.request_reader import CLIENT_HEADER, Head, RequestReader
from worker.frontdoor.routes import Route
from worker.frontdoor.server import FrontDoor
from worker.frontdoor.uploads import Upload


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request whose head says that it may be answered.

    Attributes:
        head: Request line and headers.
        path: The target without its query.
        route: Row of the table of routes.
        label: Label of its client, for the workers.
        request_id: Value of ``x-request-id`` in its answer.
        has_key: Whether the label is that of an API key.
        is_preflight: Whether a browser asks what a page of another origin may send.
        num_before: Choices of the same answer that others are asked for on its behalf.
    """

    head: Head
    path: str
    route: Route
    label: bytes
    request_id: bytes
    has_key: bool = False
    is_preflight: bool = False
    num_before: int = 0

    @property
    def has_version_1_1(self) -> bool:
        """Whether the client reads chunks, and answers before the answer proper."""
        return self.head.version == b"1.1"

    def forwarded(self, body: bytes, *, is_last: bool) -> bytes:
        """The request to a frontend; ``is_last``: its connection ends with the answer."""
        has_body = bool(body) or b"content-length" in self.head.headers
        close = is_last or not self.has_version_1_1
        num_bytes = len(body) if has_body else None
        return self.head.sent_on(num_bytes, close=close, without=ID_HEADERS, added=self._added()) + body

    def choices(self, bodies: Sequence[bytes]) -> list[bytes]:
        """The requests of several choices; the client's id is that of the first."""
        return self._of_choices(self.head, bodies)

    def translated(self, path: str, bodies: Sequence[bytes]) -> list[bytes]:
        """The requests of several choices for another path than the client's.

        Args:
            path: Path at the frontend.
            bodies: Body of the request for each choice.
        """
        return self._of_choices(self.head.translated(path.encode()), bodies)

    def _of_choices(self, head: Head, bodies: Sequence[bytes]) -> list[bytes]:
        return [
            head.sent_on(len(body), close=True, without=ID_HEADERS, added=self._added(choice)) + body
            for choice, body in enumerate(bodies)
        ]

    def _added(self, choice: int = 0) -> bytes:
        label = b"%b: %b\r\n" % (CLIENT_HEADER, self.label)
        return label + id_lines(self.head, self.request_id, self.label * self.has_key, self.num_before + choice)


class RequestIntake:
    """Reads the requests of one connection, one at a time, and refuses them as early as it can.

    Args:
        door: State that all connections share.

    Attributes:
        peer: Address of the client.
        head: Head of the request, once it has been read.
        request_id: Value of ``x-request-id`` in its answer; a new one before the head.
        error_form: Form of the bodies of errors, that of its path.
        has_begun: Whether bytes of the request have come.
    """

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._reader = RequestReader(door.max_body)
        self._request: AdmittedRequest | None = None
        self._body: Body | Upload | None = None
        self._awaits_continue = False
        self.peer = b""
        self.head: Head | None = None
        self.request_id = new_request_id()
        self.error_form: ErrorForm = "openai"
        self.has_begun = False

    @property
    def num_ahead(self) -> int:
        """Bytes that have come and have not been read."""
        return self._reader.num_pending

    @property
    def has_next(self) -> bool:
        """Whether bytes have come behind a complete request."""
        return bool(self._reader.trailing)

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._reader.feed(data)
        self.has_begun = True

    def next(self, too_slow: Callable[[Refused], None]) -> tuple[AdmittedRequest, bytes] | None:
        """The complete request with its body, None until it is there.

        Args:
            too_slow: Ends the request if its body has to make room for others.

        Raises:
            Refused: it cannot be answered.
        """
        while (part := self._reader.next()) is not None:
            if isinstance(part, Head):
                self._begin(part, too_slow)
                continue
            assert self._request is not None
            assert self._body is not None
            if part is RequestReader.END:
                return self._request, self._body.take()
            self._body.add(part)
        return None

    def _begin(self, head: Head, too_slow: Callable[[Refused], None]) -> None:
        self.head, self.request_id = head, request_id_of(head, self.request_id)
        if not head.target.startswith(b"/"):
            raise Refused(400, "the request's target must be a path")
        path = head.target.partition(b"?")[0].decode("latin-1")
        self.error_form = self._door.error_form(path)
        route, label = self._door.admit(head, path, self.peer)
        if route.query is not None:
            check_query(head.target, route.query)
        self._request = AdmittedRequest(
            head, path, route, label, self.request_id, self._door.needs_keys, self._door.cors.is_preflight(head)
        )
        bodies = self._door.uploads_for(route, head) or self._door.bodies
        if head.num_bytes > bodies.largest:
            raise Refused(413, f"the body has more than {bodies.largest} bytes")
        head.check_connection_options()
        self._reader.allow(bodies.largest)
        self._body = bodies.begin(too_slow)
        self._awaits_continue = head.awaits_continue
        if head.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refused(415, "a compressed body is not supported", "content-encoding")
        if len(head.values(METADATA_HEADER)) > 1:
            raise FieldRefused(METADATA_HEADER.decode(), "comes twice, and Dynamo's frontend drops the second")

    def keep_body(self) -> None:
        """Have the complete body stay in memory until `free_body`, while its request is answered.

        Raises:
            Refused: 503, too many bodies stay.
        """
        if self._body is not None:
            self._body.hold()

    def hold_body(self) -> Body | Upload | None:
        """The complete body, which is the caller's to free once the request is answered; raises as
        `keep_body`.
        """
        self.keep_body()
        body, self._body = self._body, None
        return body

    def left_s(self) -> float | None:
        """Seconds until the body is too slow, None if none is being read."""
        return None if self._body is None else self._body.left_s()

    def takes_continue(self) -> bool:
        """Whether the client sends the body only after a 100; True once."""
        awaited, self._awaits_continue = self._awaits_continue, False
        return awaited

    def free_body(self) -> None:
        """Give the body's room back. Idempotent."""
        if self._body is not None:
            self._body.free()
            self._body = None

    def begin_next(self) -> None:
        """Go on to the request behind a complete one."""
        data = self._reader.trailing
        self.free_body()
        self._reader = RequestReader(self._door.max_body)
        self._request, self.head, self.has_begun = None, None, bool(data)
        self.request_id = new_request_id()
        if data:
            self._reader.feed(data)
