"""The gate and the drain, with a fake engine and no clock to race against."""

from __future__ import annotations

import asyncio

import pytest

from worker.errors import Draining, InvalidRequest
from worker.lifecycle.drain import DrainOutcome, Gate, drain


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.FLUSH_S", 0.0)


class MigratesRequests:
    """The one thing that a drain asks of an engine."""

    def __init__(self, gate: Gate, leave: bool = True) -> None:
        self.gate = gate
        self.leave = leave
        self.num_calls = 0

    def migrate_all(self) -> int:
        self.num_calls += 1
        for request_id in list(self.gate._inside) if self.leave else ():
            self.gate.evict(request_id)
        return 0


async def test_enter_and_leave() -> None:
    gate = Gate()
    gate.block_size = 16
    flight = gate.enter("a", 17)
    assert (len(gate), gate.num_blocks) == (1, 2)
    gate.grow(flight, 15)
    assert gate.num_blocks == 2
    gate.grow(flight, 1)
    assert gate.num_blocks == 3
    gate.leave(flight)
    gate.leave(flight)
    gate.grow(flight, 100)
    assert (len(gate), gate.num_blocks) == (0, 0)


async def test_an_id_in_flight_is_refused_and_the_first_is_untouched() -> None:
    gate = Gate()
    first = gate.enter("a", 1)
    with pytest.raises(InvalidRequest, match="'a' is being served already"):
        gate.enter("a", 1)
    assert len(gate) == 1
    gate.leave(first)
    gate.enter("a", 1)


async def test_a_stream_that_is_closed_late_does_not_evict_its_successor() -> None:
    gate = Gate()
    cancelled = gate.enter("a", 1)
    assert gate.evict("a")
    assert not gate.evict("a")
    gate.enter("a", 5)
    gate.leave(cancelled)
    assert len(gate) == 1


def test_a_closed_gate_admits_nobody() -> None:
    gate = Gate()
    gate.close()
    with pytest.raises(Draining):
        gate.enter("a", 1)


async def test_drain_of_an_idle_worker_is_immediate() -> None:
    gate = Gate()
    engine = MigratesRequests(gate)
    assert await drain(gate, engine, 1000) == DrainOutcome(0, 0)
    assert gate.closed
    assert engine.num_calls == 0


async def test_requests_that_finish_within_the_budget() -> None:
    gate = Gate()
    engine = MigratesRequests(gate)
    flights = [gate.enter(name, 1) for name in "abc"]
    draining = asyncio.create_task(drain(gate, engine, 1000))
    await asyncio.sleep(0)
    assert gate.closed
    for flight in flights:
        assert not draining.done()
        gate.leave(flight)
    assert await draining == DrainOutcome(3, 0)
    assert engine.num_calls == 0


async def test_the_rest_is_migrated_when_the_budget_is_spent() -> None:
    gate = Gate()
    engine = MigratesRequests(gate)
    finished = gate.enter("a", 1)
    gate.enter("b", 1)
    gate.leave(finished)
    assert await drain(gate, engine, 0.01) == DrainOutcome(0, 1)
    assert engine.num_calls == 1
    assert len(gate) == 0


async def test_the_runtime_gets_time_to_send_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.FLUSH_S", 0.05)
    gate = Gate()
    loop = asyncio.get_running_loop()
    gate.leave(gate.enter("a", 1))
    left = loop.time()
    await drain(gate, MigratesRequests(gate), 1000)
    assert loop.time() - left >= 0.04


async def test_a_second_signal_ends_the_wait() -> None:
    gate = Gate()
    engine = MigratesRequests(gate)
    gate.enter("a", 1)
    draining = asyncio.create_task(drain(gate, engine, 1000))
    await asyncio.sleep(0)
    gate.hurry()
    assert await draining == DrainOutcome(0, 1)


async def test_a_stream_that_never_ends_does_not_hold_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.MIGRATION_TIMEOUT_S", 0.01)
    gate = Gate()
    gate.enter("a", 1)
    assert await drain(gate, MigratesRequests(gate, leave=False), 0) == DrainOutcome(0, 1)
