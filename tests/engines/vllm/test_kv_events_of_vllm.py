"""vLLM's KV events on their way to the router: which blocks it is told of, whatever gets lost."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.vllm.event_relay import EventRelay
from worker.engines.vllm.kv_events import KvEvents
from worker.errors import StartupError

SIZE = 2


@dataclass
class BlockStored:
    """The fields of vLLM's event that are read."""

    block_hashes: list[int | bytes]
    token_ids: list[int]
    parent_block_hash: int | bytes | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    lora_name: str | None = None
    medium: str | None = "GPU"
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"


@dataclass
class BlockRemoved:
    """The fields of vLLM's event that are read."""

    block_hashes: list[int | bytes]
    medium: str | None = "GPU"
    group_idx: int | None = 0


class AllBlocksCleared:
    """vLLM's event has no fields that are read."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class Batch:
    """One message."""

    events: list[Event]


@dataclass
class Router:
    """What a router is told, and the blocks that it takes for cached."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    known: set[int] = field(default_factory=set)

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        self.calls.append(("stored", parent_hash, list(block_hashes), list(token_ids), cache_salt, lora_name))
        assert parent_hash is None or parent_hash in self.known
        assert all(0 <= each < 2**64 for each in block_hashes)
        self.known.update(block_hashes)

    def removed(self, block_hashes: Sequence[int]) -> None:
        self.calls.append(("removed", list(block_hashes)))
        assert self.known.issuperset(block_hashes)
        self.known.difference_update(block_hashes)


def relayed(*events: Event) -> Router:
    router = Router()
    EventRelay(router, SIZE, pickle.loads).take(0, pickle.dumps(Batch(list(events))))
    return router


def test_blocks_keep_hashes_tokens_and_order() -> None:
    long = bytes(range(32))
    short = int.from_bytes(long[-8:], "big")
    router = relayed(
        BlockStored([2**64 - 1, 5], [1, 2, 3, 4]),
        BlockStored([long], [5, 6], parent_block_hash=5),
        BlockRemoved([long, 77]),
    )
    assert router.calls == [
        ("stored", None, [2**64 - 1, 5], [1, 2, 3, 4], None, None),
        ("stored", 5, [short], [5, 6], None, None),
        ("removed", [short]),
    ]


def test_salt_and_adapter_are_those_of_the_whole_sequence() -> None:
    """vLLM says it with the first block alone."""
    router = relayed(
        BlockStored([1, 2], [1, 2, 3, 4], extra_keys=[("tenant",), None]),
        BlockStored([3], [5, 6], parent_block_hash=2, extra_keys=[None]),
        BlockStored([4], [1, 2], extra_keys=[("adapter", "tenant")], lora_name="adapter"),
        BlockStored([5], [1, 2], extra_keys=[("adapter",)], lora_name="adapter"),
        BlockStored([6], [3, 4], parent_block_hash=5, extra_keys=[("adapter",)], lora_name="adapter"),
    )
    salted, adapted = [call[4] for call in router.calls], [call[5] for call in router.calls]
    assert salted == ["tenant", "tenant", "tenant", None, None]
    assert adapted == [None, None, "adapter", "adapter", "adapter"]


def test_events_of_other_layers_media_and_sizes_are_left_out() -> None:
    router = relayed(
        BlockStored([1], [1, 2], group_idx=0, kv_cache_spec_kind="sliding_window"),
        BlockStored([1], [1, 2], group_idx=1),
        BlockStored([2], [1, 2], group_idx=2),
        BlockStored([3], [1, 2], group_idx=1, medium="CPU"),
        BlockStored([4], [1], group_idx=1),
        BlockRemoved([1], group_idx=0),
        BlockRemoved([1], group_idx=1, medium="CPU"),
    )
    assert router.calls == [("stored", None, [1], [1, 2], None, None)]


