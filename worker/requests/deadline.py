"""A request's deadline: an absolute time at which its answer ends, wherever it has got to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from worker.engines import TokenDelta


async def until(
    deadline: float, deltas: AsyncIterator[TokenDelta], clock: Callable[[], float] = time.time
) -> AsyncGenerator[TokenDelta, None]:
    """``deltas``, cut off at ``deadline`` with an empty delta that finishes as ``length``, unless
    they have finished before.

    Args:
        deadline: Seconds since 1970.
        deltas: A stream of an engine; its generator is cancelled at the deadline, which frees what
            it holds.
        clock: Seconds since 1970.
    """
    try:
        while (left := deadline - clock()) > 0:
            try:
                async with asyncio.timeout(left) as limit:
                    delta = await anext(deltas)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not limit.expired():  # an error of the engine's
                    raise
                break
            yield delta
            if delta.finish_reason is not None:  # however late its end is asked for
                async for delta in deltas:
                    yield delta
                return
    finally:
        if isinstance(deltas, AsyncGenerator):
            await deltas.aclose()
    yield TokenDelta(finish_reason="length")
