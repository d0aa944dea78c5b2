"""Blocks: the unit of automatic prefix caching, hashed with all tokens before them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

ROOT = 0
"""Parent hash of a sequence's first block."""

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
    """

    hash: int
    parent: Block | None
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    lora_name: str | None = None

    def is_made_of(self, parent: Block | None, tokens: list[int]) -> bool:
        """Whether this is the block of `tokens` after `parent`: equal hashes do not prove it."""
        return self.parent is parent and self.tokens == tokens


@cache
def _content(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<Q{num_tokens}i")


def hash_block(parent: int, tokens: Sequence[int]) -> int:
    """64 bits of BLAKE2b over the parent's hash (uint64) and the ids (int32), little-endian.

    The same on every worker, so that a router can compare them.
    """
    content = _content(len(tokens)).pack(parent, *tokens)
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def root_of(cache_salt: str | None, num_updates: int = 0, adapter: str | None = None) -> int:
    """Parent hash of a sequence's first block: sequences of different salts share no block, nor do
    those computed with different weights or LoRA adapters.

    Args:
        cache_salt: Salt of the request, None for none.
        num_updates: Updates of the weights since the engine started.
        adapter: Digest of the LoRA adapter, None for the model itself.
    """
    root = ROOT if cache_salt is None else hash_block(ROOT, list(cache_salt.encode("utf-8", "surrogatepass")))
    if num_updates:
        root = hash_block(root, [num_updates])
    return root if adapter is None else hash_block(root, [_ADAPTED, *adapter.encode()])
