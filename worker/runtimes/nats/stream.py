"""One answer on its way to a client: numbered messages, flow control, resending."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nats.errors import MaxPayloadError

from worker.errors import ServingError
from worker.runtimes.nats import protocol
from worker.runtimes.nats.protocol import CHUNK, END, ERROR, ERROR_CODE, ERROR_TEXT, HEARTBEAT, KIND, SEQUENCE

STALL_S = 30.0
"""Seconds without an acknowledgement after which a client that owes one is given up."""

ABSENT_S = 2.0
"""Seconds that a client may be absent, to connect again."""

RESEND_S = 0.25
"""Least time between two times that a client is sent everything again. A client asks with each
message that it cannot use; what is lost of the answer to that, heartbeats tell.
"""

MAX_DIGITS = 18
"""Digits of a sequence number at most."""

Headers = Mapping[str, str]


class Publisher(Protocol):
    """Sender of messages; a connection to NATS."""

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None: ...


class AnswerStream:
    """Sends the messages of one answer to its reply subject.

    With a window it keeps what the client has not acknowledged, stops sending when the window is
    full, and sends it again on request; without one it sends at once and keeps nothing.

    Args:
        connection: Sender of the messages.
        subject: Reply subject of the client.
        acknowledge: Subject of acknowledgements; the server itself answers to it where no client
            subscribes to `subject` any more. Empty for an answer without any.
        window: Messages ahead of the acknowledgements, 0 for any number.
        gone: Called once when the client has gone.
        clock: Monotonic, seconds.

    Attributes:
        ended: Whether `END` or `ERROR` has been sent.
        last_sent_s: Monotonic time of the last message.
    """

    def __init__(
        self,
        connection: Publisher,
        subject: str,
        acknowledge: str,
        window: int,
        gone: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._acknowledge = acknowledge
        self._window = window
        self._gone = gone
        self._clock = clock
        self._sequence = 0
        self._kept: deque[tuple[int, dict[str, str], bytes]] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self._waiting_since_s: float | None = None
        self._absent_since_s: float | None = None
        self._absent_last_s = 0.0
        self._resent_s = float("-inf")
        self.ended = False
        self.is_gone = False
        self.last_sent_s = clock()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do: it has ended and is acknowledged, or no client listens."""
        return self.is_gone or (self.ended and not self._kept)

    async def send(self, chunk: Mapping[str, Any]) -> None:
        """Send a chunk, as soon as the window has room; where no message can hold it, in halves.

        The engine puts all that a slow client has not taken into one chunk.

        Raises:
            MaxPayloadError: it is too large with one token.
        """
        try:
            await self._put(protocol.encoded(chunk), {KIND: CHUNK})
        except MaxPayloadError:
            halves = protocol.halves(chunk)
            if not halves:
                raise
            for half in halves:
                await self.send(half)

    async def end(self) -> None:
        """Send that the answer is complete."""
        await self._put(b"", {KIND: END}, ends=True)

    async def fail(self, error: ServingError) -> None:
        """Send that the answer has ended with an error."""
        body = protocol.error_body(error)
        headers = {KIND: ERROR, ERROR_CODE: str(body["code"]), ERROR_TEXT: protocol.header_text(body["message"])}
        await self._put(protocol.encoded({"error": body}), headers, ends=True)

    async def _put(self, data: bytes, headers: dict[str, str], *, ends: bool = False) -> None:
        if self.ended or self.is_gone:
            return
        if not ends:  # the last message is sent at any rate: the client waits for it
            await self._room.wait()
        headers[SEQUENCE] = str(self._sequence)
        self._sequence += 1
        if self._window:
            self._kept.append((self._sequence - 1, headers, data))
        try:
            await self._publish(data, headers)
        except BaseException:  # it was never sent, and the next message takes its place
            self._sequence -= 1
            if self._kept and self._kept[-1][0] == self._sequence:
                self._kept.pop()
            raise
        self.ended = ends
        self._look_at_window()

    def _look_at_window(self) -> None:
        """Note, after a message or an acknowledgement, whether the window has room."""
        is_full = len(self._kept) >= self._window > 0
        if is_full and not self.is_gone:
            self._room.clear()
        else:
            self._room.set()
        self._waiting_since_s = self._clock() if is_full or (self.ended and self._kept) else None

    async def _publish(self, data: bytes, headers: dict[str, str]) -> None:
        self.last_sent_s = self._clock()
        await self._connection.publish(self._subject, data, self._acknowledge, headers)

    async def heartbeat(self) -> None:
        """Say that the worker is alive, if nothing else has for a while; and look after a client
        that has not been heard of.
        """
        now = self._clock()
        if now - self._absent_last_s > ABSENT_S:
            self._absent_since_s = None  # messages since then found a listener
        if self._waiting_since_s is not None and now - self._waiting_since_s > STALL_S:
            self.give_up()
        elif now - self.last_sent_s >= protocol.HEARTBEAT_S and not self.is_settled:
            await self._publish(b"", {KIND: HEARTBEAT, SEQUENCE: str(self._sequence)})

    async def acknowledged(self, headers: Headers) -> None:
        """Take a message of the subject of acknowledgements."""
        if headers.get("Status") == "503":  # the server's: no client listens to the answer
            self._note_absence()
            return
        if headers.get(KIND) == protocol.GONE:
            self.give_up()
            return
        text = headers.get(SEQUENCE, "")
        if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) > self._sequence:
            return
        self._absent_since_s = None
        while self._kept and self._kept[0][0] < int(text):
            self._kept.popleft()
        self._look_at_window()
        now = self._clock()
        if headers.get(KIND) == protocol.RESUME and now - self._resent_s >= RESEND_S:
            self._resent_s = now
            for _, kept_headers, data in tuple(self._kept):
                await self._publish(data, kept_headers)

    def _note_absence(self) -> None:
        """A client with a window may come back and ask for what was kept; others are gone."""
        now = self._absent_last_s = self._clock()
        if self._absent_since_s is None:
            self._absent_since_s = now
        if not self._window or now - self._absent_since_s > ABSENT_S:
            self.give_up()

    def give_up(self) -> None:
        """Send nothing more, and keep nothing: the client has gone, or cannot be told the end."""
        if not self.is_gone:
            self.is_gone = True
            self._kept.clear()
            self._room.set()
            self._gone()
