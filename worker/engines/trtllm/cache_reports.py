"""TensorRT-LLM's KV cache statistics and events, as the worker publishes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from worker.engines import KvEventSink
from worker.engines.forward_pass import ForwardPass

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EventRelay:
    """Forwards KV events.

    Attributes:
        sink: Receives them.
        block_size: Tokens per full block; a partial block, at the end of a prompt, is skipped with
            its successors.
        has_adapters: Whether requests may choose LoRA adapters. Blocks of which the version does
            not say whose they are, are not forwarded then.
        num_gaps: Gaps in the event ids, left by overflows of the buffer.

    A model with several attention windows has KV blocks and events for each of them; only those of
    the largest window are forwarded to the router, and of its first group of layers where KV cache
    manager V2 has several. The pools of all of them are announced (``created``) before anything is
    stored.
    """

    sink: KvEventSink
    block_size: int
    has_adapters: bool = False
    num_gaps: int = 0
    _pool: tuple[int, int] | None = None
    _partial: set[int] = field(default_factory=set)
    _last_id: int | None = None
    _is_nameless: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Forward one event.

        Raises:
            ValueError: its blocks have several salts.
            LookupError, TypeError, AttributeError: its form is unknown. Nothing is forwarded.
        """
        self._check_order(event.get("event_id"))
        if not self._is_of_largest_window(event):
            return
        data = event.get("data") or {}
        kind = data.get("type")
        if kind == "stored":
            self._stored(data)
        elif kind == "removed":
            self._removed(data.get("block_hashes") or ())
        # created: size of a pool; updated: location of a block. Neither changes the cached
        # prefixes.

    def _check_order(self, event_id: Any) -> None:
        if type(event_id) is not int:
            return
        if self._last_id is not None and event_id > self._last_id + 1:
            self.num_gaps += 1
            logger.warning("KV events %d to %d were lost", self._last_id + 1, event_id - 1)
        self._last_id = event_id

    def _is_of_largest_window(self, event: Mapping[str, Any]) -> bool:
        """Old versions have one window and do not name it."""
        window = event.get("window_size")
        if window is None:
            return True
        pool = window, -(event.get("layer_group_id") or 0)
        self._pool = pool if self._pool is None else max(self._pool, pool)
        return pool == self._pool

    def _stored(self, data: Mapping[str, Any]) -> None:
        token_ids: list[int] = []
        hashes: list[int] = []
        salt, adapter = _salt_of(data), data.get("lora_name")
        if self.has_adapters and "lora_name" not in data:
            self._note_nameless()
            return
        for block in data.get("blocks") or ():
            tokens = [int(token["token_id"]) for token in block["tokens"]]
            block_hash = _hash_of(block["block_hash"])
            if len(tokens) != self.block_size:
                self._partial.add(block_hash)
                break
            token_ids += tokens
            hashes.append(block_hash)
        if hashes:
            parent = data.get("parent_hash")
            self.sink.stored(None if parent is None else _hash_of(parent), hashes, token_ids, salt, adapter)

    def _note_nameless(self) -> None:
        if not self._is_nameless:
            logger.warning("this version's KV events do not name LoRA adapters, so that no cached block is reported")
        self._is_nameless = True

    def _removed(self, block_hashes: Iterable[int]) -> None:
        gone = [_hash_of(each) for each in block_hashes]
        published = [each for each in gone if each not in self._partial]
        self._partial.difference_update(gone)
        if published:
            self.sink.removed(published)


def _hash_of(block_hash: int | str) -> int:
    """64 bits that identify a block; KV cache manager V2 may say a hash as text (``v2_sha256``)."""
    if isinstance(block_hash, str):
        return int.from_bytes(blake2b(block_hash.encode(), digest_size=8).digest(), "big")
    return int(block_hash)


def _salt_of(data: Mapping[str, Any]) -> str | None:
    """The salt of the stored blocks, None for unsalted ones; each block carries its own."""
    salts = {block.get("cache_salt") for block in data.get("blocks") or ()}
    if len(salts) > 1:
        raise ValueError("a KV event has blocks of several salts")
    return next(iter(salts), None)


_PASS_COUNTS = {
    "num_prefill": ("numContextRequests",),
    "prefill_tokens": ("numCtxTokens",),
    "prefill_kv_tokens": ("numCtxKvTokens",),
    "num_decode": ("numGenRequests",),
    "decode_kv_tokens": ("numGenKvTokens",),
    "num_waiting_prefill": ("numQueuedContextRequests",),
    "waiting_prefill_tokens": ("numQueuedCtxTokens",),
    "num_waiting_decode": ("numQueuedGenRequests", "numPausedRequests"),
    "waiting_decode_tokens": ("numQueuedGenKvTokens", "numPausedKvTokens"),
}
"""Counts of a `ForwardPass`, each with the executor's counts that it is the sum of. Paused requests
were preempted, and wait.
"""


def forward_pass(stats: Mapping[str, Any]) -> ForwardPass:
    """The forward pass of one record of statistics.

    Raises:
        LookupError: this version of TensorRT-LLM counts less.
    """
    batch = stats.get("inflightBatchingStats") or {}
    missing = [key for keys in _PASS_COUNTS.values() for key in keys if type(batch.get(key)) is not int]
    if missing:
        raise LookupError(
            f"forward-pass metrics need a newer version: inflightBatchingStats has no {', '.join(missing)}"
        )
    counts = {name: sum(batch[key] for key in keys) for name, keys in _PASS_COUNTS.items()}
    return ForwardPass(**counts, seconds=float(stats.get("iterLatencyMS") or 0) / 1000, dp_rank=dp_rank(stats))


def dp_rank(record: Mapping[str, Any]) -> int:
    """Attention data parallel rank of a record of statistics or of a KV event; 0 where there is
    one.
    """
    return int(record.get("attentionDpRank") or record.get("attention_dp_rank") or 0)


def kv_blocks(stats: Mapping[str, Any]) -> tuple[int, int] | None:
    """Used and total KV blocks in one record of statistics, None if absent."""
    cache = stats.get("kvCacheStats") or {}
    used, total = cache.get("usedNumBlocks"), cache.get("maxNumBlocks")
    return (used, total) if type(used) is int and type(total) is int else None
