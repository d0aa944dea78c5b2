"""Events of the prefix cache for a router: blocks that were cached, blocks that were evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from worker.engines.embedded.blocks import ROOT, Block


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of a sequence that are cached now.

    Attributes:
        parent_hash: Hash of the block before the first one, `ROOT` if there is none.
        block_hashes: One hash per block.
        token_ids: Token ids of all blocks.
        lora_name: LoRA adapter that computed them, None for the model itself.
        cache_salt: Salt of the request that they come from, None if it has none.
    """

    parent_hash: int
    block_hashes: tuple[int, ...]
    token_ids: tuple[int, ...]
    lora_name: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that were evicted."""

    block_hashes: tuple[int, ...]


class BlockEvents:
    """Events in order.

    Args:
        cached: Blocks that are cached by now, a parent before its children; they come first.
    """

    def __init__(self, cached: Iterable[Block]) -> None:
        self._events: list[BlocksStored | BlocksRemoved] = []
        self._stored: list[Block] = []  # consecutive blocks of the event that comes behind these
        for block in cached:
            self.add_stored(block)

    def drain(self) -> list[BlocksStored | BlocksRemoved]:
        """Events since the last call."""
        self._end_stored()
        events, self._events = self._events, []
        return events

    def add_stored(self, block: Block) -> None:
        """Record a cached block; in the last event, if it follows that one's last block."""
        if self._stored and self._stored[-1].hash != _parent_hash(block):
            self._end_stored()
        self._stored.append(block)

    def add_removed(self, hashes: Sequence[int]) -> None:
        """Record evicted blocks."""
        self._end_stored()
        self._events.append(BlocksRemoved(tuple(hashes)))

    def _end_stored(self) -> None:
        if not self._stored:
            return
        blocks, self._stored = self._stored, []
        hashes = tuple(block.hash for block in blocks)
        tokens = tuple(chain.from_iterable(block.tokens for block in blocks))
        last = blocks[-1]
        self._events.append(BlocksStored(_parent_hash(blocks[0]), hashes, tokens, last.lora_name, last.cache_salt))


def _parent_hash(block: Block) -> int:
    return block.parent.hash if block.parent else ROOT
