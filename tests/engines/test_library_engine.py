"""What engines on a library share: the table of requests, the death of the library, and its end."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from worker.engines import TokenDelta, library_engine
from worker.engines.delta_stream import DeltaStream
from worker.engines.library_engine import LibraryEngine
from worker.engines.request_table import RequestTable
from worker.errors import Draining, EngineBroken, InvalidRequest, ServingError


@dataclass(slots=True, eq=False)
class Asked(DeltaStream):
    """A request that writes down how it is ended."""

    request_id: str
    calls: list[str] = field(default_factory=list)

    def abort(self) -> None:
        self.calls.append("abort")

    def leave(self) -> None:
        self.calls.append("leave")

    def end(self, failure: ServingError) -> None:
        self.fail(failure)


class Engine(LibraryEngine[Asked]):
    library = "Any"

    def __init__(self) -> None:
        super().__init__(RequestTable())
        self.requests = self._requests
        self.told: list[str] = []
        self.tell_broken(self.told.append)

    def die(self, cause: str) -> None:
        self._break(cause)

    async def stop(self, llm: object) -> None:
        self._llm = llm
        await self._shut_down()
        assert self._llm is None


def test_a_late_release_spares_the_next_request_of_its_id() -> None:
    table: RequestTable[Asked] = RequestTable()
    first, second = Asked("a"), Asked("a")
    table.add(first)
    with pytest.raises(InvalidRequest, match="request_id: 'a' is in use by an unfinished request"):
        table.check("a")
    table.release(first)
    table.check("a")
    table.add(second)
    table.release(first)
    assert "a" in table
    table.abort("a")
    table.abort("unknown")
    assert (first.calls, second.calls) == (["leave", "leave"], ["abort"])


async def test_a_library_dies_once() -> None:
    engine, request = Engine(), Asked("a")
    engine.requests.add(request)
    request.put(TokenDelta([1]))
    engine.die("of this")
    engine.die("of that")
    assert engine.told == ["of this"]
    assert engine.num_unfinished() == 0
    assert (await anext(request)).token_ids == [1]
    with pytest.raises(EngineBroken, match="of this"):
        await anext(request)
    assert engine.migrate_all() == 0
    with pytest.raises(EngineBroken, match="of this"):
        engine.requests.check("b")


async def test_who_drains_is_refused_with_that() -> None:
    engine = Engine()
    engine.requests.add(Asked("a"))
    assert engine.migrate_all() == 1
    engine.die("while it drained")
    assert engine.told == ["while it drained"]
    with pytest.raises(Draining):
        engine.requests.check("b")


async def test_a_library_that_does_not_end_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library_engine, "SHUTDOWN_S", 0.01)
    ended = threading.Event()
    with caplog.at_level(logging.WARNING):
        await Engine().stop(SimpleNamespace(shutdown=ended.wait))
    ended.set()
    assert "Any did not shut down within 0.01 s" in caplog.text


async def test_a_silent_stream_is_kept_alive() -> None:
    engine, request = Engine(), Asked("a")
    engine.requests.add(request)
    waiting = asyncio.create_task(anext(request))
    engine.keep_alive()
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.keep_alive()
    assert (await waiting).is_empty
