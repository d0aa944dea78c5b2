"""Changes that are made to their end: who waits for them, and what is kept of them."""

from __future__ import annotations

import asyncio

import pytest

from worker.lifecycle.whole import WholeChanges


async def change(to_end: asyncio.Event, ended: list[str], name: str, *, fails: bool = False) -> str:
    await to_end.wait()
    ended.append(name)
    if fails:
        raise OSError(name)
    return name


async def test_a_change_goes_on_without_its_caller_and_is_waited_for() -> None:
    """Also where another one has failed."""
    changes, to_end, ended = WholeChanges(), asyncio.Event(), list[str]()
    callers = [asyncio.create_task(changes.made(change(to_end, ended, name, fails=name == "a"))) for name in "abc"]
    await asyncio.sleep(0)
    callers[1].cancel()
    waiting = asyncio.create_task(changes.ended())
    await asyncio.sleep(0)
    assert not waiting.done()
    to_end.set()
    await waiting
    assert ended == ["a", "b", "c"]
    with pytest.raises(OSError, match="a"):
        await callers[0]
    assert callers[1].cancelled()
    assert await callers[2] == "c"


async def test_nothing_is_kept_of_a_change_that_was_made() -> None:
    changes, to_end = WholeChanges(), asyncio.Event()
    to_end.set()
    assert await changes.made(change(to_end, [], "a")) == "a"
    with pytest.raises(OSError, match="b"):
        await changes.made(change(to_end, [], "b", fails=True))
    await asyncio.sleep(0)
    assert not changes._tasks
