"""The decode side of KV transfer: requests whose prompt's KV is received from a prefill worker."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from adapters.chain import Mode
from worker.engines.embedded.kv_cache import KvStore
from worker.engines.embedded.pinned import PinnedRequests
from worker.engines.embedded.plan import Output, PageCopy, Request
from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.transport import KvRead, KvTransport

logger = logging.getLogger(__name__)

BUSY_BUDGET_S = 0.004
"""Longest that reads may delay a step while there are tokens to compute."""

IDLE_BUDGET_S = 0.02
"""Longest that reads go on before messages are looked at, with nothing to compute."""

POLL_S = 0.0005
"""Pause between polls for pages, slots, or the end of an abandoned read."""


@dataclass(slots=True, eq=False)
class IncomingKv:
    """KV that is to be received; `read` is None before it has begun."""

    request: Request
    handle: KvHandle
    read: KvRead | None = None


class AbandonedReads:
    """Reads that cannot be cancelled; until they end, their pages stay pinned.

    Args:
        transfers: The requests whose pages are pinned.
    """

    def __init__(self, transfers: PinnedRequests) -> None:
        self._transfers = transfers
        self._reads: list[tuple[KvRead, Request]] = []

    def __len__(self) -> int:
        return len(self._reads)

    def free_pages(self, request: Request, read: KvRead | None) -> None:
        """Free a request's pages; not before `read`, if there is one, cannot write to them."""
        if read is None:
            self._transfers.unpin(request)
        else:
            self._reads.append((read, self._transfers.detach_pages(request)))

    def free_ended(self) -> None:
        """Free the pages of reads that have ended by now."""
        left = []
        for read, stand_in in self._reads:
            if read.release():
                self._transfers.unpin(stand_in)
            else:
                left.append((read, stand_in))
        self._reads = left


