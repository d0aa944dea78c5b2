"""A request on its way to one frontend; its answer comes back unchanged, errors are explained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from worker.frontdoor.answering import Asker
from worker.frontdoor.ending import Ending
from worker.frontdoor.errors import Refused
from worker.frontdoor.http import INTERIM, AnswerEnd
from worker.frontdoor.opening import Opening
from worker.frontdoor.upstreams import NoUpstream, Upstream, UpstreamConnection, Upstreams

REPEATABLE = 64 * 1024
"""Size of the largest request that may take a kept connection: it is held until its answer begins,
in case the frontend has closed that connection.
"""


class ForwardedRequest:
    """One request to one frontend; an `Answer` whose bytes the client gets as they come.

    Args:
        client: Receiver of the answer.
        upstreams: The frontends.
        head_only: Whether the request is a HEAD.
        free: Called once the request is needed no more: it has been written to a connection, and
            its answer is no error that `refused` would be told of.
        added: Header lines to add to the answer, each with its CRLF.
        refused: Is told of the error that the answer is, which the client then does not get; None
            hands errors on too.
        late: Is told of the error that a stream ends with once it has begun, and has to end it;
            None hands it on.

    Attributes:
        connection: Connection that carries it, once there is one.
    """

    def __init__(
        self,
        client: Asker,
        upstreams: Upstreams,
        *,
        head_only: bool,
        free: Callable[[], None],
        added: bytes = b"",
        refused: Callable[[Refused], None] | None = None,
        late: Callable[[Refused], None] | None = None,
    ) -> None:
        self._client = client
        self._upstreams = upstreams
        self._head_only = head_only
        self._free = free
        self._added = added
        self._refused = refused
        self._opening = None if refused is None else Opening()
        self._late = late
        self._ending = Ending()
        self._status_line = b""  # what has come of it, where lines are added behind it
        self._repeatable: bytes | None = None  # the request, if it may have to be sent again
        self._connecting: asyncio.Task[None] | None = None
        self.connection: UpstreamConnection | None = None

    def ask(self, data: bytes) -> None:
        """Send the request: on a kept connection, unless it is too large to be held."""
        turn = self._upstreams.in_turn()
        if turn[0].idle and len(data) <= REPEATABLE:
            self.connection = turn[0].idle.pop()
            self._repeatable = data
            self._send(self.connection, data)
        else:
            self._connect(turn, data)

    def _connect(self, turn: Sequence[Upstream], data: bytes) -> None:
        self.connection = UpstreamConnection()
        self._connecting = asyncio.get_running_loop().create_task(self._ask_first(turn, self.connection, data))

    async def _ask_first(self, turn: Sequence[Upstream], connection: UpstreamConnection, data: bytes) -> None:
        try:
            await self._upstreams.connect(turn, connection)
        except NoUpstream:
            self._connecting = self.connection = None
            self._client.unreachable()
            return
        if self.connection is not connection:  # a cancellation may come too late to be noticed
            connection.abort()
            return
        self._connecting = None
        self._send(connection, data)

    def _send(self, connection: UpstreamConnection, data: bytes) -> None:
        if self._opening is None:
            self._free()
        connection.begin(self, AnswerEnd(self._head_only), data)

    def received(self, data: bytes) -> None:
        """Hand on bytes of the answer."""
        self._repeatable = None
        if self._opening is not None:
            if not self._opening.take(data):
                return
            data, self._opening, self._refused = self._opening.held, None, None
            self._free()
        if self._late is not None:
            data = self._ending.take(data)
        if self._added:
            data = self._with_lines(self._status_line + data)
        self._client.received(data)

    def _with_lines(self, data: bytes) -> bytes:
        """``data``, which begins the answer, with the lines to add behind its first one."""
        line, end, rest = data.partition(b"\r\n")
        if not end:
            self._status_line = data
            return b""
        added, self._added, self._status_line = self._added, b"", b""
        return line + end + added + rest

    def answered(self, closes: bool) -> None:
        """The answer is complete; ``closes``: its end is that of the connection."""
        self.connection = None
        opening, refused = self._opening, self._refused
        if opening is not None and refused is not None and opening.is_error:
            refused(opening.error())
            return
        if opening is not None:
            self._client.received(opening.held)
        if not self._ends_with_error():
            self._client.answered(closes)

    def _ends_with_error(self) -> bool:
        """Whether an error is held back, which the client is then told."""
        if self._late is None or not self._ending.held:
            return False
        self._late(self._ending.error())
        return True

    def failed(self, begun: bool, reason: str) -> None:
        """The frontend has gone: ask it once more, if it had closed a kept connection before."""
        frontend = self.connection.upstream if self.connection is not None else None
        data, self._repeatable, self.connection = self._repeatable, None, None
        if frontend is not None and data is not None and not begun:
            self._connect([frontend], data)
        elif not self._ends_with_error():
            self._client.failed(begun and self._opening is None, reason)

    def pause(self) -> None:
        """Read no more for now."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Read again."""
        if self.connection is not None:
            self.connection.resume()

    def abort(self) -> None:
        """End the request. Idempotent."""
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def filler(self) -> bytes | None:
        """See `Answer.filler`."""
        is_held = self._opening is not None
        return INTERIM if self.connection is None or is_held else self.connection.filler()
