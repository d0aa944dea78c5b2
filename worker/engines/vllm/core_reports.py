"""Failures and receipts of logits processors in vLLM's process, fetched by ``collective_rpc``."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import OrderedDict
from typing import Any

from adapters.chain import ProcessorFailed, Receipt
from worker.engines.vllm.core_calls import CoreCalls

SPARE = 1024
"""Failures that are kept beyond one for each request: of some nobody asks any more."""


class CoreReports:
    """Failures and receipts of requests, by the names that they carry.

    With several processes the first that has a report counts: all apply the same chains.

    Args:
        llm: The library's ``AsyncLLM``.
        max_requests: Most unfinished requests.
    """

    def __init__(self, llm: Any, max_requests: int) -> None:
        self._llm = llm
        self._calls = CoreCalls()
        self._max_kept = max_requests + SPARE
        self._failures: OrderedDict[str, ProcessorFailed] = OrderedDict()

    def fail(self, failure: Exception) -> None:
        """The engine has died: whoever waits for one of these methods is told."""
        self._calls.fail(failure)

    async def failure(self, report: str) -> ProcessorFailed | None:
        """The processor that ended the request, None if none did."""
        if report not in self._failures:  # a request that ends meanwhile still takes those of others
            await asyncio.shield(asyncio.ensure_future(self._take_failures()))
        while len(self._failures) > self._max_kept:
            self._failures.popitem(last=False)
        return self._failures.pop(report, None)

    async def _take_failures(self) -> None:
        """Take the failures of all requests from the engine's processes, which keep none."""
        for taken in await self._calls.answer(self._llm.collective_rpc("take_processor_failures")):
            for each in taken:
                failure = ProcessorFailed(each["processor"], each["reason"], each["message"])
                self._failures.setdefault(each["report"], failure)

    async def receipt(self, report: str, last: tuple[int, int] | None = None) -> Receipt | None:
        """The receipt of the request, None if its chain never began; it is not kept.

        Args:
            report: Name of the request.
            last: Id and position of the answer's last token, None if a processor ended it.
        """
        asked = self._llm.collective_rpc("take_processor_receipt", args=(report, last))
        for packed in await self._calls.answer(asked):
            if packed is not None:
                found: Receipt = pickle.loads(packed)
                return found
        return None

    async def drop(self, report: str) -> None:
        """Let the engine's process forget a request that was aborted."""
        with contextlib.suppress(Exception):  # the engine may have died, which is noticed elsewhere
            await self.receipt(report)
            await self.failure(report)
