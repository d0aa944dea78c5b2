"""Blocks: the unit of automatic prefix caching, hashed with all tokens before them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

ROOT = 0
"""Parent hash of a sequence's first block."""

_HASH_BYTES, _ID_BYTES = 8, 4

_ADAPTED = -1
"""No token and no number of updates, so that no salt makes the root of an adapter."""


@dataclass(eq=False, slots=True)
class Block:
    """One block of some sequence; pages with the same content share the object.

    Attributes:
        hash: Result of `hash_block`.
        parent: The block before it, None for the first of a sequence.
        tokens: Token ids, as many as a block has.
        pages: The pages that hold its KV.
        lora_name: LoRA adapter that computed it, for a router; its digest is in the hash.
        cache_salt: Salt of the request that computed it, for a router; it is in the hash.
    """

    hash: int
    parent: Block | None
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    lora_name: str | None = None
    cache_salt: str | None = None

    def is_made_of(self, parent: Block | None, tokens: list[int]) -> bool:
        """Whether this is the block of `tokens` after `parent`: equal hashes do not prove it."""
        return self.parent is parent and self.tokens == tokens


def hash_block(parent: int, tokens: Sequence[int]) -> int:
    """64 bits of BLAKE2b over the parent's hash (uint64) and the ids (int32), little-endian.

    The same on every worker, so that a router can compare them.
    """
    content = struct.pack(f"<Q{len(tokens)}i", parent, *tokens)
    return int.from_bytes(blake2b(content, digest_size=_HASH_BYTES).digest(), "little")


def hash_blocks(parent: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """`hash_block` of each of some consecutive blocks; tokens behind the last whole one are left.

    Args:
        parent: Hash of the block before the first.
        tokens: Token ids of the blocks.
        block_size: Tokens of a block.
    """
    count, size = len(tokens) // block_size, block_size * _ID_BYTES
    content = struct.pack(f"<{count * block_size}i", *tokens[: count * block_size])
    digest, digests = parent.to_bytes(_HASH_BYTES, "little"), []
    for start in range(0, count * size, size):
        digest = blake2b(digest + content[start : start + size], digest_size=_HASH_BYTES).digest()
        digests.append(digest)
    return list(struct.unpack(f"<{count}Q", b"".join(digests)))


def root_of(cache_salt: str | None, num_updates: int = 0, adapter: str | None = None) -> int:
    """Parent hash of a sequence's first block: sequences of different salts share no block, nor do
    those computed with different weights or LoRA adapters.

    Args:
        cache_salt: Salt of the request, None for none.
        num_updates: Updates of the weights since the engine started.
        adapter: Digest of the LoRA adapter, for a router its name; None for the model itself.
    """
    root = ROOT if cache_salt is None else hash_block(ROOT, list(cache_salt.encode("utf-8", "surrogatepass")))
    if num_updates:
        root = hash_block(root, [num_updates])
    return root if adapter is None else hash_block(root, [_ADAPTED, *adapter.encode()])
