"""Events of the prefix cache for a router: blocks that were cached, blocks that were evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        for block in cached:
            self.add_stored(block)

    def drain(self) -> list[BlocksStored | BlocksRemoved]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def add_stored(self, block: Block) -> None:
        """Record a cached block; in the last event, if it follows that one's last block."""
        parent = block.parent.hash if block.parent else ROOT
        hashes: tuple[int, ...] = (block.hash,)
        tokens, of = tuple(block.tokens), (block.lora_name, block.cache_salt)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.block_hashes[-1] == parent:
            hashes, tokens = last.block_hashes + hashes, last.token_ids + tokens
            self._events[-1] = BlocksStored(last.parent_hash, hashes, tokens, *of)
        else:
            self._events.append(BlocksStored(parent, hashes, tokens, *of))

    def add_removed(self, hashes: Sequence[int]) -> None:
        """Record evicted blocks."""
        self._events.append(BlocksRemoved(tuple(hashes)))
