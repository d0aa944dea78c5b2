"""Two frontends behind the front door, one of which hangs: it accepts, and answers nothing."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frontdoor_server import House, house, post, say_ok

from worker.frontdoor import upstreams as module
from worker.frontdoor.upstreams import SILENT_S, Upstream, UpstreamConnection, Upstreams


class Stopped:
    """A frontend that hangs until it is told to go on."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.goes_on.wait()
        await say_ok(reader, writer)


async def asked(at: House, number: int) -> list[asyncio.Task[bytes]]:
    """So many requests, each of which has reached a frontend."""
    tasks = []
    for _ in range(number):
        before = sum(len(each.requests) for each in at.frontends)
        tasks.append(asyncio.create_task(at.ask(post())))
        while sum(len(each.requests) for each in at.frontends) == before:
            await asyncio.sleep(0.001)
    return tasks


async def test_a_hung_frontend_gets_no_requests_until_it_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.2)
    stopped = Stopped()
    async with house(stopped, say_ok) as at:
        first = await asked(at, 4)
        hung = len(at.frontends[0].requests)
        assert 0 < hung < 4
        await asyncio.sleep(0.3)
        for _ in range(10):
            assert (await at.ask(post())).endswith(b"{}")
        assert len(at.frontends[0].requests) == hung
        stopped.goes_on.set()
        assert all(each.endswith(b"{}") for each in await asyncio.gather(*first))  # none was given up
        for _ in range(4):
            await at.ask(post())
        assert len(at.frontends[0].requests) > hung
        assert [len(each.waiting) for each in at.options.frontends] == [0, 0]


async def test_clients_that_leave_are_waited_for_no_more() -> None:
    async with house(Stopped(), Stopped()) as at:
        tasks = await asked(at, 4)
        assert sum(len(each.waiting) for each in at.options.frontends) == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while any(each.waiting for each in at.options.frontends):
            await asyncio.sleep(0.001)


async def test_where_all_hang_they_still_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or only compute for long: nothing is refused."""
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    slow = Stopped()
    async with house(slow, slow) as at:
        tasks = await asked(at, 8)
        assert [len(each.requests) for each in at.frontends] == [4, 4]
        slow.goes_on.set()
        assert all(each.endswith(b"{}") for each in await asyncio.gather(*tasks))


def another_connection() -> UpstreamConnection:
    return cast(UpstreamConnection, object())


@given(st.lists(st.sampled_from(["ask 0", "ask 1", "hear 0", "hear 1", "end 0", "end 1", "wait", "pick"]), max_size=60))
@settings(max_examples=examples(300))
def test_a_silent_frontend_is_never_before_an_answering_one(steps: list[str]) -> None:
    now = [1.0]
    two = [Upstream("a", 1), Upstream("b", 2)]
    pool = Upstreams(two, 1.0, now=lambda: now[0])
    since = [now[0], now[0]]
    for step in steps:
        verb, _, index = step.partition(" ")
        at = int(index or 0)
        if verb == "ask":
            since[at] = since[at] if two[at].waiting else now[0]
            two[at].asked(another_connection(), now[0])
        elif verb == "hear":
            since[at] = now[0]
            two[at].heard(another_connection(), now[0])
        elif verb == "end" and two[at].waiting:
            two[at].waiting.pop()
        elif verb == "wait":
            now[0] += SILENT_S / 2 + 0.01
        silent = [bool(each.waiting) and now[0] - since[which] > SILENT_S for which, each in enumerate(two)]
        turn = pool.in_turn()
        assert sorted(map(str, turn)) == sorted(map(str, two))
        if any(silent) and not all(silent):
            assert turn[0] is two[silent.index(False)]
