"""KV blocks in use, for routers."""

from __future__ import annotations

from collections.abc import Callable

from worker.engines import EngineInfo
from worker.lifecycle.drain import InFlightRequests


class KvLoad:
    """KV blocks in use: the engine's own count where it reports one, else by requests in flight.

    Attributes:
        total: KV blocks that the engine owns.
        on_change: Called whenever a number may have changed.
    """

    def __init__(self, in_flight: InFlightRequests) -> None:
        self.total = 0
        self.on_change: Callable[[], None] = lambda: None
        self._in_flight = in_flight
        self._reported: int | None = None
        in_flight.on_change = lambda: self.on_change()

    def start(self, info: EngineInfo) -> None:
        """Count the blocks of an engine that has started."""
        self.total = info.total_kv_blocks
        self._in_flight.block_size = info.kv_block_size

    def report(self, used: int, total: int) -> None:
        """Take the engine's own count."""
        self._reported, self.total = used, total
        self.on_change()

    @property
    def used(self) -> int:
        """KV blocks in use, at most `total`."""
        return min(self._in_flight.num_blocks if self._reported is None else self._reported, self.total)
