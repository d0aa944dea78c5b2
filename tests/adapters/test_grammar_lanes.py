"""Whose grammar compiles next: lanes, fair turns, the bounded queue. No process, no clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.grammars.lanes import Lane, Lanes, QueueEntry, lanes_up_to

ONE = (Lane(1.0, 1, 0),)


def drained(lanes: Lanes[QueueEntry]) -> list[Any]:
    """Whose turns run, one after the other, until nobody waits."""
    order = []
    while (turn := lanes.take()) is not None:
        order.append(turn.client)
        lanes.remove(turn)
    return order


def test_clients_take_turns_however_many_each_one_sends() -> None:
    lanes: Lanes[QueueEntry] = Lanes(ONE, 100)
    for client in "aaaaabbc":
        lanes.add(QueueEntry(client))
    assert "".join(drained(lanes)) == "abcabaaa"


def test_the_quick_do_not_wait_for_the_slow() -> None:
    lanes: Lanes[QueueEntry] = Lanes((Lane(0.1, 1, 0), Lane(2.0, 1, 5)), 100)
    slow = [QueueEntry(f"bomb {i}") for i in range(20)]
    for turn in slow:
        lanes.add(turn)
    for turn in slow:  # each has its short try, and is over it
        assert lanes.take() is turn
        assert lanes.promote(turn)
    running = lanes.take()
    assert running is slow[0]
    assert running.lane == 1
    newcomer = QueueEntry("newcomer")
    lanes.add(newcomer)
    assert lanes.take() is newcomer
    assert lanes.take() is None


def test_over_the_last_lanes_time_is_the_end() -> None:
    lanes: Lanes[QueueEntry] = Lanes((Lane(0.1, 1, 0), Lane(2.0, 1, 5)), 100)
    turn = QueueEntry("a")
    lanes.add(turn)
    assert lanes.take() is turn
    assert lanes.promote(turn)
    assert (turn.lane, turn.is_running, lanes.num_waiting) == (1, False, 1)
    assert lanes.take() is turn
    assert not lanes.promote(turn)
    assert (lanes.num_waiting, lanes.num_running) == (0, 0)


def test_one_client_never_has_every_slot_of_a_lane() -> None:
    lanes: Lanes[QueueEntry] = Lanes((Lane(1.0, 3, 0),), 100)
    for client in "aaab":
        lanes.add(QueueEntry(client))
    taken = [lanes.take() for _ in range(3)]
    assert sorted(turn.client for turn in taken if turn is not None) == ["a", "a", "b"]
    assert lanes.take() is None


def test_a_full_queue_refuses_whoever_waits_with_most() -> None:
    lanes: Lanes[QueueEntry] = Lanes(ONE, 3)
    many = [QueueEntry("many") for _ in range(3)]
    for turn in many:
        assert lanes.add(turn) is None
    few = QueueEntry("few")
    assert lanes.add(few) is many[-1]
    again = QueueEntry("many")
    assert lanes.add(again) is again
    assert drained(lanes) == ["many", "few", "many"]


def test_who_lost_a_slot_is_the_first_of_its_client_to_have_one_again() -> None:
    lanes: Lanes[QueueEntry] = Lanes(ONE, 10)
    first, second = QueueEntry("a"), QueueEntry("a")
    lanes.add(first)
    lanes.add(second)
    assert lanes.take() is first
    lanes.put_back(first)
    assert lanes.take() is first


@pytest.mark.parametrize(("timeout_s", "cpu_s"), [(2.0, [0.025, 0.25, 2.0]), (0.2, [0.025, 0.2]), (0.01, [0.01])])
def test_the_last_lane_has_the_whole_time(timeout_s: float, cpu_s: list[float]) -> None:
    assert [lane.cpu_s for lane in lanes_up_to(timeout_s)] == cpu_s


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc")),
        st.tuples(st.sampled_from(["take", "end", "promote", "cancel", "put_back"]), st.integers(0, 9)),
    ),
    max_size=80,
)


@given(EVENTS)
def test_nothing_is_lost_and_no_bound_is_passed(events: list[tuple[str, Any]]) -> None:
    lanes: Lanes[QueueEntry] = Lanes(lanes_up_to(2.0), 8)
    alive: list[QueueEntry] = []
    for event, argument in events:
        running = [turn for turn in alive if turn.is_running]
        if event == "add":
            turn = QueueEntry(argument)
            alive.append(turn)
            gone = lanes.add(turn)
            if gone is not None:
                alive = [one for one in alive if one is not gone]
        elif event == "take":
            lanes.take()
        elif event == "cancel" and alive:
            turn = alive.pop(argument % len(alive))
            lanes.remove(turn)
        elif running:
            turn = running[argument % len(running)]
            if event == "put_back":
                lanes.put_back(turn)
            elif event == "end" or not lanes.promote(turn):
                lanes.remove(turn)
                alive = [one for one in alive if one is not turn]
        assert {id(turn) for turn in lanes} == {id(turn) for turn in alive}
        assert lanes.num_running == sum(turn.is_running for turn in alive)
        assert lanes.num_waiting == len(alive) - lanes.num_running
        assert lanes.num_waiting <= 8 + 5  # what had one of the five slots is never turned away
        for index, lane in enumerate(lanes.lanes):
            here = [turn for turn in alive if turn.is_running and turn.lane == index]
            assert len(here) <= lane.slots
            assert all(count <= max(1, lane.slots - 1) for count in Counter(t.client for t in here).values())
