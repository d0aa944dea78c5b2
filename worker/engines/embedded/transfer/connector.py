"""A worker's KV connector: the KV that it leases to others, and the KV that it receives.

==============  =====================================================  ==========================
a KV is         its request is in                                      until
==============  =====================================================  ==========================
leased          the scheduler's ``pinned``, with a lease here          released, or timed out
waiting         ``_waiting``                                           there are pages for it
being received  the scheduler's ``pinned``, with a read here           the read ends
ready           the scheduler's ``pinned``                             a slot is free: it resumes
recomputed      the scheduler's ``waiting``, as without a transfer     its turn comes
abandoned       the scheduler's ``pinned``, as a stand-in              its read cannot write more
==============  =====================================================  ==========================

Everything happens in the step thread, between two steps.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from adapters.chain import Mode
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache import KvStore
from worker.engines.embedded.plan import Output, PageCopy, Plan, Request
from worker.engines.embedded.transfer.handle import KvHandle, handle_as_json
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.transport import KvRead, KvTransport

logger = logging.getLogger(__name__)

BUSY_BUDGET_S = 0.004
"""Longest that reads may delay a step while there are tokens to compute."""

IDLE_BUDGET_S = 0.02
"""Longest that reads go on before messages are looked at, with nothing to compute."""

SERVING_SHARE = 0.05
"""Part of a busy prefill worker's time that goes to its readers: over TCP its step thread sends
what they read.
"""

POLL_S = 0.0005
"""Pause between polls for releases or connections, with nothing else to do."""

SLOW_POLL_S = 0.005
"""The same once the newest lease is older than `FRESH_S`: its reader is not about to come."""

FRESH_S = 1.0

IDLE_POLL_S = 0.02
"""The same on a prefill worker without leases: a late reader still needs it to connect."""


class PinningScheduler(Protocol):
    """What the connector needs of the scheduler, which alone edits its queues."""

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at once."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""

    @property
    def has_slot(self) -> bool:
        """Whether one more request may run."""

    def arrive(self, request: Request) -> None:
        """Number a request in order of arrival."""

    def add(self, request: Request) -> None:
        """Queue a request that owns no pages, to be computed here."""

    def pin(self, request: Request) -> tuple[PageCopy, ...] | None:
        """Allocate pages and pin them; returns what must be copied, or None: try again later."""

    def unblock(self, request: Request) -> None:
        """`pin` will not be called for this request again."""

    def complete_transfer(self, request: Request, num_computed: int) -> None:
        """The KV of the first `num_computed` tokens of a pinned request has been received."""

    def resume(self, request: Request) -> None:
        """Let a pinned request run; there must be a slot."""

    def unpin(self, request: Request) -> None:
        """Free the pages of a pinned request."""

    def detach_pages(self, request: Request) -> Request:
        """Take a pinned request's pages from it; a stand-in keeps them pinned until `unpin`."""


@dataclass(frozen=True, slots=True)
class KvLease:
    """KV that a decode worker may read.

    Attributes:
        request: A finished request, whose pages hold it.
        handle: What the decode worker is told.
        granted_s: When, by the connector's clock.
    """

    request: Request
    handle: KvHandle
    granted_s: float


@dataclass(slots=True, eq=False)
class IncomingKv:
    """KV that is to be received; `read` is None before it has begun."""

    request: Request
    handle: KvHandle
    read: KvRead | None = None


def open_connector(
    store: KvStore,
    scheduler: PinningScheduler,
    config: EmbeddedConfig,
    model_fingerprint: str,
    numerics: str,
) -> KvConnector:
    """The KV connector of a worker.

    Args:
        store: Its KV store.
        scheduler: Its scheduler.
        config: Its settings; its role is not ``aggregated``.
        model_fingerprint: Of its model.
        numerics: `Numerics.made_by` of its model.

    Raises:
        StartupError: NIXL is not installed, or cannot be used here.
    """
    _, heads, size, width = store.keys[0].shape
    names = model_fingerprint, store.dtype_name
    layout = KvLayout(*names, len(store.keys), heads, width, config.kv_block_size, size, numerics)
    transport = KvTransport(store.tensors, layout, config.kv_devices)
    return KvConnector(transport, store, scheduler, config.kv_lease_s if config.role == "prefill" else None)


