"""Metrics of requests that end without a last delta of the engine: cut off, or dropped."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from served_worker import Client, serving

from adapters.client import processor
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77, 30]
BY = {"processor": "logit_bias"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with serving(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")) as client:
        yield client


def counted(client: Client) -> dict[str, float]:
    value = client.worker.server.metrics.registry.get_sample_value
    return {
        "queued": value("dlw_queue_time_seconds_count") or 0,
        "requests": value("dlw_processor_requests_total", BY) or 0,
        "steps": value("dlw_processor_steps_total", BY) or 0,
    }


async def begun(client: Client, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """The stream of a long answer with one processor, behind its first chunk, and that chunk."""
    wanted = {"version": 1, "processors": [processor("logit_bias", bias={"37": 1.0})], **fields}
    raw = {
        "token_ids": PROMPT,
        "annotations": ["logits_processors:" + json.dumps(wanted)],
        "stop_conditions": {"max_tokens": 1900, "ignore_eos": True},
    }
    stream = client.worker.generate(raw, client)
    return stream, await anext(stream)


@pytest.mark.parametrize("end", ["deadline", "dropped", "aborted"])
async def test_a_cut_off_request_is_counted_once(end: str, served: Client) -> None:
    before = counted(served)
    deadline = {"deadline": time.time() + 0.6} if end == "deadline" else {}
    stream, first = await begun(served, **deadline)
    if end == "aborted":
        served.worker.server.end_request(f"request-{served.num_requests}")
    if end == "dropped":
        await stream.aclose()
    chunks = [first, *[chunk async for chunk in stream]]
    reasons = {"deadline": ["length"], "dropped": [], "aborted": ["cancelled"]}
    assert [chunk["finish_reason"] for chunk in chunks if chunk.get("finish_reason")] == reasons[end]
    after = counted(served)
    assert after["queued"] == before["queued"] + 1
    assert after["requests"] == before["requests"] + 1
    assert after["steps"] > before["steps"]
