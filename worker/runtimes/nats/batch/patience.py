"""Calls of a JetStream server that are tried again while it is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from nats.aio.client import Client
from nats.errors import (
    ConnectionClosedError,
    ConnectionReconnectingError,
    NoRespondersError,
    OutboundBufferLimitError,
    StaleConnectionError,
)
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError, ServerError, ServiceUnavailableError

from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.loops import PASSES_S, RETRY_S
from worker.runtimes.nats.batch.objects import ensure_bucket

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 30.0
"""Seconds after which a server that answers others must have answered a request's call."""

_PASSING = (
    *(TimeoutError, OSError, NoRespondersError, NoStreamResponseError, ServiceUnavailableError, ServerError),
    *(ConnectionClosedError, ConnectionReconnectingError, OutboundBufferLimitError, StaleConnectionError),
)
"""Errors of a server that is away, or has no room; all others are about what was asked."""


class PatientServer:
    """A JetStream server, and the calls that it has not done yet.

    Args:
        client: Connection to NATS with JetStream.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._failing: dict[int, tuple[float, str]] = {}
        self._calls = count()

    @property
    def problem(self) -> str | None:
        """A call that has failed for a while, None if there is none."""
        now_s = time.monotonic()
        return next((text for since_s, text in self._failing.values() if now_s - since_s > PASSES_S), None)

    @property
    def js(self) -> JetStreamContext:
        return self._client.jetstream(timeout=5)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Result of ``call``, repeated while the server can do neither it nor other things.

        Raises:
            NatsError: the server refuses it, or fails it for `PATIENCE_S` and does other things.
            TimeoutError: the same.
        """
        number = next(self._calls)
        try:
            while True:
                try:
                    return await call()
                except _PASSING as error:
                    if await self._is_over(number, error):
                        raise
                    await asyncio.sleep(RETRY_S)
        finally:
            self._failing.pop(number, None)

    async def _is_over(self, number: int, error: BaseException) -> bool:
        """Whether a call that has just failed is not to be tried again."""
        logger.debug("batches: again after %r", error)
        if self._client.is_closed:
            return True
        if not self._client.is_connected:
            self._failing.pop(number, None)
            return False
        now_s, text = time.monotonic(), f"batches: {str(error) or type(error).__name__}"
        since_s, _ = self._failing.setdefault(number, (now_s, text))
        return now_s - since_s > PATIENCE_S and await self._does_other_things()

    async def _does_other_things(self) -> bool:
        try:
            await (await ensure_bucket(self.js, layout.RETURNS)).put("probe", b"")
        except (NatsError, TimeoutError, OSError):
            return False
        return True