class DecodeSide:
    """Receives KV, in order of arrival, and lets its requests run.

    Args:
        transport: This worker's end of the transfers.
        store: The worker's KV store.
        transfers: The requests whose pages are pinned.
        counts: Counts by outcome, which it adds to: ``received``, ``cached`` (all of it was cached
            here), ``expired``, ``lost``, ``cancelled``; ``bytes`` received; and prompts that are
            computed here because their KV was ``dropped``, on its way or once it was here.

    Attributes:
        seconds: Time that the reads of ``received`` took, summed.
        abandoned: Reads that were given up, and may still write.
    """

    def __init__(self, transport: KvTransport, store: KvStore, transfers: PinnedRequests, counts: Counter[str]) -> None:
        self.seconds = 0.0
        self.abandoned = AbandonedReads(transfers)
        self._transport = transport
        self._store = store
        self._transfers = transfers
        self._queues = transfers.queues
        self._counts = counts
        self._waiting: deque[IncomingKv] = deque()  # in order of arrival
        self._is_untried = False  # one has arrived since the last poll
        self._reading: list[IncomingKv] = []
        self._ready: deque[Request] = deque()

    def __repr__(self) -> str:
        return (
            f"{len(self._waiting)} waiting, {len(self._reading)} being received, {len(self._ready)} ready, "
            f"{len(self.abandoned)} abandoned"
        )

    @property
    def is_reading(self) -> bool:
        """Whether the transport carries out a read, abandoned ones too."""
        return bool(self._reading or self.abandoned)

    @property
    def wait_s(self) -> float | None:
        """Time until the next `poll`: 0 at once, None for no need before the next message."""
        if self._reading or self._is_untried or (self._ready and self._queues.has_slot(self._ready[0])):
            return 0.0
        return POLL_S if self._waiting or self._ready or self.abandoned else None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their KV, or with it for a slot. May be read by any thread."""
        return len(self._waiting) + len(self._reading) + len(self._ready)

    @property
    def is_drained(self) -> bool:
        """Whether there are none of these."""
        return not self.num_waiting

    def receive(self, request: Request, handle: KvHandle) -> None:
        """Take in a request whose prompt's KV is leased to this worker.

        KV of other weights, which have changed here since the request was admitted, is computed.
        """
        if handle.layout.model != self._transport.layout.model:
            self._counts["cancelled"] += 1
            self._transport.release(handle)
            self._compute_here(request)
            return
        self._queues.arrive(request)
        self._waiting.append(IncomingKv(request, handle))
        self._is_untried = True

    def recompute(self) -> None:
        """Let every request compute its KV itself that has not joined the batch yet."""
        for incoming in (*self._waiting, *self._reading):
            self._cancel(incoming)
            self._compute_here(incoming.request)
        for request in self._ready:
            self._transfers.unpin(request)
            self._compute_here(request)
        self._ready.clear()

    def _compute_here(self, request: Request) -> None:
        self._counts["dropped"] += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Let a request whose KV is not used wait for its turn, to compute its prompt."""
        request.queue_times = None
        note_mode(request, "local prefill")
        self._queues.add(request)

    def abort(self, request_id: str) -> Output | None:
        """Drop a request that the scheduler does not run yet; None if there is none."""
        for incoming in (*self._waiting, *self._reading):
            if incoming.request.id == request_id:
                self._cancel(incoming)
                return Output(request_id, finish_reason="cancelled", chain=incoming.request.chain)
        for request in self._ready:
            if request.id == request_id:
                self._ready.remove(request)
                self._transfers.unpin(request)
                return Output(request_id, finish_reason="cancelled", chain=request.chain)
        return None

    def poll(self) -> None:
        """Let reads move on for a bounded time; requests resume while there are slots."""
        self._is_untried = False
        queues = self._queues
        while self._waiting and len(self._reading) + len(self._ready) < queues.max_num_seqs:
            copies = self._transfers.pin(self._waiting[0].request)
            if copies is None:  # too few pages: later ones wait, too
                break
            self._begin(self._waiting.popleft(), copies)
        self._poll_reads()
        self.abandoned.free_ended()
        while self._ready and queues.has_slot(self._ready[0]):
            self._transfers.resume(self._ready.popleft())
        self._transfers.num_kept_rows = len(self._ready[0].sequences) if self._ready else 0

    def close(self) -> None:
        """Drop all requests that do not run yet."""
        for incoming in (*self._waiting, *self._reading):
            self._cancel(incoming)
        for request in self._ready:
            self._transfers.unpin(request)
        self._ready.clear()
        self.abandoned.free_ended()

    def _begin(self, incoming: IncomingKv, copies: Sequence[PageCopy]) -> None:
        """Read what is not cached, except what is computed here, for its logits: the last position,
        or after a migration those of the answer that the chain is replayed on.
        """
        request, layout = incoming.request, self._transport.layout
        self._store.copy(copies)
        start, stop = request.num_computed, request.num_reusable
        last = stop // layout.page_size
        if start <= last * layout.page_size:
            self._store.begin([request.pages[last]])  # the read does not fill it to its end
        if stop - start < layout.block_size:  # less than a block: sooner computed than read
            self._transport.release(incoming.handle)
            self._counts["cached"] += 1
            note_mode(request, "disaggregated")
            self._ready.append(request)
            return
        incoming.read = self._transport.read(incoming.handle, request.pages, start, stop)
        self._reading.append(incoming)

    def _poll_reads(self) -> None:
        budget = IDLE_BUDGET_S if self._queues.is_idle else BUSY_BUDGET_S
        until = time.monotonic() + budget
        for incoming in list(self._reading):
            assert incoming.read is not None
            state = incoming.read.poll(max(0.0, until - time.monotonic()))
            if state != "busy":
                self._reading.remove(incoming)
                self._end_read(incoming.request, incoming.read, state)
            elif time.monotonic() >= until:
                self._reading.append(self._reading.pop(0))  # another one comes first next time
                return

    def _end_read(self, request: Request, read: KvRead, state: str) -> None:
        is_released = read.release()
        if state == "done" and is_released:
            self._transfers.complete(request, request.num_reusable)
            self._counts["received"] += 1
            self._counts["bytes"] += read.num_bytes
            self.seconds += read.seconds
            note_mode(request, "disaggregated")
            self._ready.append(request)
            return
        outcome = "lost" if state == "done" else state  # it may write on: what is here is not sure to stay
        self._counts[outcome] += 1
        logger.warning("request %s: its KV is %s, its prompt is computed here", request.id, outcome)
        self.abandoned.free_pages(request, None if is_released else read)
        self._requeue(request)

    def _cancel(self, incoming: IncomingKv) -> None:
        self._counts["cancelled"] += 1
        if incoming.read is None:
            self._waiting.remove(incoming)
            self._transfers.unblock(incoming.request)
            self._transport.release(incoming.handle)
            return
        self._reading.remove(incoming)
        self.abandoned.free_pages(incoming.request, None if incoming.read.release() else incoming.read)


def note_mode(request: Request, mode: Mode) -> None:
    """Say in a request's receipt where its prompt was computed, unless it was migrated."""
    if request.chain is not None and request.chain.receipt.mode != "migrated":
        request.chain.receipt.mode = mode
