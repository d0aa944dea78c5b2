"""Errors of workers behind OpenEngine that end an answer which has begun."""

from __future__ import annotations

from typing import Any

import pytest

from worker.frontdoor.errors import INVALID, Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.openengine.exchange import Engines, Request, _Answering
from worker.frontdoor.opening import streamed_error


class Written:
    """Stands for the connection to the rest of the front door."""

    def __init__(self) -> None:
        self.data = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass


LATE = [
    Refused(400, "logits processor choice: no token is left at position 7"),
    Refused(400, "top_p: must be nice", "top_p"),
    Refused(502, "the worker did not answer: its answer has no end", kind="server_error"),
    Refused(503, "no worker is ready", kind="server_error"),
    Refused(529, "the queue is full", kind="server_error"),
]


@pytest.mark.parametrize("refused", LATE, ids=lambda each: f"{each.status}-{each.param}")
async def test_an_error_behind_chunks_keeps_its_status(refused: Refused) -> None:
    """Whole answers are made of chunks, too: theirs was always a 500."""
    engines: Any = Engines(None, None, None, 0)  # type: ignore[arg-type]  # not asked
    connection: Any = Written()
    answering = _Answering(engines, Request("POST", CHAT, {}, b""), connection)
    answering._has_begun = True
    await answering.fail(refused)
    size, _, chunk = connection.data.partition(b"\r\n")
    found = streamed_error(chunk[: int(size, 16)])
    assert (found.status, found.message, found.param) == (refused.status, refused.message, refused.param)
    assert found.kind == (INVALID if refused.status == 400 else "server_error")
