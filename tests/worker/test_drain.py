"""Admission and drain, with a fake engine and no clock to race against."""

from __future__ import annotations

import asyncio

import pytest

from worker.errors import Draining, InvalidRequest
from worker.lifecycle.drain import DrainOutcome, InFlightRequests, drain


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.FLUSH_S", 0.0)


class MigratesRequests:
    """What a drain needs of an engine."""

    def __init__(self, in_flight: InFlightRequests, ends_streams: bool = True) -> None:
        self.in_flight = in_flight
        self.ends_streams = ends_streams
        self.num_calls = 0

    def migrate_all(self) -> int:
        self.num_calls += 1
        for request_id in list(self.in_flight._by_id) if self.ends_streams else ():
            self.in_flight.release_id(request_id)
        return 0


async def test_admit_and_release() -> None:
    in_flight = InFlightRequests()
    in_flight.block_size = 16
    admitted = in_flight.admit("a", 17)
    assert (len(in_flight), in_flight.num_blocks) == (1, 2)
    in_flight.grow(admitted, 15)
    assert in_flight.num_blocks == 2
    in_flight.grow(admitted, 1)
    assert in_flight.num_blocks == 3
    in_flight.release(admitted)
    in_flight.release(admitted)
    in_flight.grow(admitted, 100)
    assert (len(in_flight), in_flight.num_blocks) == (0, 0)


async def test_an_id_in_flight_is_refused_and_its_request_is_untouched() -> None:
    in_flight = InFlightRequests()
    first = in_flight.admit("a", 1)
    with pytest.raises(InvalidRequest, match="'a' is being served already"):
        in_flight.admit("a", 1)
    assert len(in_flight) == 1
    in_flight.release(first)
    in_flight.admit("a", 1)


async def test_a_stream_closed_late_does_not_release_its_successor() -> None:
    in_flight = InFlightRequests()
    cancelled = in_flight.admit("a", 1)
    assert in_flight.release_id("a")
    assert not in_flight.release_id("a")
    in_flight.admit("a", 5)
    in_flight.release(cancelled)
    assert len(in_flight) == 1


def test_nothing_is_admitted_after_close() -> None:
    in_flight = InFlightRequests()
    in_flight.close()
    with pytest.raises(Draining):
        in_flight.admit("a", 1)


async def test_drain_of_an_idle_worker_is_immediate() -> None:
    in_flight = InFlightRequests()
    engine = MigratesRequests(in_flight)
    assert await drain(in_flight, engine, 1000) == DrainOutcome(0, 0)
    assert in_flight.closed
    assert engine.num_calls == 0


async def test_requests_that_finish_within_the_budget() -> None:
    in_flight = InFlightRequests()
    engine = MigratesRequests(in_flight)
    all_admitted = [in_flight.admit(name, 1) for name in "abc"]
    draining = asyncio.create_task(drain(in_flight, engine, 1000))
    await asyncio.sleep(0)
    assert in_flight.closed
    for admitted in all_admitted:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not draining.done()
        in_flight.release(admitted)
    assert await draining == DrainOutcome(3, 0)
    assert engine.num_calls == 0


async def test_the_rest_is_migrated_when_the_budget_is_spent() -> None:
    in_flight = InFlightRequests()
    engine = MigratesRequests(in_flight)
    finished = in_flight.admit("a", 1)
    in_flight.admit("b", 1)
    in_flight.release(finished)
    assert await drain(in_flight, engine, 0.01) == DrainOutcome(0, 1)
    assert engine.num_calls == 1
    assert len(in_flight) == 0


async def test_the_runtime_gets_time_to_send_the_last_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.FLUSH_S", 0.05)
    in_flight = InFlightRequests()
    loop = asyncio.get_running_loop()
    in_flight.release(in_flight.admit("a", 1))
    left = loop.time()
    await drain(in_flight, MigratesRequests(in_flight), 1000)
    assert loop.time() - left >= 0.04


async def test_a_second_signal_ends_the_wait() -> None:
    in_flight = InFlightRequests()
    engine = MigratesRequests(in_flight)
    in_flight.admit("a", 1)
    draining = asyncio.create_task(drain(in_flight, engine, 1000))
    await asyncio.sleep(0)
    in_flight.stop_waiting()
    assert await draining == DrainOutcome(0, 1)


async def test_streams_are_waited_for_while_their_requests_migrate() -> None:
    in_flight = InFlightRequests()
    admitted = in_flight.admit("a", 1)
    draining = asyncio.create_task(drain(in_flight, MigratesRequests(in_flight, ends_streams=False), 0))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not draining.done()
    in_flight.release(admitted)
    assert await draining == DrainOutcome(0, 1)


async def test_a_stream_that_never_ends_does_not_hold_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.MIGRATION_TIMEOUT_S", 0.01)
    in_flight = InFlightRequests()
    in_flight.admit("a", 1)
    assert await drain(in_flight, MigratesRequests(in_flight, ends_streams=False), 0) == DrainOutcome(0, 1)