def test_blocks_from_a_picture_on_are_left_out() -> None:
    """Blocks of another picture have the same tokens, by which a router knows them."""
    events: list[Event] = []
    for picture, hashes in (("one", [1, 2, 3, 4]), ("other", [1, 12, 13, 14])):
        keys: list[tuple[Any, ...] | None] = [("salt",), ((picture, 0),), None]
        events.append(BlockStored([*hashes[:3]], [1, 2, 9, 9, 3, 4], extra_keys=keys))
        events.append(BlockStored([hashes[3]], [5, 6], parent_block_hash=hashes[2]))
    events.append(BlockStored([5], [9, 9], parent_block_hash=1, extra_keys=[(["third", 0],)]))
    router = relayed(*events, BlockRemoved([4, 3, 2]), BlockRemoved([1]))
    assert router.calls == [("stored", None, [1], [1, 2], "salt", None)] * 2
    assert router.known == {1}


def test_a_block_that_is_cached_twice_is_evicted_twice() -> None:
    router = relayed(BlockStored([1], [1, 2]), BlockStored([1], [1, 2]), BlockRemoved([1]))
    assert router.known == {1}
    router = relayed(BlockStored([1], [1, 2]), BlockStored([1], [1, 2]), BlockRemoved([1]), BlockRemoved([1]))
    assert router.known == set()


def test_an_unknown_form_empties_the_router(caplog: pytest.LogCaptureFixture) -> None:
    router = Router()
    relay = EventRelay(router, SIZE, pickle.loads)
    relay.take(0, pickle.dumps(Batch([BlockStored([1], [1, 2])])))
    relay.take(1, b"no message")
    assert router.calls[1:] == [("removed", [1])]
    assert "UnpicklingError" in caplog.text


@st.composite
def histories(draw: st.DrawFn) -> list[Batch]:
    """Events of a cache of sequences over few blocks, whose copies come and go."""
    cached: Counter[int] = Counter()
    batches = []
    for _ in range(draw(st.integers(1, 12))):
        events: list[Event] = []
        for kind in draw(st.lists(st.sampled_from(["store", "remove", "clear"]), max_size=4)):
            if kind == "store":
                start, count = draw(st.integers(0, 3)), draw(st.integers(1, 3))
                if start and not cached[start]:
                    continue
                hashes = list(range(start + 1, start + count + 1))
                cached.update(hashes)
                events.append(BlockStored([*hashes], [7] * SIZE * count, start or None))
            elif kind == "clear":
                cached.clear()
                events.append(AllBlocksCleared())
            elif gone := [each for each, number in cached.items() if number]:
                chosen = draw(st.sampled_from(gone))
                cached[chosen] -= 1
                events.append(BlockRemoved([chosen]))
        batches.append(Batch(events))
    return batches


def cached_after(batches: Sequence[Batch]) -> set[int]:
    cached: Counter[int] = Counter()
    for event in (event for batch in batches for event in batch.events):
        if isinstance(event, BlockStored):
            cached.update(each for each in event.block_hashes if isinstance(each, int))
        elif isinstance(event, BlockRemoved):
            cached.subtract(each for each in event.block_hashes if isinstance(each, int))
        else:
            cached.clear()
    return {each for each, number in cached.items() if number > 0}


@given(histories(), st.data())
def test_the_router_knows_no_block_that_is_not_cached(batches: list[Batch], data: st.DataObject) -> None:
    arrive = data.draw(st.lists(st.booleans(), min_size=len(batches), max_size=len(batches)))
    router = Router()
    relay = EventRelay(router, SIZE, pickle.loads)
    for number, batch in enumerate(batches):
        if arrive[number]:
            relay.take(number, pickle.dumps(batch))
            relay.take(number, pickle.dumps(batch))  # a replay repeats what has come meanwhile
            truth = cached_after(batches[: number + 1])
            assert router.known <= truth
            if all(arrive[: number + 1]):
                assert router.known == truth
    heard = max((number for number, came in enumerate(arrive) if came), default=-1)
    assert relay.num_lost == heard + 1 - sum(arrive)


def test_a_directory_too_deep_for_sockets_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(StartupError, match="TMPDIR"):
        KvEvents()
    assert list(deep.iterdir()) == []
