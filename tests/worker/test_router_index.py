"""Dynamo's index, built from the events of several workers, knows what each of them has cached."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from dynamo.llm import RadixTree, compute_block_hash_for_seq

from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.blocks import Block
from worker.engines.embedded.kv_cache import BlocksRemoved, BlocksStored
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.plan import Request
from worker.engines.weights import WeightVersion
from worker.sampling import SamplingParams

BLOCK, PAGE = 4, 8


@dataclass(frozen=True)
class Kind:
    """What a router knows of a request beside its tokens."""

    lora_name: str | None = None
    cache_salt: str | None = None

    def local_hashes(self, tokens: Sequence[int]) -> list[int]:
        """Dynamo's hashes of the blocks, by which its index finds them."""
        return compute_block_hash_for_seq(
            list(tokens), BLOCK, lora_name=self.lora_name, cache_namespace=self.cache_salt
        )


KINDS = [Kind(name, salt) for name in (None, "mine") for salt in (None, "", "a")]
SEQUENCES = [
    [3 + family] * shared + [50 + own] * (30 - shared) for family in range(2) for shared in (8, 17) for own in range(2)
]


class Index:
    """Dynamo's index of the blocks of all workers."""

    def __init__(self) -> None:
        self.tree = RadixTree()
        self.num_events = 0

    def take(self, worker: int, events: Iterable[BlocksStored | BlocksRemoved]) -> None:
        for event in events:
            self.num_events += 1
            data = {"event_id": self.num_events, "data": self.data(event)}
            self.tree.apply_event(worker, json.dumps(data).encode())  # raises where it is not applied

    def data(self, event: BlocksStored | BlocksRemoved) -> dict[str, object]:
        if isinstance(event, BlocksRemoved):
            return {"removed": {"block_hashes": event.block_hashes}}
        local = Kind(event.lora_name, event.cache_salt).local_hashes(event.token_ids)
        pairs = zip(event.block_hashes, local, strict=True)
        blocks = [{"block_hash": each, "tokens_hash": tokens} for each, tokens in pairs]
        return {"stored": {"parent_hash": event.parent_hash or None, "blocks": blocks}}

    def num_known(self, worker: int, kind: Kind, tokens: Sequence[int]) -> int:
        """Blocks that it takes for cached at a worker, of those that a prompt begins with."""
        scores: Any = self.tree.find_matches(kind.local_hashes(tokens)).scores
        return int(scores.get((worker, 0), 0))  # by worker and data parallel rank


class Worker:
    """A cache, the weights and the adapter that compute what it holds."""

    def __init__(self, number: int, pages: int, num_updates: int) -> None:
        self.number = number
        self.cache = KvCache(pages, PAGE, BLOCK)
        self.cache.record_events()
        self.num_updates = num_updates
        self.adapter = LoadedAdapter("mine", f"{number} 0", None)
        self.num_replaced = 0
        self.running: list[Request] = []

    def begin(self, kind: Kind, tokens: list[int]) -> None:
        one = Request("one", 0, SamplingParams(), tokens, len(tokens), len(tokens) + 1, frozenset(), 0)
        one.cache_salt, one.adapter = kind.cache_salt, self.adapter if kind.lora_name else None
        one.compute_with(WeightVersion(self.num_updates, str(self.num_updates)))
        if self.cache.allocate(one) is not None:
            self.running.append(one)

    def compute(self, source: random.Random) -> None:
        for one in self.running:
            self.cache.complete(one, source.randint(one.num_computed, len(one.tokens)))

    def end(self, number: int) -> None:
        if self.running:
            self.cache.free(self.running.pop(number % len(self.running)))

    def update(self) -> None:
        for one in self.running:
            self.cache.free(one)
        self.running.clear()
        self.cache.clear()
        self.num_updates += 1

    def replace_adapter(self) -> None:
        self.num_replaced += 1
        self.adapter = LoadedAdapter("mine", f"{self.number} {self.num_replaced}", None)

    def num_cached(self, kind: Kind, tokens: Sequence[int]) -> int:
        """Blocks that it has, of those that a prompt begins with."""
        held = {contents(block) for block in self.cache._index.blocks.values()}
        count = 0
        known = Kind(kind.lora_name, kind.cache_salt or None)
        while (count + 1) * BLOCK <= len(tokens) and (known, tuple(tokens[: (count + 1) * BLOCK])) in held:
            count += 1
        return count


def contents(block: Block) -> tuple[Kind, tuple[int, ...]]:
    """What a router knows a block by: what it is computed with, and all tokens up to its last."""
    tokens: list[int] = []
    before: Block | None = block
    while before is not None:
        tokens[:0] = before.tokens
        before = before.parent
    return Kind(block.lora_name, block.cache_salt or None), tuple(tokens)


ACTIONS = {"begin": 30, "compute": 30, "end": 25, "update": 3, "replace": 5, "clear": 2}


@pytest.mark.parametrize("seed", range(6))
def test_the_index_is_what_the_workers_have(seed: int) -> None:
    """Whatever weights, and files of an adapter, each of them has."""
    source, index = random.Random(seed), Index()
    workers = [Worker(number, source.randrange(6, 14), source.randrange(2)) for number in range(2)]
    for action in source.choices(list(ACTIONS), list(ACTIONS.values()), k=300):
        worker = source.choice(workers)
        if action == "begin":
            worker.begin(source.choice(KINDS), list(source.choice(SEQUENCES)))
        elif action == "compute":
            worker.compute(source)
        elif action == "end":
            worker.end(source.randrange(99))
        elif action == "update":
            worker.update()
        elif action == "replace":
            worker.replace_adapter()
        else:
            worker.cache.clear()
        index.take(worker.number, worker.cache.drain_events())
        for kind in KINDS:
            for tokens in SEQUENCES:
                assert index.num_known(worker.number, kind, tokens) == worker.num_cached(kind, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_index_is_the_same(kind: Kind) -> None:
    worker, index = Worker(0, 14, 1), Index()
    for tokens in SEQUENCES[:2]:
        for _ in range(2):
            worker.begin(kind, tokens)
            worker.compute(random.Random(0))
            worker.replace_adapter()
    worker.cache.record_events()
    index.take(0, worker.cache.drain_events())
    for tokens in SEQUENCES:
        assert index.num_known(0, kind, tokens) == worker.num_cached(kind, tokens)
    while worker.running:
        worker.end(0)
    worker.cache.clear()
    index.take(0, worker.cache.drain_events())
    assert not any(index.num_known(0, kind, tokens) for tokens in SEQUENCES)
