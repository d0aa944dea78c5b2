"""Events of the prefix cache for a router: blocks that were cached, blocks that were evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from worker.engines.embedded.blocks import ROOT, Block, hash_block, root_of


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of a sequence that are cached now.

    Attributes:
        parent_hash: Hash of the block before the first one, `ROOT` if there is none.
        block_hashes: One hash per block; see `BlockEvents`.
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

    The hashes in them are made of what a router knows of a request: its tokens, its salt and the
    name of its adapter. Dynamo's router takes one hash for each block, the first that any worker
    says, and loses what follows another one. So they do not depend on the weights, or the files of
    the adapter, that a worker has; blocks that differ by these alone are one block here, which is
    removed with the last of them.

    Args:
        cached: Blocks that are cached by now, a parent before its children; they come first.
    """

    def __init__(self, cached: Iterable[Block]) -> None:
        self._events: list[BlocksStored | BlocksRemoved] = []
        self._stored: list[Block] = []  # consecutive blocks of the event that comes behind these
        self._hashes: dict[int, int] = {}  # as a router hears them, by those of the index
        self._counts: Counter[int] = Counter()  # blocks with a hash as a router hears it
        for block in cached:
            self.add_stored(block)

    def drain(self) -> list[BlocksStored | BlocksRemoved]:
        """Events since the last call."""
        self._end_stored()
        events, self._events = self._events, []
        return events

    def add_stored(self, block: Block) -> None:
        """Record a cached block; in the last event, if it follows that one's last block."""
        parent = block.parent
        salt = block.cache_salt or None  # an empty one is none to Dynamo
        before = root_of(salt, adapter=block.lora_name) if parent is None else self._hashes[parent.hash]
        self._hashes[block.hash] = told = hash_block(before, block.tokens)
        self._counts[told] += 1
        if self._counts[told] > 1:
            return
        if self._stored and self._stored[-1] is not parent:
            self._end_stored()
        self._stored.append(block)

    def add_removed(self, hashes: Sequence[int]) -> None:
        """Record evicted blocks, by their hashes in the index."""
        self._end_stored()
        removed = []
        for each in hashes:
            told = self._hashes.pop(each)
            self._counts[told] -= 1
            if not self._counts[told]:
                del self._counts[told]
                removed.append(told)
        if removed:
            self._events.append(BlocksRemoved(tuple(removed)))

    def _end_stored(self) -> None:
        if not self._stored:
            return
        blocks, self._stored = self._stored, []
        hashes = tuple(self._hashes[block.hash] for block in blocks)
        tokens = tuple(chain.from_iterable(block.tokens for block in blocks))
        first = blocks[0]
        parent = ROOT if first.parent is None else self._hashes[first.parent.hash]
        self._events.append(BlocksStored(parent, hashes, tokens, first.lora_name, first.cache_salt))
