"""KV blocks in use, for routers."""

from __future__ import annotations

from collections.abc import Callable

from worker.engines import EngineInfo
from worker.lifecycle.drain import InFlightRequests


class KvLoad:
    """KV blocks in use: the engine's own count where it reports one, else by requests in flight.

    Attributes:
        rank_total: KV blocks of each data parallel rank.
        on_change: Called whenever a number may have changed.
    """

    def __init__(self, in_flight: InFlightRequests) -> None:
        self.rank_total = 0
        self.on_change: Callable[[], None] = lambda: None
        self._in_flight = in_flight
        self._num_ranks = 1
        self._reported: dict[int, int] = {}
        in_flight.on_change = lambda: self.on_change()

    def start(self, info: EngineInfo) -> None:
        """Count the blocks of an engine that has started."""
        self.rank_total, self._num_ranks = info.total_kv_blocks, info.num_dp_ranks
        self._in_flight.block_size = info.kv_block_size

    def report(self, used: int, total: int, dp_rank: int = 0) -> None:
        """Take the engine's own count of a data parallel rank."""
        self._reported[dp_rank], self.rank_total = used, total
        self.on_change()

    def used_by(self, dp_rank: int) -> int:
        """KV blocks in use of one data parallel rank, at most `rank_total`."""
        used = self._reported.get(dp_rank)
        return min(self._in_flight.num_blocks // self._num_ranks if used is None else used, self.rank_total)

    @property
    def total(self) -> int:
        """KV blocks that the engine owns."""
        return self.rank_total * self._num_ranks

    @property
    def used(self) -> int:
        """KV blocks in use, at most `total`."""
        return sum(self.used_by(dp_rank) for dp_rank in range(self._num_ranks))
