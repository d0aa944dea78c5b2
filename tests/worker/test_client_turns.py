"""Slots that clients take in turn: whoever sends much waits for itself, and whoever leaves holds
nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.requests.client_turns import ClientTurns


class Work:
    """Requests that hold slots until they are told to end."""

    def __init__(self, slots: int, spare: int = 0) -> None:
        self.slots, self.spare = slots, spare
        self.turns = ClientTurns(slots, spare)
        self.begun: list[str] = []
        self.running: dict[asyncio.Task[None], tuple[str, asyncio.Event]] = {}
        self.waiting: list[asyncio.Task[None]] = []

    def arrive(self, client: str) -> None:
        task = asyncio.create_task(self._run(client))
        self.waiting.append(task)

    async def _run(self, client: str) -> None:
        task, end = asyncio.current_task(), asyncio.Event()
        assert task is not None
        async with self.turns.turn(client):
            self.waiting.remove(task)
            self.begun.append(client)
            self.running[task] = client, end
            try:
                await end.wait()
            finally:
                del self.running[task]

    async def look(self) -> None:
        """Until nothing happens by itself."""
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(self.running) <= self.slots
        assert self.turns._taken == Counter(client for client, _ in self.running.values())
        self.waiting = [task for task in self.waiting if not task.done()]
        if self.waiting and len(self.running) < self.slots:  # the rest is not for the client that has all others
            assert len(self.running) == self.slots - self.spare
            assert len(self.turns._waiting) == len(self.turns._taken) == 1


async def test_clients_take_turns() -> None:
    work = Work(1)
    for client in "aaaabbc":
        work.arrive(client)
    while True:
        await work.look()
        if not work.running:
            break
        next(iter(work.running.values()))[1].set()
    assert "".join(work.begun) == "aabcaba"  # the second came before others did


async def test_requests_of_one_client_keep_their_order() -> None:
    turns, begun = ClientTurns(1), list[int]()

    async def take(number: int) -> None:
        async with turns.turn("a"):
            begun.append(number)

    async with turns.turn("b"):
        tasks = [asyncio.create_task(take(number)) for number in range(4)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert begun == [0, 1, 2, 3]


async def test_who_leaves_in_the_moment_of_its_turn_holds_nothing() -> None:
    turns = ClientTurns(1)

    async def take() -> None:
        async with turns.turn("a"):
            raise AssertionError("it has left")

    async with turns.turn("b"):
        tasks = [asyncio.create_task(take()) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks[1:])
        assert repr(turns) == "ClientTurns(1 of 1 taken, 1 waiting)"
    tasks[0].cancel()  # it has its turn, and does not know yet
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert repr(turns) == "ClientTurns(0 of 1 taken, 0 waiting)"


async def test_a_slot_is_left_to_other_clients() -> None:
    work = Work(4, spare=1)
    for client in "aaaaaaaab":
        work.arrive(client)
    await work.look()
    assert sorted(work.begun) == ["a", "a", "a", "b"]
    for task in [*work.running, *work.waiting]:
        task.cancel()
    await work.look()
    assert not work.turns._waiting


async def test_without_a_label_each_request_is_a_client() -> None:
    turns = ClientTurns(2)
    async with turns.turn(None), turns.turn(None):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), turns.turn(None):
                raise AssertionError("there are two slots")
    assert repr(turns) == "ClientTurns(0 of 2 taken, 0 waiting)"


async def test_a_thread_keeps_the_slot_of_who_left() -> None:
    turns, go_on, begun = ClientTurns(2, spare=1), threading.Event(), list[str]()

    def work(name: str) -> str:
        begun.append(name)
        assert name == "b" or go_on.wait(100)
        return name

    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):  # the first begins, and all leave
            tasks = [asyncio.create_task(turns.in_thread("a", threads, lambda: work("a"))) for _ in range(3)]
            while not begun:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await asyncio.wait_for(turns.in_thread("b", threads, lambda: work("b")), 10) == "b"
        assert begun == ["a", "b"]
        go_on.set()
        assert await asyncio.wait_for(turns.in_thread("a", threads, lambda: work("a")), 10) == "a"
    assert repr(turns) == "ClientTurns(0 of 2 taken, 0 waiting)"
    with pytest.raises(RuntimeError):
        await turns.in_thread("a", threads, lambda: None)
    assert repr(turns) == "ClientTurns(0 of 2 taken, 0 waiting)"


STEPS = st.lists(st.tuples(st.sampled_from(["arrive", "arrive", "end", "leave"]), st.integers(0, 99)), max_size=80)


@given(STEPS, st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 1)]))
@settings(max_examples=examples(200), deadline=None)
def test_slots_are_held_and_given_back(steps: list[tuple[str, int]], slots: tuple[int, int]) -> None:
    """Whoever ends or leaves, with a slot, without one, or in the moment in which it gets one."""

    async def run() -> None:
        work = Work(*slots)
        for step, number in steps:
            if step == "arrive":
                work.arrive("aaab"[number % 4] if number < 60 else "cde"[number % 3])
            elif step == "end" and work.running:
                list(work.running.values())[number % len(work.running)][1].set()
            elif step == "leave" and (tasks := [*work.running, *work.waiting]):
                task = tasks[number % len(tasks)]
                task.cancel()
                if task in work.waiting:
                    work.waiting.remove(task)
            if number % 3:
                await work.look()
        while work.running or work.waiting:
            await work.look()
            for _, end in work.running.values():
                end.set()
        await work.look()
        assert not work.turns._waiting
        assert not work.turns._taken

    asyncio.run(run())
