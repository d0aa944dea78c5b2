"""One request's output in the event loop: outputs of steps go in, deltas come out."""

from __future__ import annotations

import asyncio

from worker.engines import TokenDelta
from worker.engines.embedded.plan import Output, Request
from worker.errors import ServingError


class Stream:
    """One request's pending delta. For one event loop and one consumer."""

    __slots__ = ("_failure", "_is_silent", "_pending", "_request", "_waiter", "client", "finished", "request_id")

    def __init__(self, request: Request) -> None:
        self.request_id = request.id
        self.client = request.client
        self._request = request  # the step thread's; only counts and times of it are read here
        self.finished = False  # whether the last output has come in, or a failure
        self._is_silent = False
        self._pending: TokenDelta | None = None
        self._failure: ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_pending(self) -> int:
        """Tokens that the consumer has not taken."""
        return 0 if self._pending is None else len(self._pending.token_ids)

    def push(self, output: Output) -> None:
        """Add one output to the pending delta; what comes after a failure is dropped."""
        if self.finished:
            return
        self._is_silent = False
        delta = self._pending
        if delta is None:
            delta = self._pending = TokenDelta()
        if output.token_id is not None:
            delta.token_ids.append(output.token_id)
            if output.logprobs is not None:
                delta.logprobs = [*(delta.logprobs or ()), output.logprobs]
        if output.num_cached_tokens:
            delta.num_cached_tokens = output.num_cached_tokens
        if output.engine_data is not None:
            delta.engine_data = output.engine_data
        if output.finish_reason is not None:
            delta.finish_reason = output.finish_reason
            delta.stop_reason = output.stop_reason
            delta.error = output.error
            delta.kv = output.kv
            delta.end_logprobs = output.end_logprobs
            if output.chain is not None:
                delta.receipt = output.chain.receipt
                delta.failure = output.chain.failure
            self.finished = True
        self._wake()

    def keep_alive(self) -> None:
        """Give the consumer an empty delta if it has got none since the last call."""
        if self._is_silent and self._pending is None and not self.finished:
            self._pending = TokenDelta()
            self._wake()
        self._is_silent = True

    def fail(self, failure: ServingError) -> None:
        """End the stream with an exception, raised once the pending delta is consumed."""
        if not self.finished:
            self._failure = failure
            self.finished = True
            self._wake()

    async def take(self) -> TokenDelta:
        """Wait for the next delta. Raises what `fail` was given."""
        while self._pending is None:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta, self._pending = self._pending, None
        delta.num_preemptions = self._request.num_preemptions
        delta.queue_times = self._request.queue_times
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
