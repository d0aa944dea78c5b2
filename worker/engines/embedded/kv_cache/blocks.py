"""Blocks: the unit of automatic prefix caching, hashed with all tokens before them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from worker.engines.embedded.plan import Request

ROOT = 0
"""Parent hash of a sequence's first block."""


@dataclass(eq=False, slots=True)
class Block:
    """One block of some sequence; pages with the same content share the object.

    Attributes:
        hash: See `hash_block`.
        parent: The block before it, None for the first of a sequence.
        tokens: Its token ids.
        pages: The pages that hold its KV.
    """

    hash: int
    parent: Block | None
    tokens: list[int]
    pages: list[int] = field(default_factory=list)

    def is_made_of(self, parent: Block | None, tokens: list[int]) -> bool:
        """Whether this is the block of `tokens` after `parent`: equal hashes do not prove it."""
        return self.parent is parent and self.tokens == tokens


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """For a router: blocks that are cached now, in a row.

    Attributes:
        parent_hash: Of the block before the first one, `ROOT` if there is none.
        block_hashes: One per block.
        token_ids: Those of all blocks.
    """

    parent_hash: int
    block_hashes: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """For a router: blocks that were evicted."""

    block_hashes: tuple[int, ...]


def hash_block(parent: int, tokens: Sequence[int]) -> int:
    """64 bits of BLAKE2b over the parent's hash (uint64) and the ids (int32), little-endian.

    The same on every worker, so that a router can compare them.
    """
    content = struct.pack(f"<Q{len(tokens)}i", parent, *tokens)
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def root_of(cache_salt: str | None) -> int:
    """Parent hash of a sequence's first block: sequences of different salts share no block."""
    return ROOT if cache_salt is None else hash_block(ROOT, list(cache_salt.encode("utf-8", "surrogatepass")))


def hash_blocks(request: Request, block_size: int) -> list[int]:
    """The hashes of all full blocks of a request's tokens; each is computed once per request."""
    hashes, tokens = request.block_hashes, request.tokens
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root_of(request.cache_salt)
        hashes.append(hash_block(parent, tokens[start : start + block_size]))
    return hashes
