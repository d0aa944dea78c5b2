"""Requests whose pages are pinned for a KV transfer; `transfer.connector` says which these are."""

from __future__ import annotations

import time
from dataclasses import replace

from worker.engines import QueueTimes
from worker.engines.embedded.plan import PageCopy, Request
from worker.engines.embedded.queues import Queues, spare_pages


class PinnedRequests:
    """Allocates and pins pages for the KV that is received, and frees pinned pages.

    Transfers and the waiting queue are served in one order of arrival.

    Args:
        queues: The scheduler's queues, whose ``pinned`` this alone takes requests from.

    Attributes:
        queues: The same.
        num_kept_rows: Rows of a batch that are kept for a request whose KV has been received.
    """

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.num_kept_rows = 0
        self._blocked: Request | None = None

    def pin(self, request: Request) -> tuple[PageCopy, ...] | None:
        """Allocate pages for all tokens of a request that has arrived, and pin them for transfer.

        Where only pages are missing, no request that arrived later is admitted until `pin` or
        `unblock` is called again.

        Returns:
            Copies within the store to carry out before anything is written; None if there are too
            few pages, or a request that arrived earlier is waiting.
        """
        self._blocked = None
        queues = self.queues
        if queues.waiting and queues.waiting[0].arrival < request.arrival:
            return None
        copies = queues.cache.allocate(request, spare_pages(queues, queues.cache))
        if copies is None:
            self._blocked = request
            return None
        request.num_cached_tokens = request.num_computed
        now_s = time.monotonic()
        request.queue_times = QueueTimes(now_s, now_s)
        queues.pinned.append(request)
        return copies

    def unblock(self, request: Request) -> None:
        """`pin` will not be called for this request again."""
        if self._blocked is request:
            self._blocked = None

    def blocks(self, request: Request) -> bool:
        """Whether a transfer that arrived before `request` waits for pages."""
        return self._blocked is not None and request.arrival > self._blocked.arrival

    def complete(self, request: Request, num_computed: int) -> None:
        """The KV of the first `num_computed` tokens of a pinned request has been received."""
        self.queues.cache.complete(request, num_computed)
        if request.queue_times is not None:
            now_s = time.monotonic()
            request.queue_times = replace(request.queue_times, received_s=now_s, admitted_s=now_s)

    def resume(self, request: Request) -> None:
        """Move a pinned request into prefill; there must be a slot."""
        self.queues.pinned.remove(request)
        if request.queue_times is not None:
            request.queue_times = replace(request.queue_times, admitted_s=time.monotonic())
        self.queues.start_prefill(request)

    def unpin(self, request: Request) -> None:
        """Free the pages of a pinned request."""
        self.queues.pinned.remove(request)
        self.queues.cache.free(request)

    def detach_pages(self, request: Request) -> Request:
        """Take a pinned request's pages from it, for as long as something may still write there.

        Returns:
            A stand-in that owns them; they stay pinned until `unpin` is called for it.
        """
        if request.companion is not None:
            self.queues.cache.free(request.companion)
        stand_in = replace(request, chain=None, companion=None)
        pinned = self.queues.pinned
        pinned[pinned.index(request)] = stand_in
        request.pages, request.num_computed = [], 0
        return stand_in
