"""Failures and receipts of requests inside vLLM's engine, until somebody takes them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

from adapters.chain import ProcessorChain, ProcessorFailed, Receipt

logger = logging.getLogger(__name__)

MAX_FAILURES = 4096
"""Failures that are kept; older ones are dropped. See `Reports.keep_all`."""

MAX_RECEIPTS = 1024
"""Chains whose receipts are kept; the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A processor that ended its request.

    Attributes:
        report: Name that the request gave itself, empty without one.
        processor: Name of the processor.
        reason: A reason of `ProcessorFailed`.
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
        self._chains: OrderedDict[str, ProcessorChain] = OrderedDict()
        self._max_receipts = MAX_RECEIPTS
        self._lock = Lock()

    def keep_all(self) -> None:
        """Drop nothing from now on: somebody takes, or drops, what each request leaves."""
        with self._lock:
            self._failures = deque(self._failures)
            self._max_receipts = sys.maxsize

    def failed(self, report: str | None, error: ProcessorFailed, position: int) -> Failure:
        """Keep a failure."""
        failure = Failure(report or "", error.processor, error.reason, error.message, position)
        with self._lock:
            self._failures.append(failure)
        return failure

    @staticmethod
    def settled(failure: Failure) -> None:
        """Log a failure that ends its request: as a warning, unless the request named itself."""
        level = logging.DEBUG if failure.report else logging.WARNING
        text = "logits processor %s: %s, position %d; the answer ends"
        logger.log(level, text, failure.processor, failure.message, failure.position)

    def withdraw(self, failure: Failure) -> None:
        """Drop a failure that was none, if nobody has taken it yet."""
        with self._lock:
            if failure in self._failures:
                self._failures.remove(failure)

    def began(self, report: str | None, chain: ProcessorChain) -> None:
        """Keep a chain, which goes on writing its receipt, if the request named itself."""
        if report is None:
            return
        with self._lock:
            self._chains[report] = chain
            while len(self._chains) > self._max_receipts:
                self._chains.popitem(last=False)

    def begun(self, report: str) -> ProcessorChain | None:
        """The chain of the request of that name, None if it has not begun."""
        with self._lock:
            return self._chains.get(report)

    def take_failures(self) -> list[dict[str, Any]]:
        """The failures since the last call, as JSON data."""
        with self._lock:
            taken = [asdict(failure) for failure in self._failures]
            self._failures.clear()
        return taken

    def take_receipt(self, report: str, last: tuple[int, int] | None = None) -> Receipt | None:
        """The receipt of the request of that name, None if there is none; it is not kept.

        Args:
            report: Name that the request gave itself.
            last: Id and position of the answer's last token, behind which perhaps no step showed it
                to the chain; None where a processor ended the request.
        """
        with self._lock:
            chain = self._chains.pop(report, None)
        if chain is None:
            return None
        if last is not None and chain.position == last[1]:
            with contextlib.suppress(ProcessorFailed):  # it has nothing to do with this token any more
                chain.accept(*last)
        return chain.receipt


REPORTS = Reports()
"""The reports of this process."""
