"""The front door's look at workers behind OpenEngine, which goes on whatever one of them says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from worker.frontdoor.openengine import workers
from worker.frontdoor.openengine.workers import Access, EngineWorker
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.identity import ENGINE_NAME, SCHEMA_REVISION

LATER: Any = 99  # no state of this version
TOLD = {"numerics": "exact", "kv_dtype": "float32"}


class Watched(EngineWorker):
    """A worker whose first answers are odd.

    Args:
        odd: Answers by the name of the call, each of which is given once.
    """

    def __init__(self, odd: dict[str, Any]) -> None:
        super().__init__(SimpleNamespace(has_tls=False, target="127.0.0.1:9"), Access())  # type: ignore[arg-type]
        self._odd = odd

    async def _ask(self, method: str, request: Any, answer: Any) -> Any:
        usual: dict[str, Any] = {
            "Health": wire.HealthResponse(state=wire.HEALTH_STATE_READY),
            "GetLoad": wire.LoadInfo(instance_id="i"),
            "GetServerInfo": SimpleNamespace(
                engine_name=ENGINE_NAME, schema_revision=SCHEMA_REVISION, instance_id="i", extra=TOLD
            ),
            "GetModelInfo": wire.ModelInfo(served_model_name="m"),
        }
        await asyncio.sleep(0)
        return self._odd.pop(method, usual[method])


ODD: dict[str, tuple[str, Any, str]] = {
    "a state of a later version": ("Health", wire.HealthResponse(state=LATER), "ValueError"),
    "no numerics": (
        "GetServerInfo",
        SimpleNamespace(engine_name=ENGINE_NAME, schema_revision=SCHEMA_REVISION, instance_id="i", extra={}),
        "KeyError",
    ),
}


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_answer_is_not_the_last_look(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whom nobody looks at is given no request, however well it does later."""
    monkeypatch.setattr(workers, "POLL_S", 0.0)
    method, odd, problem = ODD[name]
    worker = Watched({method: odd})
    watching = asyncio.create_task(worker.watch())
    try:
        async with asyncio.timeout(20):
            while problem not in worker.problem and not watching.done():
                await asyncio.sleep(0)
            assert problem in worker.problem
            while not worker.is_ready:
                await asyncio.sleep(0)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await worker.close()
