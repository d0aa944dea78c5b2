"""KV events: the blocks that an engine caches, numbered, kept for a while and sent on."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from worker.engines import KvEventSink
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.errors import LostEvents

KEPT_BATCHES = 4096
"""Batches that are kept for subscribers: for those that come back, and for slow ones."""

SNAPSHOT_BLOCKS = 64
"""Blocks in each batch of a snapshot."""

_Block = tuple[int | None, Sequence[int], str | None]
"""A cached block: hash of the one before it, its tokens, and its salt."""


class KvEvents:
    """Events of one engine. `KvEventSink` for the engine's thread, else one event loop only.

    Batches are kept once for all subscribers, whose memory is their place among them: one that is
    too slow for `KEPT_BATCHES` ends with an error.

    Args:
        listen: Tells a sink of the cached blocks and then of changes; called once, for the first
            subscriber.
        block_size: Tokens per block.

    Attributes:
        newest: Number of the newest batch, 0 before the first.
    """

    def __init__(self, listen: Callable[[KvEventSink], None], block_size: int, kept: int = KEPT_BATCHES) -> None:
        self.newest = 0
        self._listen = listen
        self._is_listening = False
        self._block_size = block_size
        self._loop = asyncio.get_running_loop()
        self._batches: deque[wire.KvEventBatch] = deque(maxlen=kept)
        self._blocks: dict[int, _Block] = {}
        self._changed = asyncio.Event()

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
    ) -> None:
        """See `KvEventSink.stored`."""
        self._loop.call_soon_threadsafe(
            self._store, parent_hash, tuple(block_hashes), array("I", token_ids), cache_salt
        )

    def removed(self, block_hashes: Sequence[int]) -> None:
        """See `KvEventSink.removed`."""
        self._loop.call_soon_threadsafe(self._remove, tuple(block_hashes))

    async def subscribe(self, start: int, *, snapshot: bool) -> AsyncGenerator[wire.KvEventBatch, None]:
        """Batches for ever: from number ``start`` on, or new ones if it is 0.

        Args:
            start: Number of the first batch, as far as it is kept.
            snapshot: Begin with the blocks that are cached now, in batches that all have the number
                of the newest batch; what comes next has the number after it.

        Raises:
            LostEvents: batch ``start`` is not kept, or was dropped before the subscriber took it.
        """
        if not self._is_listening:
            self._is_listening = True
            self._listen(self)
        after = start - 1 if start else self.newest
        if after > self.newest:
            raise LostEvents("start_sequence_number", f"{start} is not there yet, the newest is {self.newest}")
        if snapshot:
            for batch in self._snapshot():
                yield batch
        while True:
            while after < self.newest:
                oldest = self.newest - len(self._batches) + 1
                if after + 1 < oldest:
                    problem = f"{after + 1} is no longer kept, the oldest is {oldest}; ask for a snapshot"
                    raise LostEvents("start_sequence_number", problem)
                after += 1
                yield self._batches[after - oldest]
            self._changed.clear()
            await self._changed.wait()

    def _store(self, parent: int | None, hashes: tuple[int, ...], tokens: array[int], salt: str | None) -> None:
        size, before = self._block_size, parent
        for index, each in enumerate(hashes):
            self._blocks[each] = (before, tokens[index * size : (index + 1) * size], salt)
            before = each
        self._publish(wire.KvEvent(block_stored=self._stored(parent, hashes, tokens, salt)))

    def _remove(self, hashes: tuple[int, ...]) -> None:
        for each in hashes:
            self._blocks.pop(each, None)
        self._publish(wire.KvEvent(block_removed=wire.BlockRemoved(block_hashes=map(_hash, hashes))))

    def _publish(self, event: wire.KvEvent) -> None:
        self.newest += 1
        self._batches.append(self._batch([event]))
        self._changed.set()

    def _batch(self, events: Sequence[wire.KvEvent]) -> wire.KvEventBatch:
        return wire.KvEventBatch(sequence_number=self.newest, timestamp_unix_nanos=time.time_ns(), events=events)

    def _snapshot(self) -> list[wire.KvEventBatch]:
        stored = [
            wire.KvEvent(block_stored=self._stored(parent, (each,), tokens, salt))
            for each, (parent, tokens, salt) in self._blocks.items()
        ]
        events = [wire.KvEvent(all_blocks_cleared=wire.AllBlocksCleared()), *stored]
        return [self._batch(events[at : at + SNAPSHOT_BLOCKS]) for at in range(0, len(events), SNAPSHOT_BLOCKS)]

    def _stored(
        self, parent: int | None, hashes: tuple[int, ...], tokens: Sequence[int], salt: str | None
    ) -> wire.BlockStored:
        salts = [] if salt is None else [wire.OpaqueKeyTuple(values=[salt]) for _ in hashes]
        return wire.BlockStored(
            block_hashes=map(_hash, hashes),
            parent_block_hash=None if parent is None else _hash(parent),
            token_ids=tokens,
            block_size=self._block_size,
            extra_keys=salts,
        )


def _hash(number: int) -> wire.KvBlockHash:
    return wire.KvBlockHash(value=number.to_bytes(8, "big"), encoding="bytes")
