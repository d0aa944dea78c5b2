"""The requests that run in vLLM: the stream of each, and the reason why no more are taken."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from worker.engines import TokenDelta
from worker.errors import ServingError


@dataclass(slots=True, eq=False)
class RunningRequest:
    """The stream of one request; used in one event loop only.

    Attributes:
        request_id: The worker's id.
        task: Task that reads the engine's outputs; when it is cancelled, vLLM frees the request.
        report: Name of its failure and receipt in the engine's process, None without a chain.
        is_silent: Whether no delta has come since the last `keep_alive`.
        done: Whether the last delta, or an exception, is in the stream.
    """

    request_id: str
    task: asyncio.Task[None] | None = None
    report: str | None = None
    is_silent: bool = False
    done: bool = False
    _queue: asyncio.Queue[TokenDelta | ServingError] = field(default_factory=asyncio.Queue)

    async def take(self) -> TokenDelta:
        """The next delta. Raises what `fail` was given."""
        item = await self._queue.get()
        if isinstance(item, ServingError):
            raise item
        return item

    @property
    def is_exhausted(self) -> bool:
        """Whether the last delta has been taken."""
        return self.done and self._queue.empty()

    def put(self, delta: TokenDelta) -> None:
        """Send a delta; nothing follows one with a finish reason."""
        if not self.done:
            self.is_silent = False
            self.done = delta.finish_reason is not None
            self._queue.put_nowait(delta)

    def fail(self, error: ServingError) -> None:
        """End the stream with an exception."""
        if not self.done:
            self.done = True
            self._queue.put_nowait(error)

    def keep_alive(self) -> None:
        """Give the consumer an empty delta if none has come since the last call."""
        if self.is_silent and not self.done and self._queue.empty():
            self._queue.put_nowait(TokenDelta())
        self.is_silent = True

    def stop(self) -> None:
        """Free the request in vLLM, if it is unfinished there."""
        if self.task is not None:
            self.task.cancel()


class RequestTable:
    """Running requests by id.

    Attributes:
        refusal: Error that every new request gets, None while requests are taken.
    """

    def __init__(self) -> None:
        self.refusal: ServingError | None = None
        self._by_id: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, request: RunningRequest) -> None:
        """Enter a request that is about to run."""
        self._by_id[request.request_id] = request

    def release(self, request: RunningRequest) -> None:
        """Remove a request whose stream is read no more, and end it if it is unfinished."""
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]
        request.done = True
        request.stop()

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends as ``cancelled``. Ignores unknown ids."""
        request = self._by_id.get(request_id)
        if request is not None:
            request.put(TokenDelta(finish_reason="cancelled"))
            request.stop()

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        for request in self._by_id.values():
            request.keep_alive()

    def end_all(self, failure: ServingError) -> int:
        """Fail every stream and refuse new requests, with the first reason given."""
        self.refusal = self.refusal or failure
        requests, self._by_id = self._by_id, {}
        for request in requests.values():
            request.fail(failure)
            request.stop()
        return len(requests)
