"""Forwards vLLM's KV events to the router: which of them, in what order, with whose salt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worker.engines import KvEventSink

logger = logging.getLogger(__name__)

WHOLE_CONTEXT = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of layers whose blocks say that a prefix is cached; None in models with one kind."""

ON_DEVICE = frozenset({None, "GPU"})
"""Media of blocks that the engine computes with; vLLM says GPU on a CPU too."""


@dataclass(slots=True)
class _Cached:
    """A block that the router knows; equal blocks of concurrent requests are cached several times.

    Attributes:
        origin: Salt and LoRA adapter of the sequence.
        count: Blocks with these contents.
    """

    origin: tuple[str | None, str | None]
    count: int = 1


class EventRelay:
    """Forwards vLLM's ``KVEventBatch`` es.

    A model with several kinds of layers has events for each of them; only those of the first group
    of layers with the whole context are forwarded. Blocks from the first one with a part of a
    picture on are not: a router knows blocks by their tokens, which are those of other pictures.

    Args:
        sink: Receives the events.
        block_size: Tokens per block; events of partial blocks are left out.
        decode: Makes a ``KVEventBatch`` of its bytes.

    Attributes:
        next_number: Number of the batch that comes next.
        num_lost: Batches that never arrived.
    """

    def __init__(self, sink: KvEventSink, block_size: int, decode: Callable[[bytes], Any]) -> None:
        self.next_number = 0
        self.num_lost = 0
        self._sink = sink
        self._block_size = block_size
        self._decode = decode
        self._cached: dict[int, _Cached] = {}
        self._group: int | None = None
        self._has_group = False

    def take(self, number: int, payload: bytes) -> None:
        """Forward one batch; one that was forwarded before is ignored.

        After a gap, or a batch of an unknown form, the router is told that nothing is cached:
        blocks may have been evicted unheard.

        Args:
            number: Sequence number.
            payload: The batch.
        """
        if number < self.next_number:
            return
        if number > self.next_number:
            self.num_lost += number - self.next_number
            logger.warning("KV events %d to %d of vLLM were lost", self.next_number, number - 1)
            self._clear()
        self.next_number = number + 1
        try:
            for event in self._decode(payload).events:
                self._forward(event)
        except Exception as error:  # the engine's boundary: a form of another version
            logger.warning("KV events %d of vLLM: %s: %s", number, type(error).__name__, error)
            self._clear()

    def _forward(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self._clear()
        elif kind == "BlockStored" and event.medium in ON_DEVICE and self._has_prefixes(event):
            self._stored(event)
        elif kind == "BlockRemoved" and event.medium in ON_DEVICE and self._is_of_group(event):
            self._removed([_hash_of(each) for each in event.block_hashes])

    def _has_prefixes(self, event: Any) -> bool:
        if event.kv_cache_spec_kind not in WHOLE_CONTEXT:
            return False
        if not self._has_group:
            self._group, self._has_group = event.group_idx, True
        return self._is_of_group(event)

    def _is_of_group(self, event: Any) -> bool:
        return self._has_group and event.group_idx == self._group

    def _stored(self, event: Any) -> None:
        hashes = [_hash_of(each) for each in event.block_hashes]
        if len(event.token_ids) != len(hashes) * self._block_size:
            return
        del hashes[_num_before_pictures(event) :]
        if not hashes:
            return
        parent = None if event.parent_block_hash is None else _hash_of(event.parent_block_hash)
        if parent is None:
            origin = _salt_of(event), event.lora_name
        elif parent in self._cached:
            origin = self._cached[parent].origin
        else:  # its event was lost, or it holds a picture
            return
        for each in hashes:
            if each in self._cached:
                self._cached[each].count += 1
            else:
                self._cached[each] = _Cached(origin)
        self._sink.stored(parent, hashes, event.token_ids[: len(hashes) * self._block_size], *origin)

    def _removed(self, hashes: list[int]) -> None:
        gone = []
        for each in hashes:
            cached = self._cached.get(each)
            if cached is None:
                continue
            cached.count -= 1
            if not cached.count:
                del self._cached[each]
                gone.append(each)
        if gone:
            self._sink.removed(gone)

    def _clear(self) -> None:
        if self._cached:
            self._sink.removed(list(self._cached))
            self._cached.clear()


def _hash_of(block_hash: int | bytes) -> int:
    """64 bits that identify a block: the last ones of a longer hash, which vLLM uses where it says
    a number itself.
    """
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash


def _num_before_pictures(event: Any) -> int:
    """Blocks before the first one that holds a part of a picture: a pair of its name and its place
    is among the keys.
    """
    keys = event.extra_keys or ()
    return next(
        (index for index, each in enumerate(keys) if not all(isinstance(key, str) for key in each or ())),
        len(event.block_hashes),
    )


def _salt_of(event: Any) -> str | None:
    """The salt of a sequence: keys of its first block are the LoRA's name, pictures, the salt."""
    texts = [key for key in (event.extra_keys or [None])[0] or () if isinstance(key, str)]
    if event.lora_name is not None:
        texts = texts[1:]
    return texts[0] if texts else None
