"""Streams of ``POST /generate``, before answers that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from worker.frontdoor.completions.handler import AT_ONCE
from worker.frontdoor.rollouts import sglang, sglang_request


async def endless(*_: Any) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    while True:
        yield 0, {}
        await asyncio.sleep(0)


async def test_a_slow_client_that_leaves_takes_all_tasks_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_answers", endless)
    monkeypatch.setattr(sglang, "Part", lambda *_: None)
    batch = sglang_request.read({"text": ["a", "b", "c"], "stream": True})
    exchange: Any = None
    events = sglang._together(exchange, batch, "m")
    await anext(events)
    for _ in range(3 * AT_ONCE):  # more answers than wait for a client
        await asyncio.sleep(0)
    await events.aclose()
    for _ in range(20):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
