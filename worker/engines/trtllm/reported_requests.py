"""The requests that run in TensorRT-LLM, also by the numbers under which its process reports."""

from __future__ import annotations

import logging
import math

from adapters.trtllm import Failure, Step
from worker.engines.request_table import RequestTable
from worker.engines.trtllm.running_request import RunningRequest

logger = logging.getLogger(__name__)


class ReportedRequests(RequestTable[RunningRequest]):
    """Running requests by id, and by number for reports from the engine's process.

    Request ids are reused, numbers are not: a late report does not reach the next request.

    Attributes:
        last_prefill_s: Event loop's time at which a prefill for a decode worker was last finished.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_prefill_s = -math.inf
        self._by_number: dict[str, RunningRequest] = {}

    def add(self, request: RunningRequest) -> None:
        """Enter a request that the engine has taken."""
        super().add(request)
        self._by_number[request.number] = request

    def release(self, request: RunningRequest) -> None:
        """Remove a request whose consumer takes no more, and end it if it is unfinished."""
        super().release(request)
        self._by_number.pop(request.number, None)

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
