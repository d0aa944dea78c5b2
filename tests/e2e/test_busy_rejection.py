"""Dynamo's frontend refuses requests while its workers' own load reports are above a threshold."""

from __future__ import annotations

import asyncio

from e2e_stack import MODEL, Stack, wait_for

LONG = [5] * 600
"""Two of these take more than half of the worker's blocks."""


async def test_busy_workers_get_no_more_requests(stack: Stack) -> None:
    stack.start_frontend("--active-decode-blocks-threshold", "0.5")
    worker = stack.start_worker("--kv-blocks", "128", WORKER_ENABLE_KV_ROUTING="true")
    refused = asyncio.Event()

    async def keep_busy(number: int) -> None:
        async with stack.async_client() as client:
            while not refused.is_set():
                prompt = [5 + number, *LONG]
                stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=1000, stream=True)
                async for _ in stream:
                    if refused.is_set():
                        break
                await stream.close()

    def small() -> tuple[int, str]:
        return stack.post("completions", prompt=[5], max_tokens=1)

    busy = [asyncio.create_task(keep_busy(number)) for number in range(2)]
    await asyncio.to_thread(wait_for, lambda: small()[0] == 529 or any(one.done() for one in busy), "a refusal")
    refused.set()
    ended = await asyncio.gather(*busy, return_exceptions=True)
    assert all(one is None or getattr(one, "status_code", 0) == 529 for one in ended), ended
    await asyncio.to_thread(wait_for, lambda: worker.metric("dlw_in_flight_requests") == 0, "an idle worker")
    await asyncio.to_thread(wait_for, lambda: small()[0] == 200, "requests that are taken again")
