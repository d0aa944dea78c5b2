"""KV events: the blocks that an engine caches, numbered, kept for a while and sent on."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from worker.runtimes.openengine import wire
from worker.runtimes.openengine.errors import LostEvents

KEPT_BATCHES = 4096
"""Batches that are kept for subscribers: for those that come back, and for slow ones."""

SNAPSHOT_BLOCKS = 64
"""Blocks in each batch of a snapshot."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Consecutive blocks that were cached: see `worker.engines.KvEventSink.stored`."""

    parent: int | None
    hashes: tuple[int, ...]
    tokens: Sequence[int]
    salt: str | None
    lora_name: str | None

    def event(self, block_size: int) -> wire.KvEvent:
        salts = [] if self.salt is None else [wire.OpaqueKeyTuple(values=[self.salt]) for _ in self.hashes]
        stored = wire.BlockStored(
            block_hashes=map(_hash, self.hashes),
            parent_block_hash=None if self.parent is None else _hash(self.parent),
            token_ids=self.tokens,
            block_size=block_size,
            extra_keys=salts,
            lora_name=self.lora_name or "",
        )
        return wire.KvEvent(block_stored=stored)

    def blocks(self, block_size: int) -> Iterator[tuple[int, _Stored]]:
        """Each block alone, by its hash."""
        before = self.parent
        for index, each in enumerate(self.hashes):
            tokens = self.tokens[index * block_size : (index + 1) * block_size]
            yield each, _Stored(before, (each,), tokens, self.salt, self.lora_name)
            before = each


@dataclass(frozen=True, slots=True)
class _Removed:
    """Blocks that were evicted."""

    hashes: tuple[int, ...]

    def event(self, block_size: int) -> wire.KvEvent:
        return wire.KvEvent(block_removed=wire.BlockRemoved(block_hashes=map(_hash, self.hashes)))


class KvEvents:
    """Sink of an engine's KV events, called by its thread; otherwise one event loop only.

    Events are kept once for all subscribers, whose memory is their place among them: one that is
    too slow for `KEPT_BATCHES` ends with an error.

    Args:
        block_size: Tokens per block.
        kept: Events to keep.

    Attributes:
        newest: Number of the newest event, 0 before the first.
    """

    def __init__(self, block_size: int, kept: int = KEPT_BATCHES) -> None:
        self.newest = 0
        self._block_size = block_size
        self._loop = asyncio.get_running_loop()
        self._kept: deque[tuple[int, _Stored | _Removed]] = deque(maxlen=kept)  # with their times
        self._blocks: dict[int, _Stored] = {}
        self._changed = asyncio.Event()

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        """See `worker.engines.KvEventSink.stored`."""
        stored = _Stored(parent_hash, tuple(block_hashes), array("I", token_ids), cache_salt, lora_name)
        self._loop.call_soon_threadsafe(self._take, stored)

    def removed(self, block_hashes: Sequence[int]) -> None:
        """See `worker.engines.KvEventSink.removed`."""
        self._loop.call_soon_threadsafe(self._take, _Removed(tuple(block_hashes)))

    async def subscribe(self, start: int, *, snapshot: bool) -> AsyncGenerator[wire.KvEventBatch, None]:
        """Batches for ever, of one event each: from number ``start`` on, or new ones if it is 0.

        Args:
            start: Number of the first batch, as far as it is kept.
            snapshot: Begin with the blocks that are cached now, in batches that all have the number
                of the newest batch; what comes next has the number after it.

        Raises:
            LostEvents: batch ``start`` is not kept, or was dropped before the subscriber took it.
        """
        after = start - 1 if start else self.newest
        if after > self.newest:
            raise LostEvents("start_sequence_number", f"{start} is not there yet, the newest is {self.newest}")
        if snapshot:
            for batch in self._snapshot():
                yield batch
        while True:
            while after < self.newest:
                oldest = self.newest - len(self._kept) + 1
                after += 1
                if after < oldest:
                    problem = f"{after} is no longer kept, the oldest is {oldest}; ask for a snapshot"
                    raise LostEvents("start_sequence_number", problem)
                time_ns, record = self._kept[after - oldest]
                yield _batch(after, time_ns, [record.event(self._block_size)])
            self._changed.clear()
            await self._changed.wait()

    def _take(self, record: _Stored | _Removed) -> None:
        if isinstance(record, _Stored):
            self._blocks.update(record.blocks(self._block_size))
        else:
            for each in record.hashes:
                self._blocks.pop(each, None)
        self.newest += 1
        self._kept.append((time.time_ns(), record))
        self._changed.set()

    def _snapshot(self) -> list[wire.KvEventBatch]:
        """The cached blocks, each behind the one before it."""
        cleared = wire.KvEvent(all_blocks_cleared=wire.AllBlocksCleared())
        events = [cleared, *(block.event(self._block_size) for block in self._blocks.values())]
        starts, now = range(0, len(events), SNAPSHOT_BLOCKS), time.time_ns()
        return [_batch(self.newest, now, events[at : at + SNAPSHOT_BLOCKS]) for at in starts]


def _batch(number: int, time_ns: int, events: Sequence[wire.KvEvent]) -> wire.KvEventBatch:
    return wire.KvEventBatch(sequence_number=number, timestamp_unix_nanos=time_ns, events=events)


def _hash(number: int) -> wire.KvBlockHash:
    return wire.KvBlockHash(value=number.to_bytes(8, "big"), encoding="bytes")
