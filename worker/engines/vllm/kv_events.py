"""vLLM's KV events, which its scheduler publishes by ZeroMQ, over sockets of this worker's own."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from worker.engines import KvEventSink
from worker.engines.vllm.event_relay import EventRelay
from worker.engines.vllm.owned_directory import OwnedDirectory
from worker.errors import StartupError

logger = logging.getLogger(__name__)

MAX_PATH = 100
"""Longest path of a socket, bytes: Linux takes 107, and the process that opens it says less."""

REPLAY_S = 10.0
"""Time for vLLM to answer a request for earlier events; it looks for one every 0.1 s."""

END = b"\xff" * 8
"""Number that ends a replay."""


class KvEvents:
    """Subscribes to vLLM's KV events, and asks again for those that were lost.

    Raises:
        StartupError: the directory of temporary files has too long a name for sockets.
    """

    def __init__(self) -> None:
        self._directory = OwnedDirectory("dlw-vllm-")  # mode 0700: events hold prompts
        self._task: asyncio.Task[None] | None = None
        path = self._directory.path / "replay"
        if len(os.fsencode(path)) > MAX_PATH:
            problem = f"TMPDIR must leave sockets in it a path of at most {MAX_PATH} bytes, got {path}"
            self._directory.close()
            raise StartupError(problem)

    @property
    def config(self) -> dict[str, Any]:
        """Fields of the ``KVEventsConfig`` that lets vLLM publish events."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint("events"),
            "replay_endpoint": self._endpoint("replay"),
        }

    def follow(self, sink: KvEventSink, block_size: int) -> None:
        """Report all events since the start of vLLM to `sink`, in the running event loop."""
        relay = EventRelay(sink, block_size, _decoder())
        self._task = asyncio.create_task(self._follow(relay))
        self._task.add_done_callback(_note_end)

    async def close(self) -> None:
        """Stop, and remove the sockets. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._directory.close()

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._directory.path}/{name}"

    async def _follow(self, relay: EventRelay) -> None:
        import zmq
        import zmq.asyncio

        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
            events.linger = 0
            events.rcvhwm = 0
            events.subscribe(b"")
            events.connect(self._endpoint("events"))
            await self._replay(context, relay)
            while True:
                _, number, payload = await events.recv_multipart()
                if int.from_bytes(number, "big") > relay.next_number:
                    await self._replay(context, relay)
                relay.take(int.from_bytes(number, "big"), payload)

    async def _replay(self, context: Any, relay: EventRelay) -> None:
        """Ask for the events that `relay` has not had, as far as vLLM still has them."""
        import zmq

        with context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.rcvhwm = 0
            replay.connect(self._endpoint("replay"))
            try:
                async with asyncio.timeout(REPLAY_S):
                    await replay.send_multipart([b"", relay.next_number.to_bytes(8, "big")])
                    while True:
                        _, _, number, payload = await replay.recv_multipart()
                        if number == END:
                            return
                        relay.take(int.from_bytes(number, "big"), payload)
            except TimeoutError:
                logger.warning("vLLM did not repeat its KV events within %g s", REPLAY_S)


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("no more KV events of vLLM are forwarded", exc_info=task.exception())


def _decoder() -> Callable[[bytes], Any]:
    """Makes vLLM's ``KVEventBatch`` of its bytes."""
    import msgspec

    batch = importlib.import_module("vllm.distributed.kv_events").KVEventBatch
    return msgspec.msgpack.Decoder(batch).decode
