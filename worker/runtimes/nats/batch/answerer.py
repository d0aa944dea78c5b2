"""One request of a batch: answered, handed back to its queue, or set aside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from worker.errors import (
    Draining,
    EngineBroken,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    RequestFailed,
    ServingError,
)
from worker.requests.prompt_scores import token_text
from worker.requests.rollout import CUT_OFF
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.nats.batch import layout, openai
from worker.runtimes.nats.batch.running import Cancelled, Expired, Returned, RunningRequest
from worker.runtimes.nats.batch.storage import BatchStorage

logger = logging.getLogger(__name__)

RETURN_S = 1.0
"""Delay after which a request that was handed back is delivered again."""

FAILURE_DELAY_S = 5.0
"""The same after an error that may pass; twice as long after each further one."""

MAX_FAILURE_DELAY_S = 300.0


class BatchAnswerer:
    """Answers requests of batches, each to the one result that it has.

    Args:
        messages: Server of the requests.
        storage: Records of batches.
        max_deliver: Failures after which a request is set aside.
    """

    def __init__(self, messages: DirectServer, storage: BatchStorage, max_deliver: int) -> None:
        self._messages = messages
        self._storage = storage
        self._max_deliver = max_deliver

    async def run(self, running: RunningRequest) -> None:
        """Answer a request once; it ends in a result, back in its queue, or set aside."""
        running.has_begun = True
        if running.ends_as is not None:
            await unfailing(self._end(running, running.ends_as))
            return
        try:
            await self._answer_once(running)
        except asyncio.CancelledError:
            await unfailing(self._end(running, running.ends_as or Returned()))
        except Exception as error:  # the request boundary: one request's unknown error stays its own
            logger.exception("request %.60r of batch %s failed", running.request.custom_id, running.request.batch)
            await unfailing(self._end(running, error))

    async def _answer_once(self, running: RunningRequest) -> None:
        request, message = running.request, running.message
        if await self._storage.has_result(request):
            await self._storage.acknowledge(message)  # the last time only this was lost
            return
        failures = message.metadata.num_delivered - 1
        if failures:
            failures -= await self._storage.returns(request)
        if failures >= self._max_deliver:
            await self._give_up(running, f"{failures} workers have not answered it")
            return
        left_s = None if request.deadline_s is None else max(0.0, request.deadline_s - time.time())
        deadline = asyncio.timeout(left_s)
        try:
            async with deadline:
                line = await self._answer(running)
        except TimeoutError as error:  # the deadline's, or of a server that has not sent the body
            await self._end(running, Expired() if deadline.expired() else error)
            return
        except RequestAborted as error:  # for all requests in flight: another attempt is answered
            await self._end(running, error)
            return
        except (InvalidRequest, RequestFailed) as error:
            await self._finish(running, openai.failed_line(request, error), refused=True)
            return
        except (ServingError, Returned) as error:
            await self._end(running, error)
            return
        await self._finish(running, line)

    async def _answer(self, running: RunningRequest) -> dict[str, Any]:
        request = running.request
        body = await self._storage.body(request.body_digest) if request.body_digest else request.body
        made_of = layout.request_digest(request.custom_id, request.url, body)
        reports = self._messages.server.reports
        with reports.reading(running.id):
            message = openai.message_of(request.url, body, made_of)
        try:
            with reports.reading(running.id):
                parsed = running.parsed = await self._messages.parsed(message)
            chunks = [chunk async for chunk in self._messages.chunks(running.id, parsed)]
        except InvalidRequest as error:
            raise openai.told(error, request.url, body) from error.__cause__
        if any(chunk.get("finish_reason") in CUT_OFF for chunk in chunks):
            raise Returned
        # with log probabilities a long answer takes seconds
        vocabulary = self._messages.server.chains.vocabulary
        texts, special = token_text(vocabulary), vocabulary.hidden_token_ids
        answer = await asyncio.to_thread(openai.response_body, request, body, chunks, texts, special)
        return openai.result_line(request, 200, answer)

    async def _finish(self, running: RunningRequest, line: dict[str, Any], *, refused: bool = False) -> None:
        """Write the result, then acknowledge: a worker that dies between leaves one result."""
        await self._storage.write_result(running.request, line)
        if refused:
            await self._storage.end(running.message)
        else:
            await self._storage.acknowledge(running.message)

    async def _end(self, running: RunningRequest, reason: Exception) -> None:
        """End a request that has no answer of its own."""
        request, message = running.request, running.message
        if isinstance(reason, Expired):
            line = openai.unanswered_line(request, "batch_expired", "its deadline has passed")
            await self._finish(running, line, refused=True)
        elif isinstance(reason, Cancelled):
            await self._storage.end(message)
        elif isinstance(reason, (Returned, Draining, EngineBroken, Overloaded, RequestAborted)):
            await self.hand_back(running)
        else:
            with contextlib.suppress(NatsError, OSError):
                await message.nak(_failure_delay_s(message.metadata.num_delivered))

    async def hand_back(self, running: RunningRequest) -> None:
        """Return a request to its queue, for another attempt."""
        await self._storage.hand_back(running.message, running.request, RETURN_S)

    async def set_aside(self, message: Msg, reason: str) -> None:
        """Copy a message to the dead letters, and take it from its queue."""
        await self._storage.set_aside(message, reason)
        await self._storage.end(message)

    async def _give_up(self, running: RunningRequest, reason: str) -> None:
        """Set a request aside that no worker could answer; it has a result that says so."""
        await self._storage.set_aside(running.message, reason)
        line = openai.unanswered_line(running.request, "dead_letter", reason)
        await self._finish(running, line, refused=True)


async def unfailing(work: Coroutine[Any, Any, None]) -> None:
    """Do something with a message; after an error it is delivered again."""
    try:
        await work
    except Exception as error:  # the boundary of a message
        logger.warning("batches: a message is left to be delivered again: %r", error)


def _failure_delay_s(num_delivered: int) -> float:
    """Delay after the failure of a message that was delivered so often."""
    return min(FAILURE_DELAY_S * 2.0 ** min(num_delivered - 1, 20), MAX_FAILURE_DELAY_S)
