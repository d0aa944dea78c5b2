"""The grammar queue: levels, round robin over clients, the bound. No process, no clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.grammars.sandbox.feedback_queue import FeedbackQueue, Level, QueueEntry, levels_up_to

ONE = (Level(1.0, 1, 0),)


def drained(queue: FeedbackQueue[QueueEntry]) -> list[Any]:
    """Clients in the order in which their entries run, until none waits."""
    order = []
    while (entry := queue.take()) is not None:
        order.append(entry.client)
        queue.remove(entry)
    return order


def test_clients_take_turns_however_many_each_one_sends() -> None:
    queue: FeedbackQueue[QueueEntry] = FeedbackQueue(ONE, 100)
    for client in "aaaaabbc":
        queue.add(QueueEntry(client))
    assert "".join(drained(queue)) == "abcabaaa"


def test_the_quick_do_not_wait_for_the_slow() -> None:
    queue: FeedbackQueue[QueueEntry] = FeedbackQueue((Level(0.1, 1, 0), Level(2.0, 1, 5)), 100)
    slow = [QueueEntry(f"bomb {i}") for i in range(20)]
    for entry in slow:
        queue.add(entry)
    for entry in slow:  # each has its short try, and is over it
        assert queue.take() is entry
        assert queue.promote(entry)
    running = queue.take()
    assert running is slow[0]
    assert running.level == 1
    newcomer = QueueEntry("newcomer")
    queue.add(newcomer)
    assert queue.take() is newcomer
    assert queue.take() is None


def test_over_the_last_levels_time_is_the_end() -> None:
    queue: FeedbackQueue[QueueEntry] = FeedbackQueue((Level(0.1, 1, 0), Level(2.0, 1, 5)), 100)
    entry = QueueEntry("a")
    queue.add(entry)
    assert queue.take() is entry
    assert queue.promote(entry)
    assert (entry.level, entry.is_running, queue.num_waiting) == (1, False, 1)
    assert queue.take() is entry
    assert not queue.promote(entry)
    assert (queue.num_waiting, queue.num_running) == (0, 0)


def test_one_client_never_has_every_slot_of_a_level() -> None:
    queue: FeedbackQueue[QueueEntry] = FeedbackQueue((Level(1.0, 3, 0),), 100)
    for client in "aaab":
        queue.add(QueueEntry(client))
    taken = [queue.take() for _ in range(3)]
    assert sorted(entry.client for entry in taken if entry is not None) == ["a", "a", "b"]  # type: ignore[type-var]
    assert queue.take() is None


def test_a_full_queue_refuses_whoever_waits_with_most() -> None:
    queue: FeedbackQueue[QueueEntry] = FeedbackQueue(ONE, 3)
    many = [QueueEntry("many") for _ in range(3)]
    for entry in many:
        assert queue.add(entry) is None
    few = QueueEntry("few")
    assert queue.add(few) is many[-1]
    again = QueueEntry("many")
    assert queue.add(again) is again
    assert drained(queue) == ["many", "few", "many"]


def test_an_entry_that_lost_its_slot_is_its_clients_next() -> None:
    queue: FeedbackQueue[QueueEntry] = FeedbackQueue(ONE, 10)
    first, second = QueueEntry("a"), QueueEntry("a")
    queue.add(first)
    queue.add(second)
    assert queue.take() is first
    queue.put_back(first)
    assert queue.take() is first


@pytest.mark.parametrize(("timeout_s", "cpu_s"), [(2.0, [0.025, 0.25, 2.0]), (0.2, [0.025, 0.2]), (0.01, [0.01])])
def test_the_last_level_has_the_whole_time(timeout_s: float, cpu_s: list[float]) -> None:
    assert [level.cpu_s for level in levels_up_to(timeout_s, 2)] == cpu_s


@pytest.mark.parametrize(("num_cpus", "slots"), [(1, 1), (2, 1), (3, 2), (64, 2)])
def test_slow_grammars_leave_a_core_to_the_engine(num_cpus: int, slots: int) -> None:
    assert levels_up_to(2.0, num_cpus)[-1].slots == slots


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc")),
        st.tuples(st.sampled_from(["take", "end", "promote", "cancel", "put_back"]), st.integers(0, 9)),
    ),
    max_size=80,
)


@given(EVENTS)
def test_nothing_is_lost_and_no_bound_is_passed(events: list[tuple[str, Any]]) -> None:
    queue: FeedbackQueue[QueueEntry] = FeedbackQueue(levels_up_to(2.0, 4), 8)
    alive: list[QueueEntry] = []
    for event, argument in events:
        running = [entry for entry in alive if entry.is_running]
        if event == "add":
            entry = QueueEntry(argument)
            alive.append(entry)
            gone = queue.add(entry)
            if gone is not None:
                alive = [one for one in alive if one is not gone]
        elif event == "take":
            queue.take()
        elif event == "cancel" and alive:
            entry = alive.pop(argument % len(alive))
            queue.remove(entry)
        elif running:
            entry = running[argument % len(running)]
            if event == "put_back":
                queue.put_back(entry)
            elif event == "end" or not queue.promote(entry):
                queue.remove(entry)
                alive = [one for one in alive if one is not entry]
        assert {id(entry) for entry in queue} == {id(entry) for entry in alive}
        assert queue.num_running == sum(entry.is_running for entry in alive)
        assert queue.num_waiting == len(alive) - queue.num_running
        assert queue.num_waiting <= 8 + 5  # what had one of the five slots is never turned away
        for index, level in enumerate(queue.levels):
            here = [entry for entry in alive if entry.is_running and entry.level == index]
            assert len(here) <= level.slots
            assert all(count <= max(1, level.slots - 1) for count in Counter(t.client for t in here).values())
