"""The requests that run in TensorRT-LLM, and the reason why no more are taken."""

from __future__ import annotations

import logging
import math

from adapters.trtllm import Failure, Step
from worker.engines.trtllm.running_request import RunningRequest
from worker.errors import EngineBroken, ServingError

logger = logging.getLogger(__name__)


class RequestTable:
    """Running requests by id, and by number for reports from the engine's process.

    Request ids are reused, numbers are not: a late report does not reach the next request.

    Attributes:
        refusal: Error that every new request gets, None while requests are taken.
        last_prefill_s: Event loop's time at which a prefill for a decode worker was last finished.
    """

    def __init__(self) -> None:
        self.refusal: ServingError | None = None
        self.last_prefill_s = -math.inf
        self._by_id: dict[str, RunningRequest] = {}
        self._by_number: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, request: RunningRequest) -> None:
        """Enter a request that the engine has taken."""
        self._by_id[request.request_id] = self._by_number[request.number] = request

    def release(self, request: RunningRequest) -> None:
        """Remove a request whose stream is read no more, and abort it if it is unfinished."""
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]
        self._by_number.pop(request.number, None)
        if not request.done:
            request.done = True
            request.abort()
        if request.pump is not None and not request.must_not_abort:
            request.pump.cancel()

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends as ``cancelled``. Ignores unknown ids."""
        request = self._by_id.get(request_id)
        if request is not None:
            request.abort()

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        for request in self._by_id.values():
            request.keep_alive()

    def end_all(self, failure: ServingError) -> int:
        """Fail every stream and refuse new requests, with the first reason given."""
        self.refusal = self.refusal or failure
        requests, self._by_id = self._by_id, {}
        for request in requests.values():
            if not request.done and not isinstance(failure, EngineBroken):
                request.abort()
            request.fail(failure)
        return len(requests)

    def note_failure(self, failure: Failure) -> None:
        """Record a processor failure reported by the engine's process."""
        request = self._by_number.get(failure.request_id)
        if request is not None:
            logger.warning("request %s: %s", request.request_id, failure)
            request.note_failure(failure)

    def note_step(self, number: str, step: Step) -> None:
        """Record a chain's report for one position of a request."""
        request = self._by_number.get(number)
        if request is not None and request.chain is not None:
            request.chain.note_step(step)
