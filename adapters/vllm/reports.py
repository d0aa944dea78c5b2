"""Failures and receipts of requests inside vLLM's engine, until somebody takes them."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

from adapters.chain import ProcessorFailed, Receipt

logger = logging.getLogger(__name__)

MAX_FAILURES = 4096
"""Failures that are kept; older ones are dropped."""

MAX_RECEIPTS = 4096
"""Receipts that are kept; the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A processor that ended its request.

    Attributes:
        report: Name that the request gave itself, empty without one.
        processor: Name of the processor.
        reason: The reason of the `ProcessorFailed`.
        message: One sentence for the caller.
        position: Absolute index of the token that was to be sampled.
    """

    report: str
    processor: str
    reason: str
    message: str
    position: int


class Reports:
    """Failures, and receipts of requests that named themselves: bounded and thread-safe."""

    def __init__(self) -> None:
        self._failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()
        self._lock = Lock()

    def failed(self, report: str | None, error: ProcessorFailed, position: int) -> Failure:
        """Keep a failure, and log it."""
        logger.warning("%s, position %d; the answer ends", error, position)
        failure = Failure(report or "", error.processor, error.reason, error.message, position)
        with self._lock:
            self._failures.append(failure)
        return failure

    def withdraw(self, failure: Failure) -> None:
        """Drop a failure that was none, if nobody has taken it yet."""
        with self._lock:
            if failure in self._failures:
                self._failures.remove(failure)

    def began(self, report: str | None, receipt: Receipt) -> None:
        """Keep a receipt, which its chain goes on writing, if the request named itself."""
        if report is None:
            return
        with self._lock:
            self._receipts[report] = receipt
            while len(self._receipts) > MAX_RECEIPTS:
                self._receipts.popitem(last=False)

    def take_failures(self) -> list[dict[str, Any]]:
        """The failures since the last call, as JSON data."""
        with self._lock:
            taken = [asdict(failure) for failure in self._failures]
            self._failures.clear()
        return taken

    def take_receipt(self, report: str) -> Receipt | None:
        """The receipt of the request of that name, None if there is none; it is not kept."""
        with self._lock:
            return self._receipts.pop(report, None)


REPORTS = Reports()
"""The reports of this process."""
