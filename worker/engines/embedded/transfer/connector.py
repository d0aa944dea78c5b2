"""A worker's part in disaggregated serving: what a prefill worker holds for others, what a decode
worker receives.

==========  ================================================  =================================
a KV is     in                                                until
==========  ================================================  =================================
held        ``scheduler.guests``, with a ticket, a deadline   a reader's note, or the deadline
awaited     ``_waiting``                                      there are pages for it
received    ``scheduler.guests``, with a read                 the read ends
ready       ``scheduler.guests``, without                     a slot is free: it is resumed
recomputed  the scheduler's queue, as without a hand-off
abandoned   ``scheduler.guests``, under a stand-in            its read cannot write any more
==========  ================================================  =================================

Everything happens in the step thread, between two steps.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from adapters.chain import Mode
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.plan import Output, PageCopy, Plan, Request
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.transfer.handle import handle_as_json
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.nixl import KvHandle, KvPort, KvRead

logger = logging.getLogger(__name__)

BUSY_BUDGET_S = 0.004
"""Longest that reads may hold up a step while there are rows to decode."""

IDLE_BUDGET_S = 0.02
"""Longest that reads go on before messages are looked at, with nothing to decode."""

SERVING_SHARE = 0.05
"""Part of its time that a busy holder gives its readers: over TCP its step thread sends what
they read.
"""

POLL_S = 0.0005
"""Pause between looking for notes or for a connection, with nothing else to do."""

SLOW_POLL_S = 0.005
"""The same once the newest hold is older than `FRESH_S`: nobody seems to come for it."""

FRESH_S = 1.0

IDLE_POLL_S = 0.02
"""The same on a prefill worker that holds nothing: a reader that comes too late still needs it
to connect.
"""


@dataclass(slots=True)
class Hold:
    """KV that another worker is to read."""

    request: Request
    handle: KvHandle
    since: float


@dataclass(slots=True)
class Receipt:
    """KV that is on its way to here; `read` is None before it has begun and after it has ended."""

    request: Request
    handle: KvHandle
    read: KvRead | None = None


def open_exchange(
    tensors: Sequence[torch.Tensor],
    scheduler: Scheduler,
    config: EmbeddedConfig,
    model_fingerprint: str,
    numerics: str,
) -> Exchange:
    """The exchange of a worker.

    Args:
        tensors: Its store: keys of each layer, then values of each layer.
        scheduler: Its scheduler.
        config: Its settings; its role is not ``aggregated``.
        model_fingerprint: Of its model.
        numerics: `Numerics.made_by` of its model.

    Raises:
        StartupError: NIXL is not installed, or cannot be used here.
    """
    _, heads, size, width = tensors[0].shape
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    layout = KvLayout(model_fingerprint, dtype, len(tensors) // 2, heads, width, config.kv_block_size, size, numerics)
    port = KvPort(tensors, layout, config.kv_devices)
    return Exchange(port, scheduler, config.kv_hold_s if config.role == "prefill" else None)


class Exchange:
    """What is held and what is received.

    Args:
        port: This worker's end of the transfers.
        scheduler: Of the same worker.
        hold_s: How long KV is held for a reader, seconds; None on a worker that holds nothing.
        clock: Of `hold_s`, seconds.

    Attributes:
        counts: Hand-offs by what became of them: ``held``, ``taken``, ``timed_out``; ``received``,
            ``known`` (nothing was missing), ``expired``, ``lost``, ``cancelled``; and ``bytes``
            received.
        seconds: Time that the reads of ``received`` took, summed.
    """

    def __init__(
        self,
        port: KvPort,
        scheduler: Scheduler,
        hold_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = port
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._scheduler = scheduler
        self._hold_s = hold_s
        self._clock = clock
        self._holds: dict[int, Hold] = {}  # by ticket, oldest first
        self._waiting: deque[Receipt] = deque()
        self._reading: list[Receipt] = []
        self._ready: deque[Request] = deque()
        self._abandoned: list[tuple[KvRead, Request]] = []
        self._served = time.monotonic()

    def __repr__(self) -> str:
        return (
            f"Exchange({len(self._holds)} held, {len(self._waiting)} awaited, {len(self._reading)} being received, "
            f"{len(self._ready)} ready, {len(self._abandoned)} abandoned)"
        )

    @property
    def layout(self) -> KvLayout:
        """Of the store."""
        return self.port.layout

    @property
    def num_held(self) -> int:
        """Prompts held for other workers. May be read by any thread."""
        return len(self._holds)

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the store that requests own; what is only cached is not counted. May be read
        by any thread.
        """
        cache = self._scheduler.cache
        return (cache.num_pages - cache.num_available) * (self.layout.page_size // self.layout.block_size)

    @property
    def wait_s(self) -> float | None:
        """How soon `poll` should be called: 0 at once, None for no need before the next message."""
        if self._reading or (self._ready and self._scheduler.has_slot):
            return 0.0
        if self._waiting or self._ready:
            return POLL_S
        if self._holds:
            newest = next(reversed(self._holds.values()))
            return POLL_S if self._clock() < newest.since + FRESH_S else SLOW_POLL_S
        if self._abandoned or self.port.is_lingering:
            return POLL_S
        return None if self._hold_s is None else IDLE_POLL_S

    def hold(self, plan: Plan, outputs: Sequence[Output]) -> None:
        """Hold the KV of requests that have just ended and say in their outputs where it is;
        they show no token.
        """
        for request, output in zip(plan.sampled, outputs, strict=True):
            if not request.keeps_kv or output.finish_reason != "length":
                continue
            output.token_id = None
            handle = self.port.publish(request.pages[: -(-request.prompt_length // self.layout.page_size)])
            if handle is None:
                self._scheduler.dismiss(request)
                output.finish_reason, output.error = "error", "too many prompts are held for other workers"
                continue
            self._holds[handle.ticket] = Hold(request, handle, self._clock())
            self.counts["held"] += 1
            output.kv = handle_as_json(handle)

    def receive(self, request: Request, handle: KvHandle) -> None:
        """Take in a request whose prompt's KV another worker holds."""
        self._scheduler.arrive(request)
        self._waiting.append(Receipt(request, handle))

    def abort(self, request_id: str) -> Output | None:
        """Give up a request that is not with the scheduler yet; None if there is none."""
        for receipt in (*self._waiting, *self._reading):
            if receipt.request.id == request_id:
                self._cancel(receipt)
                return Output(request_id, finish_reason="cancelled", chain=receipt.request.chain)
        for request in self._ready:
            if request.id == request_id:
                self._ready.remove(request)
                self._scheduler.dismiss(request)
                return Output(request_id, finish_reason="cancelled", chain=request.chain)
        return None

    def poll(self) -> None:
        """Let everything go on for a bounded time: notes, deadlines, reads; ready requests join
        the scheduler.
        """
        self._take_notes()
        self._end_late_holds()
        self._begin_reads()
        self._go_on_reading()
        self._abandoned = [one for one in self._abandoned if not self._is_over(*one)]
        while self._ready and self._scheduler.has_slot:
            self._scheduler.resume(self._ready.popleft())

    def close(self) -> None:
        """Give everything up, and disconnect. Memory that a read may still write is kept from
        being freed.
        """
        for receipt in (*self._waiting, *self._reading):
            self._cancel(receipt)
        for request in self._ready:
            self._scheduler.dismiss(request)
        self._ready.clear()
        for hold in list(self._holds.values()):
            self._end_hold(hold, "timed_out")
        self._abandoned = [one for one in self._abandoned if not self._is_over(*one)]
        if not self._abandoned:
            self.port.close()

    def _take_notes(self) -> None:
        if self._hold_s is not None or self._reading or self._abandoned or self.port.is_lingering:
            began = time.monotonic()
            until = began + min(SERVING_SHARE * (began - self._served), IDLE_BUDGET_S)
            self._end_taken_holds()
            while self._holds and time.monotonic() < until:
                self._end_taken_holds()
            self._served = time.monotonic()

    def _end_taken_holds(self) -> None:
        for ticket in self.port.notes():
            hold = self._holds.get(ticket)
            if hold is not None:
                self._end_hold(hold, "taken")

    def _end_late_holds(self) -> None:
        if self._hold_s is None:
            return
        latest = self._clock() - self._hold_s
        while self._holds and (hold := next(iter(self._holds.values()))).since <= latest:
            logger.warning("the KV of request %s was held for %g s, and nobody came", hold.request.id, self._hold_s)
            self._end_hold(hold, "timed_out")

    def _end_hold(self, hold: Hold, outcome: str) -> None:
        self.port.withdraw(hold.handle)  # first: a reader that is late must find out
        del self._holds[hold.handle.ticket]
        self._scheduler.dismiss(hold.request)
        self.counts[outcome] += 1

    def _begin_reads(self) -> None:
        """In order of arrival, with those who wait in the scheduler's queue: preempted, or
        without a hand-off.
        """
        scheduler = self._scheduler
        scheduler.waits_outside = None
        while self._waiting and len(self._reading) + len(self._ready) < scheduler.max_num_seqs:
            receipt = self._waiting[0]
            if scheduler.waiting and scheduler.waiting[0].arrival < receipt.request.arrival:
                return
            copies = scheduler.invite(receipt.request)
            if copies is None:
                scheduler.waits_outside = receipt.request.arrival
                return
            self._waiting.popleft()
            self._prepare(receipt.request, copies)
            self._begin(receipt)

    def _prepare(self, request: Request, copies: Sequence[PageCopy]) -> None:
        """Copy what is known, and zero what neither a copy nor the read will fill: a NaN would
        get past every mask.
        """
        last = (len(request.pages) - 1) * self.layout.page_size
        opened = request.pages[-1:] if request.num_computed <= last else []
        for tensor in self.port.tensors:
            for each in copies:
                tensor[each.target, :, : each.num_tokens] = tensor[each.source, :, : each.num_tokens]
                tensor[each.target, :, each.num_tokens :] = 0
            for page in opened:
                tensor[page] = 0
        device = self.port.tensors[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the read is no part of torch's stream, and must come after it

    def _begin(self, receipt: Receipt) -> None:
        """Read what is missing, except the last position: that is computed, for its logits."""
        request = receipt.request
        start, stop = request.num_computed, request.prompt_length - 1
        if stop - start < self.layout.block_size:  # less than a block: sooner computed than fetched
            self.port.let_go(receipt.handle)
            self.counts["known"] += 1
            note_mode(request, "disaggregated")
            self._ready.append(request)
            return
        receipt.read = self.port.read(receipt.handle, request.pages, start, stop)
        self._reading.append(receipt)

    def _go_on_reading(self) -> None:
        budget = IDLE_BUDGET_S if self._scheduler.is_idle else BUSY_BUDGET_S
        until = time.monotonic() + budget
        for receipt in list(self._reading):
            assert receipt.read is not None
            state = receipt.read.poll(max(0.0, until - time.monotonic()))
            if state != "busy":
                self._reading.remove(receipt)
                self._end_read(receipt, receipt.read, state)
            elif time.monotonic() >= until:
                self._reading.append(self._reading.pop(0))  # another one's turn next time
                return

    def _end_read(self, receipt: Receipt, read: KvRead, state: str) -> None:
        request = receipt.request
        clean = read.release()
        if state == "done" and clean:
            self._scheduler.cache.complete(request, request.prompt_length - 1)
            self.counts["received"] += 1
            self.counts["bytes"] += read.num_bytes
            self.seconds += read.seconds
            note_mode(request, "disaggregated")
            self._ready.append(request)
            return
        self.counts[state] += 1
        logger.warning("the KV of request %s is %s: its prompt is computed here", request.id, state)
        self._give_back(request, read if not clean else None)
        note_mode(request, "local prefill")
        self._scheduler.add(request)

    def _cancel(self, receipt: Receipt) -> None:
        self.counts["cancelled"] += 1
        if receipt.read is None:
            self._waiting.remove(receipt)
            self.port.let_go(receipt.handle)
            return
        self._reading.remove(receipt)
        clean = receipt.read.release()
        self._give_back(receipt.request, receipt.read if not clean else None)

    def _give_back(self, request: Request, read: KvRead | None) -> None:
        """Free a request's pages; if `read` may still write into them, a stand-in keeps them
        until it cannot.
        """
        if read is None:
            self._scheduler.dismiss(request)
            return
        stand_in = replace(request, chain=None)
        self._scheduler.guests.append(stand_in)
        self._scheduler.guests.remove(request)
        request.pages, request.num_computed = [], 0
        self._abandoned.append((read, stand_in))

    def _is_over(self, read: KvRead, stand_in: Request) -> bool:
        over = read.release()
        if over:
            self._scheduler.dismiss(stand_in)
        return over


def note_mode(request: Request, mode: Mode) -> None:
    """Say in a request's receipt where its prompt was computed."""
    if request.chain is not None:
        request.chain.receipt.mode = mode
