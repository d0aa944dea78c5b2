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

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache import KvStore
from worker.engines.embedded.pinned import PinnedRequests
from worker.engines.embedded.plan import Output, Plan, Request
from worker.engines.embedded.transfer.decode_side import POLL_S, DecodeSide
from worker.engines.embedded.transfer.handle import KvHandle
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.prefill_side import PrefillSide
from worker.engines.embedded.transfer.transport import KvTransport


def open_connector(
    store: KvStore,
    transfers: PinnedRequests,
    config: EmbeddedConfig,
    model_fingerprint: str,
    numerics: str,
) -> KvConnector:
    """The KV connector of a worker.

    Args:
        store: The worker's KV store.
        transfers: The requests whose pages its scheduler pins.
        config: Settings; the role is not ``aggregated``.
        model_fingerprint: Fingerprint of the model.
        numerics: `Numerics.made_by` of the model.

    Raises:
        StartupError: NIXL is not installed, or cannot be used here.
    """
    _, heads, size, width = store.keys[0].shape
    names = model_fingerprint, store.dtype_name
    layout = KvLayout(*names, len(store.keys), heads, width, config.kv_block_size, size, numerics)
    transport = KvTransport(store.tensors, layout, config.kv_devices)
    return KvConnector(transport, store, transfers, config.kv_lease_s if config.role == "prefill" else None)


class KvConnector:
    """Leases KV to other workers, and receives KV from them.

    Args:
        transport: This worker's end of the transfers.
        store: The worker's KV store.
        transfers: The requests whose pages its scheduler pins.
        lease_s: Seconds after which a lease times out; None on a worker that grants none.
        clock: Clock of `lease_s`, in seconds.

    Attributes:
        counts: Transfers by outcome; see `PrefillSide` and `DecodeSide`.
    """

    def __init__(
        self,
        transport: KvTransport,
        store: KvStore,
        transfers: PinnedRequests,
        lease_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport = transport
        self.counts: Counter[str] = Counter()
        self._prefill = PrefillSide(transport, transfers, lease_s, clock, self.counts)
        self._decode = DecodeSide(transport, store, transfers, self.counts)

    def __repr__(self) -> str:
        return f"KvConnector({len(self._prefill)} leased, {self._decode!r})"

    @property
    def layout(self) -> KvLayout:
        """Layout of the store."""
        return self.transport.layout

    @property
    def num_leased(self) -> int:
        """Prompts whose KV is leased to other workers. May be read by any thread."""
        return len(self._prefill)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their KV, or with it for a slot. May be read by any thread."""
        return self._decode.num_waiting

    @property
    def seconds(self) -> float:
        """Time that the reads of ``received`` took, summed."""
        return self._decode.seconds

    @property
    def wait_s(self) -> float | None:
        """Time until the next `poll`: 0 at once, None for no need before the next message."""
        waits = self._decode.wait_s, self._prefill.wait_s, POLL_S if self.transport.is_releasing else None
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def lease(self, plan: Plan, outputs: Sequence[Output]) -> None:
        """Lease the KV of requests that a step has finished and pinned."""
        self._prefill.lease(plan, outputs)

    def receive(self, request: Request, handle: KvHandle) -> None:
        """Take in a request whose prompt's KV is leased to this worker."""
        self._decode.receive(request, handle)

    def release(self, handle: KvHandle) -> None:
        """End the lease on KV that was not received, and is not wanted."""
        self.counts["cancelled"] += 1
        self.transport.release(handle)

    def abort(self, request_id: str) -> Output | None:
        """Drop a request that the scheduler does not run yet; None if there is none."""
        return self._decode.abort(request_id)

    @property
    def is_drained(self) -> bool:
        """Whether no request is on its way here with its KV."""
        return self._decode.is_drained

    def recompute(self) -> None:
        """Receive no more of the KV that is on its way here: its requests wait for their turn, and
        compute it.
        """
        self._decode.recompute()

    def change_model(self, fingerprint: str) -> None:
        """Lease KV of a model with this fingerprint from now on, and receive it."""
        self.transport.layout = replace(self.transport.layout, model=fingerprint)

    def poll(self) -> None:
        """Let all transfers move on for a bounded time: releases, time-outs, reads.

        Requests whose KV is ready resume while there are slots.
        """
        if self._prefill.grants_leases or self._decode.is_reading or self.transport.is_releasing:
            self._prefill.serve_readers()
        self._prefill.time_out()
        self._decode.poll()

    def close(self) -> None:
        """End all transfers, and disconnect; not while an abandoned read may still write."""
        self._decode.close()
        self._prefill.close()
        if not self._decode.abandoned:
            self.transport.close()
