"""Protocols between a client's connection, the answer to its request, and frontends."""

from __future__ import annotations

from typing import Protocol


class Client(Protocol):
    """Receiver of the bytes of one answer."""

    def received(self, data: bytes) -> None:
        """Take bytes of the answer. It may end the connection."""

    def answered(self, closes: bool) -> None:
        """The answer is complete; ``closes``: its end is that of the connection."""

    def failed(self, begun: bool, reason: str) -> None:
        """The frontend has gone before the end of the answer; ``begun``: bytes of it have come."""


class Asker(Client, Protocol):
    """Client whose request no frontend may take."""

    def unreachable(self) -> None:
        """No frontend can be reached; nothing has been sent."""


class Answer(Protocol):
    """Answer under way to an `Asker`."""

    def pause(self) -> None:
        """Read no more of it for now: the client does not keep up."""

    def resume(self) -> None:
        """Read again."""

    def abort(self) -> None:
        """End the request behind it: the client has gone. Idempotent."""

    def filler(self) -> bytes | None:
        """Bytes for the client that change nothing of its answer; None if none may be sent now."""
