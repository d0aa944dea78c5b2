"""`BlockingWorkerClient`: a client for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from worker.runtimes.nats.client.answers import Answer, Chunk
from worker.runtimes.nats.client.worker_client import WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions
from worker.runtimes.nats.protocol import LOST_S

T = TypeVar("T")


class BlockingWorkerClient:
    """`WorkerClient` for code without an event loop; it has one in a thread of its own.

    Args:
        model: Served model name.
        version: Version of the model.
        options: Address of NATS and credentials; by default on this machine.
        window: Messages that a worker may send ahead of what was read.
        lost_s: Seconds of silence after which a worker is given up.

    Raises:
        StartupError: NATS is not there, or does not let us in.
    """

    def __init__(
        self,
        model: str,
        version: str = "1",
        options: ConnectionOptions | None = None,
        *,
        window: int = 64,
        lost_s: float = LOST_S,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(WorkerClient.connect(model, version, options, window=window, lost_s=lost_s))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> BlockingWorkerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave; answers under way are cancelled."""
        self._run(self._client.close())
        self._stop()

    def info(self) -> dict[str, Any]:
        """See `WorkerClient.info`."""
        return self._run(self._client.info())

    def generate(self, *, retries: int = 2, **request: Any) -> Answer:
        """See `WorkerClient.generate`."""
        return self._run(self._client.generate(retries=retries, **request))

    def stream(self, **request: Any) -> Iterator[Chunk]:
        """See `WorkerClient.stream`."""
        chunks, turn = self._client.stream(**request), asyncio.Lock()
        try:
            while (chunk := self._run(_next(chunks, turn))) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():  # by `close`, which has ended it
                self._run(_closed(chunks, turn))

    def cancel(self, request_id: str) -> None:
        """See `WorkerClient.cancel`."""
        self._run(self._client.cancel(request_id))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()  # it goes on where an interrupt has ended the wait for it
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(chunks: AsyncGenerator[Chunk, None], turn: asyncio.Lock) -> Chunk | None:
    async with turn:
        return await anext(chunks, None)


async def _closed(chunks: AsyncGenerator[Chunk, None], turn: asyncio.Lock) -> None:
    async with turn:  # the wait for the next chunk has ended
        await chunks.aclose()
