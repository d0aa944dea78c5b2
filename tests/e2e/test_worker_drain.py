"""SIGTERM with requests in flight: they finish, the rest is migrated, new ones are refused;
and the exit status.
"""

from __future__ import annotations

import asyncio
import re
import signal

import openai
import pytest
from e2e_stack import DYNAMO, MODEL, Stack, http, wait_for


async def stream_text(client: openai.AsyncOpenAI, num_tokens: int, started: asyncio.Event | None = None) -> str:
    stream = await client.completions.create(model=MODEL, prompt="z", max_tokens=num_tokens, stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        if started is not None:
            started.set()
    return text


async def test_in_flight_requests_finish(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker("--drain-timeout-s", "30", scripted=True)
    async with stack.async_client() as client:
        started = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(stream_text(client, 200, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        worker.signal(signal.SIGTERM)
        assert await asyncio.gather(*streams) == ["x" * 200] * 8
    assert worker.wait() == 0
    assert "drained: 8 finished, 0 migrated" in worker.log
    assert stack.registered() == []


async def test_requests_past_the_budget_are_cut_with_an_error(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker("--drain-timeout-s", "0.2", scripted=True)
    async with stack.async_client() as client:
        started = asyncio.Event()
        stream = asyncio.create_task(stream_text(client, 1000, started))
        await started.wait()
        worker.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as cut:
            await stream
    assert cut.value.body is not None
    assert cut.value.body["code"] == (500 if DYNAMO < (1, 6) else 503)  # type: ignore[index]
    assert worker.wait() == 0
    assert "drained: 0 finished, 1 migrated" in worker.log


async def test_requests_past_the_budget_move_to_another_worker(stack: Stack) -> None:
    stack.start_frontend("--migration-limit", "3")
    leaving = stack.start_worker("--drain-timeout-s", "0.2", scripted=True)
    staying = stack.start_worker(scripted=True)
    async with stack.async_client() as client:
        started = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(stream_text(client, 250, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        num_leaving = int(leaving.metric("dlw_in_flight_requests"))
        assert num_leaving > 0
        leaving.signal(signal.SIGTERM)
        assert await asyncio.gather(*streams) == ["x" * 250] * 8
    assert leaving.wait() == 0
    assert f"{num_leaving} migrated" in leaving.log
    assert staying.running
    # The worker's own count ends with it, mostly before a scrape; this one stays.
    metrics = http(f"{stack.url}/metrics")[1]
    counts = re.findall(r"^dynamo_frontend_model_migration_total\{.*\} (\d+)$", metrics, re.MULTILINE)
    assert sum(map(int, counts)) == num_leaving, metrics


async def test_new_requests_are_refused_while_draining(stack: Stack) -> None:
    stack.start_frontend()
    worker = stack.start_worker("--drain-timeout-s", "30", scripted=True)
    async with stack.async_client() as client:
        started = asyncio.Event()
        stream = asyncio.create_task(stream_text(client, 300, started))
        await started.wait()
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(wait_for, lambda: worker.metric("dlw_draining") == 1, "drain")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.completions.create(model=MODEL, prompt="z", max_tokens=4)
        status = refused.value.status_code
        assert status == 404 or status >= 500  # no longer listed, or refused by the worker
        assert await stream == "x" * 300
    assert worker.wait() == 0


async def test_a_second_signal_hands_off_at_once(stack: Stack) -> None:
    stack.start_frontend("--migration-limit", "3")
    workers = [stack.start_worker("--drain-timeout-s", "100", scripted=True) for _ in range(2)]
    async with stack.async_client() as client:
        started = asyncio.Event()
        stream = asyncio.create_task(stream_text(client, 300, started))
        await started.wait()
        leaving = next(worker for worker in workers if worker.metric("dlw_in_flight_requests") == 1)
        leaving.signal(signal.SIGTERM)
        await asyncio.to_thread(wait_for, lambda: leaving.metric("dlw_draining") == 1, "drain")
        leaving.signal(signal.SIGTERM)
        assert await asyncio.to_thread(leaving.wait, 60) == 0
        assert await stream == "x" * 300
    assert "1 migrated" in leaving.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_leaves_at_once(stack: Stack, number: signal.Signals) -> None:
    stack.start_frontend()
    worker = stack.start_worker("--device", "cpu")
    worker.signal(number)
    assert worker.wait() == 0
    assert "drained: 0 finished, 0 migrated" in worker.log
    assert stack.registered() == []
