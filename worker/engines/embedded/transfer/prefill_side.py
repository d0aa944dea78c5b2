"""The prefill side of KV transfer: KV leased to decode workers, until released or timed out."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.engines.embedded.pinned import PinnedRequests
from worker.engines.embedded.plan import Output, Plan, Request
from worker.engines.embedded.transfer.handle import KvHandle, handle_as_json
from worker.engines.embedded.transfer.transport import KvTransport

logger = logging.getLogger(__name__)

SERVING_SHARE = 0.05
"""Part of a busy prefill worker's time that goes to its readers: over TCP its step thread sends
their data.
"""

SERVING_BUDGET_S = 0.02
"""Longest that readers are served before messages are looked at."""

POLL_S = 0.0005
"""Pause between polls for releases or connections, with nothing else to do."""

SLOW_POLL_S = 0.005
"""The same once the newest lease is older than `FRESH_S`: its reader is not about to come."""

FRESH_S = 1.0

IDLE_POLL_S = 0.02
"""The same on a prefill worker without leases: a late reader still needs it to connect."""


@dataclass(frozen=True, slots=True)
class KvLease:
    """KV that a decode worker may read.

    Attributes:
        request: A finished request, whose pages hold it.
        handle: Handle that the decode worker gets.
        granted_s: Time of the grant, by the prefill side's clock.
    """

    request: Request
    handle: KvHandle
    granted_s: float


class PrefillSide:
    """Grants leases on the KV of finished requests, and ends them.

    Args:
        transport: This worker's end of the transfers.
        transfers: The requests whose pages are pinned.
        lease_s: Seconds after which a lease times out; None on a worker that grants none.
        clock: Clock of `lease_s`, in seconds.
        counts: Counts by outcome, which it adds to: ``leased``, ``released``, ``timed_out``.
    """

    def __init__(
        self,
        transport: KvTransport,
        transfers: PinnedRequests,
        lease_s: float | None,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self._transport = transport
        self._transfers = transfers
        self._lease_s = lease_s
        self._clock = clock
        self._counts = counts
        self._leases: dict[int, KvLease] = {}  # by fencing token, oldest first
        self._polled_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def grants_leases(self) -> bool:
        """Whether this worker grants leases at all."""
        return self._lease_s is not None

    @property
    def wait_s(self) -> float | None:
        """Time until the next `poll`; None for no need before the next message."""
        if self._leases:
            newest = next(reversed(self._leases.values()))
            return POLL_S if self._clock() < newest.granted_s + FRESH_S else SLOW_POLL_S
        return None if self._lease_s is None else IDLE_POLL_S

    def lease(self, plan: Plan, outputs: Sequence[Output]) -> None:
        """Lease the KV of requests that a step has finished and pinned.

        Their outputs get the handle, and show no token.
        """
        for request, output in zip(plan.sampled, outputs, strict=True):
            if not request.keeps_kv or output.finish_reason != "length":
                continue
            output.token_id = None
            page_size = self._transport.layout.page_size
            handle = self._transport.grant(request.pages[: -(-request.prompt_length // page_size)])
            if handle is None:
                self._transfers.unpin(request)
                output.finish_reason, output.error = "error", "too many prompts are leased to other workers"
                continue
            self._leases[handle.token] = KvLease(request, handle, self._clock())
            self._counts["leased"] += 1
            output.kv = handle_as_json(handle)

    def serve_readers(self) -> None:
        """End leases that were released; serve readers over TCP for their share of the time."""
        began = time.monotonic()
        until = began + min(SERVING_SHARE * (began - self._polled_s), SERVING_BUDGET_S)
        self._end_released()
        while self._leases and time.monotonic() < until:
            self._end_released()
        self._polled_s = time.monotonic()

    def time_out(self) -> None:
        """End leases that are too old."""
        if self._lease_s is None:
            return
        latest = self._clock() - self._lease_s
        while self._leases and (lease := next(iter(self._leases.values()))).granted_s <= latest:
            logger.warning("request %s: the lease of its KV timed out after %g s", lease.request.id, self._lease_s)
            self._end(lease, "timed_out")

    def close(self) -> None:
        """End all leases."""
        for lease in list(self._leases.values()):
            self._end(lease, "timed_out")

    def _end_released(self) -> None:
        for token in self._transport.poll():
            lease = self._leases.get(token)
            if lease is not None:
                self._end(lease, "released")

    def _end(self, lease: KvLease, outcome: str) -> None:
        self._transport.revoke(lease.handle)  # before the pages are freed: a late reader must find out
        del self._leases[lease.handle.token]
        self._transfers.unpin(lease.request)
        self._counts[outcome] += 1
