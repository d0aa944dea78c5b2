"""Deadlines of answers: what comes before is given, and a cancellation is never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines import FinishReason, TokenDelta
from worker.requests.deadline import until


class Stream:
    """Deltas that come when they are let, and what became of their generator."""

    def __init__(self) -> None:
        self.let, self.ended = asyncio.Event(), False

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        try:
            while True:
                await self.let.wait()
                self.let.clear()
                yield TokenDelta(token_ids=[1])
        finally:
            self.ended = True


async def test_an_answer_ends_at_its_deadline_and_frees_its_stream() -> None:
    for ahead_s in (0.05, 0.0, -5.0):
        stream = Stream()
        stream.let.set()
        found = [delta async for delta in until(10 + ahead_s, stream.deltas(), lambda: 10.0)]
        assert [delta.finish_reason for delta in found][-1] == "length"
        assert [delta.token_ids for delta in found[:-1]] == ([[1]] if ahead_s > 0 else [])
        assert stream.ended == (ahead_s > 0)


@pytest.mark.parametrize(
    ("reasons", "expected", "is_cut_off"),
    [
        ([None, "stop", None], [None, "stop", None], False),
        ([None], [None], False),
        ([None, None, "stop"], [None, None, "length"], True),
    ],
)
async def test_what_the_engine_says_is_given_to_its_end(
    reasons: list[FinishReason | None], expected: list[FinishReason | None], is_cut_off: bool
) -> None:
    """Behind the finish, too, however late; a stream that goes on beyond the deadline is closed."""
    now_s, ended = [0.0], []

    async def deltas() -> AsyncIterator[TokenDelta]:
        try:
            for reason in reasons:
                yield TokenDelta(finish_reason=reason)
        finally:
            ended.append(True)

    found = []
    async for delta in until(2.0, deltas(), lambda: now_s[0]):
        found.append(delta.finish_reason)
        now_s[0] = float(len(found)) if is_cut_off or len(found) > 1 else 0.0
    assert found == expected
    assert ended == [True]


async def test_a_time_out_of_the_engine_is_no_deadline() -> None:
    async def deltas() -> AsyncIterator[TokenDelta]:
        yield TokenDelta(token_ids=[1])
        raise TimeoutError("the engine's")

    found = until(3600.0, deltas(), lambda: 0.0)
    assert (await anext(found)).finish_reason is None
    with pytest.raises(TimeoutError, match="the engine's"):
        await anext(found)


async def test_a_reader_that_leaves_ends_the_stream() -> None:
    """At once, and not when the garbage collector comes by: it holds a slot and KV."""
    stream = Stream()
    stream.let.set()
    found = until(10.0, stream.deltas(), lambda: 0.0)
    assert (await anext(found)).token_ids == [1]
    await found.aclose()
    assert stream.ended


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancellation_beside_a_token_is_not_lost(steps: int) -> None:
    """It comes some turns of the loop behind the token, and the reader reads no more."""
    stream = Stream()
    read: list[TokenDelta] = []

    async def reader() -> None:
        async for delta in until(asyncio.get_running_loop().time() + 3600, stream.deltas(), lambda: 0.0):
            read.append(delta)

    task = asyncio.create_task(reader())
    await asyncio.sleep(0.01)
    stream.let.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    assert task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    assert done
    assert task.cancelled()
    assert stream.ended
    assert len(read) <= 1


@given(st.lists(st.floats(0, 3), min_size=1, max_size=4), st.sampled_from(["stop", "length", "error", None]))
def test_an_answer_finishes_once(waits_s: list[float], last: FinishReason | None) -> None:
    """However long its reader takes for each part of it, the last one too."""
    now_s = [0.0]

    async def deltas() -> AsyncIterator[TokenDelta]:
        for number in range(1, len(waits_s)):
            yield TokenDelta(token_ids=[number])
        yield TokenDelta(token_ids=[0], finish_reason=last)

    async def read() -> list[TokenDelta]:
        found = []
        async for delta in until(3.0, deltas(), lambda: now_s[0]):
            found.append(delta)
            now_s[0] += waits_s[len(found) - 1] if len(found) <= len(waits_s) else 0.0
        return found

    found = asyncio.run(read())
    reasons = [delta.finish_reason for delta in found]
    assert sum(reason is not None for reason in reasons) == (reasons[-1] is not None)
    is_whole = len(found) >= len(waits_s) and found[len(waits_s) - 1].token_ids == [0]
    assert reasons[-1] == (last if is_whole and last is not None else None if is_whole and now_s[0] < 3.0 else "length")