class KvConnector:
    """Leases KV to other workers, and receives KV from them.

    Args:
        transport: This worker's end of the transfers.
        store: Its KV store.
        scheduler: Its scheduler.
        lease_s: Seconds after which a lease times out; None on a worker that grants none.
        clock: Of `lease_s`, seconds.

    Attributes:
        counts: Transfers by what became of them: ``leased``, ``released``, ``timed_out``;
            ``received``, ``cached`` (all of it was cached here), ``expired``, ``lost``,
            ``cancelled``; and ``bytes`` received.
        seconds: Time that the reads of ``received`` took, summed.
    """

    def __init__(
        self,
        transport: KvTransport,
        store: KvStore,
        scheduler: PinningScheduler,
        lease_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport = transport
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._store = store
        self._scheduler = scheduler
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[int, KvLease] = {}  # by fencing token, oldest first
        self._waiting: deque[IncomingKv] = deque()  # in order of arrival
        self._reading: list[IncomingKv] = []
        self._ready: deque[Request] = deque()
        self._abandoned: list[tuple[KvRead, Request]] = []
        self._polled_s = time.monotonic()

    def __repr__(self) -> str:
        return (
            f"KvConnector({len(self._leases)} leased, {len(self._waiting)} waiting, {len(self._reading)} being "
            f"received, {len(self._ready)} ready, {len(self._abandoned)} abandoned)"
        )

    @property
    def layout(self) -> KvLayout:
        """Of the store."""
        return self.transport.layout

    @property
    def num_leased(self) -> int:
        """Prompts whose KV is leased to other workers. May be read by any thread."""
        return len(self._leases)

    @property
    def wait_s(self) -> float | None:
        """How soon `poll` should be called: 0 at once, None for no need before the next message."""
        if self._reading or (self._ready and self._scheduler.has_slot):
            return 0.0
        if self._waiting or self._ready:
            return POLL_S
        if self._leases:
            newest = next(reversed(self._leases.values()))
            return POLL_S if self._clock() < newest.granted_s + FRESH_S else SLOW_POLL_S
        if self._abandoned or self.transport.is_lingering:
            return POLL_S
        return None if self._lease_s is None else IDLE_POLL_S

    def lease(self, plan: Plan, outputs: Sequence[Output]) -> None:
        """Lease the KV of requests that a step has finished and pinned.

        Their outputs get the handle, and show no token.
        """
        for request, output in zip(plan.sampled, outputs, strict=True):
            if not request.keeps_kv or output.finish_reason != "length":
                continue
            output.token_id = None
            handle = self.transport.grant(request.pages[: -(-request.prompt_length // self.layout.page_size)])
            if handle is None:
                self._scheduler.unpin(request)
                output.finish_reason, output.error = "error", "too many prompts are leased to other workers"
                continue
            self._leases[handle.token] = KvLease(request, handle, self._clock())
            self.counts["leased"] += 1
            output.kv = handle_as_json(handle)

    def receive(self, request: Request, handle: KvHandle) -> None:
        """Take in a request whose prompt's KV is leased to this worker."""
        self._scheduler.arrive(request)
        self._waiting.append(IncomingKv(request, handle))

    def abort(self, request_id: str) -> Output | None:
        """Drop a request that the scheduler does not run yet; None if there is none."""
        for incoming in (*self._waiting, *self._reading):
            if incoming.request.id == request_id:
                self._cancel(incoming)
                return Output(request_id, finish_reason="cancelled", chain=incoming.request.chain)
        for request in self._ready:
            if request.id == request_id:
                self._ready.remove(request)
                self._scheduler.unpin(request)
                return Output(request_id, finish_reason="cancelled", chain=request.chain)
        return None

    def poll(self) -> None:
        """Let all transfers move on for a bounded time: releases, time-outs, reads.

        Requests whose KV is ready resume while there are slots.
        """
        self._poll_releases()
        self._time_out_leases()
        self._begin_reads()
        self._poll_reads()
        self._free_abandoned()
        while self._ready and self._scheduler.has_slot:
            self._scheduler.resume(self._ready.popleft())

    def close(self) -> None:
        """End all transfers, and disconnect; not while an abandoned read may still write."""
        for incoming in (*self._waiting, *self._reading):
            self._cancel(incoming)
        for request in self._ready:
            self._scheduler.unpin(request)
        self._ready.clear()
        for lease in list(self._leases.values()):
            self._end_lease(lease, "timed_out")
        self._free_abandoned()
        if not self._abandoned:
            self.transport.close()

    def _poll_releases(self) -> None:
        """End leases that were released; serve readers over TCP for their share of the time."""
        if self._lease_s is not None or self._reading or self._abandoned or self.transport.is_lingering:
            began = time.monotonic()
            until = began + min(SERVING_SHARE * (began - self._polled_s), IDLE_BUDGET_S)
            self._end_released_leases()
            while self._leases and time.monotonic() < until:
                self._end_released_leases()
            self._polled_s = time.monotonic()

    def _end_released_leases(self) -> None:
        for token in self.transport.poll():
            lease = self._leases.get(token)
            if lease is not None:
                self._end_lease(lease, "released")

    def _time_out_leases(self) -> None:
        if self._lease_s is None:
            return
        latest = self._clock() - self._lease_s
        while self._leases and (lease := next(iter(self._leases.values()))).granted_s <= latest:
            logger.warning("request %s: the lease of its KV timed out after %g s", lease.request.id, self._lease_s)
            self._end_lease(lease, "timed_out")

    def _end_lease(self, lease: KvLease, outcome: str) -> None:
        self.transport.revoke(lease.handle)  # before the pages are freed: a late reader must find out
        del self._leases[lease.handle.token]
        self._scheduler.unpin(lease.request)
        self.counts[outcome] += 1

    def _begin_reads(self) -> None:
        """In order of arrival, as far as there are pages and, once they are read, slots."""
        while self._waiting and len(self._reading) + len(self._ready) < self._scheduler.max_num_seqs:
            incoming = self._waiting[0]
            copies = self._scheduler.pin(incoming.request)
            if copies is None:
                return
            self._waiting.popleft()
            self._begin(incoming, copies)

    def _begin(self, incoming: IncomingKv, copies: Sequence[PageCopy]) -> None:
        """Read what is not cached, except what is computed here, for its logits: the last position,
        or after a migration those of the answer that the chain is replayed on.
        """
        request = incoming.request
        self._store.copy(copies)
        if request.num_computed <= (len(request.pages) - 1) * self.layout.page_size:
            self._store.zero(request.pages[-1:])  # the read does not fill it to its end
        start, stop = request.num_computed, request.num_reusable
        if stop - start < self.layout.block_size:  # less than a block: sooner computed than read
            self.transport.release(incoming.handle)
            self.counts["cached"] += 1
            note_mode(request, "disaggregated")
            self._ready.append(request)
            return
        incoming.read = self.transport.read(incoming.handle, request.pages, start, stop)
        self._reading.append(incoming)

    def _poll_reads(self) -> None:
        budget = IDLE_BUDGET_S if self._scheduler.is_idle else BUSY_BUDGET_S
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
            self._scheduler.complete_transfer(request, request.num_reusable)
            self.counts["received"] += 1
            self.counts["bytes"] += read.num_bytes
            self.seconds += read.seconds
            note_mode(request, "disaggregated")
            self._ready.append(request)
            return
        self.counts[state] += 1
        logger.warning("request %s: its KV is %s, its prompt is computed here", request.id, state)
        self._free_pages(request, None if is_released else read)
        note_mode(request, "local prefill")
        self._scheduler.add(request)

    def _cancel(self, incoming: IncomingKv) -> None:
        self.counts["cancelled"] += 1
        if incoming.read is None:
            self._waiting.remove(incoming)
            self._scheduler.unblock(incoming.request)
            self.transport.release(incoming.handle)
            return
        self._reading.remove(incoming)
        self._free_pages(incoming.request, None if incoming.read.release() else incoming.read)

    def _free_pages(self, request: Request, read: KvRead | None) -> None:
        """Free a request's pages; not before `read`, if there is one, cannot write to them."""
        if read is None:
            self._scheduler.unpin(request)
        else:
            self._abandoned.append((read, self._scheduler.detach_pages(request)))

    def _free_abandoned(self) -> None:
        """Free the pages of abandoned reads that have ended by now."""
        left = []
        for read, stand_in in self._abandoned:
            if read.release():
                self._scheduler.unpin(stand_in)
            else:
                left.append((read, stand_in))
        self._abandoned = left


def note_mode(request: Request, mode: Mode) -> None:
    """Say in a request's receipt where its prompt was computed, unless it was migrated."""
    if request.chain is not None and request.chain.receipt.mode != "migrated":
        request.chain.receipt.mode = mode
