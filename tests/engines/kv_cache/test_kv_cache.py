"""What is shared, copied, evicted and told to a router."""

from __future__ import annotations

import random

import pytest
from kv_doubles import RecallModel, recall_request
from test_scheduler_properties import House, operate

from worker.engines.embedded import blocks
from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.blocks import ROOT, hash_block, hash_blocks
from worker.engines.embedded.kv_cache import BlocksRemoved, BlocksStored
from worker.engines.embedded.kv_cache.budget import choose_page_size
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.kv_cache.page_pool import FREE_AHEAD
from worker.engines.embedded.plan import PageCopy, Request

BLOCK, PAGE, CONTEXT = 4, 16, 64
MODEL = RecallModel(CONTEXT)


def cache(num_pages: int = 8) -> KvCache:
    return KvCache(num_pages, PAGE, BLOCK)


def request(tokens: list[int]) -> Request:
    return recall_request(MODEL, "one", tokens, 1)


def computed(store: KvCache, tokens: list[int]) -> Request:
    """A request all of whose KV has been computed."""
    one = request(tokens)
    assert store.allocate(one) is not None
    store.complete(one, len(tokens))
    return one


def test_the_hash_is_the_same_everywhere() -> None:
    first = hash_block(ROOT, [1, 2, 3, 4])
    assert first == 658132497017838498
    assert hash_block(first, [5, 6, 7, 8]) == 7641984106258271874
    assert hash_block(ROOT, [1, 2, 3, 5]) != first
    assert hash_blocks(ROOT, [*range(1, 9), 9, 10], 4) == [first, 7641984106258271874]
    assert hash_blocks(first, [5, 6, 7], 4) == []


def test_nothing_is_cached_before_it_is_computed() -> None:
    store = cache()
    one = request(list(range(3, 40)))
    assert store.allocate(one) == ()
    assert store.match_prefix(request(one.tokens)) == []
    store.complete(one, 10)
    assert len(store.match_prefix(request(one.tokens))) == 2


def test_salts_are_kept_apart() -> None:
    store = cache()
    held = {salt: request(list(range(3, 43))) for salt in (None, "", "a", "b")}
    for salt, one in held.items():
        one.cache_salt = salt
    for salt in (None, "a"):
        assert store.allocate(held[salt]) == ()
        store.complete(held[salt], 40)
    assert len({tuple(one.pages) for one in (held[None], held["a"])}) == 2
    for salt, cached in ((None, 9), ("a", 9), ("b", 0), ("", 0)):
        other = request(held[None].tokens)
        other.cache_salt = salt
        assert len(store.match_prefix(other)) == cached
    store.check_blocks()


def test_whole_pages_are_shared_and_the_rest_is_copied() -> None:
    store = cache()
    first = computed(store, list(range(3, 43)))  # 40 tokens: two whole pages and two blocks
    second = request(first.tokens)
    assert store.allocate(second) == (PageCopy(source=2, target=3, num_tokens=4),)  # one token is left to compute
    assert (first.pages, second.pages) == ([0, 1, 2], [0, 1, 3])
    assert second.num_computed == 36
    store.check_integrity([first, second])
    store.check_blocks()


def test_a_prompt_that_ends_with_a_page_computes_its_last_block() -> None:
    store = cache()
    first = computed(store, list(range(3, 35)))
    second = request(first.tokens)
    assert store.allocate(second) == (PageCopy(source=1, target=2, num_tokens=12),)
    assert second.pages == [0, 2]


def test_a_request_rewound_to_a_cached_block_computes_a_token() -> None:
    store = cache()
    one = computed(store, list(range(3, 43)))
    store.free(one)
    assert len(store.match_prefix(one)) == 9
    one.rewind(2 * BLOCK, BLOCK)
    assert store.allocate(one) is not None
    assert one.num_computed == BLOCK < len(one.tokens)
    store.check_blocks()


def test_freed_pages_stay_cached_until_they_are_needed() -> None:
    store = cache(num_pages=4)
    store.free(computed(store, list(range(3, 43))))
    assert (len(store._pool.free), store.num_available) == (1, 4)
    assert len(store.match_prefix(request(list(range(3, 60))))) == 10
    other = computed(store, [50] * 20)  # takes the free one and evicts the end of the chain
    assert (other.pages, len(store._pool.free)) == ([3, 2], 0)
    assert len(store.match_prefix(request(list(range(3, 60))))) == 8
    store.check_integrity([other])


def test_eviction_takes_the_least_recently_used_and_ends_first() -> None:
    store = cache(num_pages=6)
    for first in (10, 20, 30):
        store.free(computed(store, [first] * 32))
    again = request([10] * 33)
    assert store.allocate(again) == ()  # evicts the end of the 20s
    store.free(again)
    lengths = []
    while True:
        lengths.append([len(store.match_prefix(request([first] * 33))) for first in (10, 20, 30)])
        if not any(lengths[-1]):
            break
        number, _ = store._pool.cached.popitem(last=False)
        store._index.withdraw([number], 0)
        store._pool.free.append(number)
    assert lengths == [[8, 4, 8], [8, 0, 8], [8, 0, 4], [8, 0, 0], [4, 0, 0], [0, 0, 0]]


def test_the_last_page_to_be_had_is_taken_over() -> None:
    store = cache(num_pages=4)
    tokens = list(range(3, 61))
    store.free(computed(store, tokens))
    assert store.num_available == 4
    again = request(tokens)
    assert store.allocate(again) == (PageCopy(source=3, target=3, num_tokens=8),)  # nothing is left behind these
    assert (again.pages, again.num_computed) == ([0, 1, 2, 3], 56)
    store.check_integrity([again])
    store.check_blocks()
    assert len(store.match_prefix(request(tokens))) == 14


def test_what_is_copied_from_outlives_what_is_not_wanted() -> None:
    store = cache(num_pages=2)
    store.free(computed(store, [10] * 14))
    store.free(computed(store, [20] * 14))
    again = request([10] * 6)
    assert store.allocate(again) == (PageCopy(source=0, target=1, num_tokens=4),)
    assert len(store.match_prefix(request([10] * 14))) == 3


def test_what_is_freed_makes_room_at_the_beginning() -> None:
    store = cache(num_pages=9)
    gone, stays = computed(store, list(range(3, 43))), computed(store, [9] * 40)
    assert (gone.pages, stays.pages) == ([0, 1, 2], [3, 4, 5])
    store.free(gone)
    assert store.compact() == (PageCopy(0, 8, 16), PageCopy(1, 7, 16))
    assert store.compact() == ()  # there is no page for the third
    store.check_blocks()
    store.check_integrity([stays])
    again = request(gone.tokens)
    assert store.allocate(again) == (PageCopy(source=2, target=0, num_tokens=4),)
    assert again.pages == [8, 7, 0]
    store.check_blocks()


def test_freed_pages_replace_the_oldest_ones_in_a_full_store() -> None:
    store = cache(num_pages=8)
    first, stays = computed(store, [10] * 14), computed(store, [20] * 14)
    old = [computed(store, [token] * 46) for token in (30, 40)]
    assert [one.pages for one in old] == [[2, 3, 4], [5, 6, 7]]
    for one in (old[1], old[0], first):
        store.free(one)
    assert store.compact() == (PageCopy(0, 7, 12), PageCopy(2, 6, 16))  # the end of the 40s goes
    assert [len(store.match_prefix(request([token] * 47))) for token in (10, 30, 40)] == [3, 11, 4]
    store.check_blocks()
    store.check_integrity([stays])


def test_nothing_moves_where_nothing_is_older() -> None:
    store = cache(num_pages=2)
    first, stays = computed(store, [10] * 14), computed(store, [20] * 14)
    store.free(first)
    assert store.compact() == ()
    assert len(store.match_prefix(request([10] * 14))) == 3
    store.check_integrity([stays])


@pytest.mark.parametrize("num_pages", [12, 40])
def test_compaction_comes_to_an_end_and_leaves_nothing_to_move(num_pages: int) -> None:
    house = House(num_pages)
    for seed in range(8):
        operate(house, random.Random(seed), 300)
        store = house.cache
        store._pool._is_compact = False
        for _ in range(num_pages):
            for copy in store.compact():
                house.model.store[copy.target][: copy.num_tokens] = house.model.store[copy.source][: copy.num_tokens]
        end = num_pages - store.num_available + FREE_AHEAD
        low = [number for number in store._pool.cached if number < end]
        assert not low or (max(store._pool.free, default=-1) < end and next(iter(store._pool.cached)) < end)
        house.check()


def test_too_few_pages_change_nothing() -> None:
    store = cache(num_pages=4)
    held = computed(store, [9] * 20)
    store.free(computed(store, [8] * 20))
    before = repr(store)
    large = request([8] * 50)
    assert store.allocate(large) is None
    assert store.allocate(request([8] * 20), spare=1) is None
    assert (repr(store), large.pages, large.num_computed) == (before, [], 0)
    store.check_integrity([held])


def test_a_router_can_follow() -> None:
    store = cache(num_pages=2)
    store.record_events()
    one = computed(store, [10] * 18)
    first, second, third, fourth = one.block_hashes
    stored = BlocksStored(ROOT, (first, second, third, fourth), (10,) * 16)
    assert store.drain_events() == [stored]
    store.free(one)
    other = computed(store, [11] * 20)
    assert store.drain_events() == [
        BlocksRemoved((first, second, third, fourth)),
        BlocksStored(ROOT, tuple(other.block_hashes), (11,) * 20),
    ]
    assert store.drain_events() == []
    assert third == hash_block(second, [10] * 4)


def test_routers_hear_of_the_salt_and_the_adapter() -> None:
    store = cache(num_pages=12)
    store.record_events()
    adapter = LoadedAdapter("mine", "f00d", None)
    kinds = [(used, salt) for used in (None, adapter) for salt in (None, "a")]
    for used, salt in kinds:
        one = request([10] * 18)
        one.adapter, one.cache_salt = used, salt
        assert store.allocate(one) == ()
        store.complete(one, 18)
    for _ in range(2):
        events = store.drain_events()
        assert all(isinstance(event, BlocksStored) for event in events)
        named = [(event.lora_name, event.cache_salt) for event in events if isinstance(event, BlocksStored)]
        assert named == [(None if used is None else used.name, salt) for used, salt in kinds]
        store.record_events()  # a router that comes late


def test_a_late_router_hears_of_cached_blocks_without_a_backlog() -> None:
    store = KvCache(4, PAGE, BLOCK)
    for token in range(10, 30):
        store.free(computed(store, [token] * 36))
    assert store._index.events is None
    assert store.drain_events() == []
    stays = computed(store, [50] * 18)
    store.record_events()
    cached: dict[int, tuple[int, tuple[int, ...]]] = {ROOT: (ROOT, ())}
    for event in store.drain_events():
        assert isinstance(event, BlocksStored)
        parent = event.parent_hash
        for place, each in enumerate(event.block_hashes):
            tokens = event.token_ids[place * BLOCK : (place + 1) * BLOCK]
            assert parent in cached
            assert each == hash_block(parent, tokens)
            cached[each] = parent, tokens
            parent = each
    assert set(cached) == {ROOT, *store._index.blocks}
    assert set(stays.block_hashes) <= set(cached)
    assert store.drain_events() == []
    store.clear()
    removed = {each for event in store.drain_events() for each in event.block_hashes}
    assert removed == set(cached) - {ROOT} - set(stays.block_hashes)


def test_a_prompt_that_waits_is_hashed_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps go by, and however much of it becomes cached or is evicted in the
    meantime.
    """
    hashed: list[int] = []
    compared: list[int] = []
    made_of = blocks.Block.is_made_of

    def hashing(parent: int, tokens: list[int], size: int) -> list[int]:
        found = hash_blocks(parent, tokens, size)
        hashed.extend(found)
        return found

    monkeypatch.setattr(blocks, "hash_blocks", hashing)
    monkeypatch.setattr(blocks.Block, "is_made_of", lambda *arguments: compared.append(1) or made_of(*arguments))  # type: ignore[func-returns-value]
    store = cache(num_pages=17)
    tokens = list(range(3, 63))
    first = computed(store, tokens[:52])
    others = [computed(store, [80 + place] * 60) for place in range(2)]
    del hashed[:], compared[:]
    waits = request(tokens)
    for _ in range(100):
        assert store.allocate(waits, spare=8) is None
    assert (len(hashed), len(compared)) == (15, 13)
    grown = request(tokens[:60])
    assert store.allocate(grown) is not None
    store.complete(grown, 60)
    assert len(store.match_prefix(waits)) == 14  # one token is left to compute
    for one in (first, grown):
        store.free(one)
    store.clear()
    assert store.match_prefix(waits) == []
    del hashed[:], compared[:]
    for _ in range(100):
        assert store.allocate(waits, spare=8) is None
    assert (hashed, compared) == ([], [])
    store.check_integrity(others)
    store.check_blocks()


@pytest.mark.parametrize("modulus", [5, 50, 1000])
def test_what_follows_a_cached_block_is_found(modulus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever is cached, all that is before it is cached: also where hashes of different
    tokens are equal.
    """

    def colliding(parent: int, tokens: list[int], size: int) -> list[int]:
        found: list[int] = []
        for start in range(0, len(tokens) - size + 1, size):
            found.append(hash_block(found[-1] if found else parent, tokens[start : start + size]) % modulus)
        return found

    monkeypatch.setattr(blocks, "hash_blocks", colliding)
    house = House(routes=False)
    for seed in range(3):
        operate(house, random.Random(seed), 500)
        for block in house.cache._index.blocks.values():
            tokens: list[int] = []
            last: blocks.Block | None = block
            while last is not None:
                tokens[:0] = last.tokens
                last = last.parent
            follower = request([3])
            follower.tokens[:] = [*tokens, 3]
            assert house.cache.match_prefix(follower)[-1] is block


def test_equal_hashes_of_different_tokens_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "hash_block", lambda parent, tokens: hash_block(parent, tokens) % 5)
    house = House(routes=False)
    operate(house, random.Random(0), 2000)
    assert house.num_finished > 100


@pytest.mark.parametrize(
    ("block_size", "context_length", "expected"),
    [(16, 2048, 256), (16, 100, 112), (8, 100, 104), (24, 5000, 240), (300, 5000, 300), (1, 2, 2), (256, 7, 256)],
)
def test_pages_are_whole_blocks(block_size: int, context_length: int, expected: int) -> None:
    assert choose_page_size(block_size, context_length) == expected


def test_leaks_are_noticed() -> None:
    store = cache()
    one = computed(store, [10] * 20)
    with pytest.raises(AssertionError, match="live requests own"):
        store.check_integrity([])
    store.check_integrity([one])
    store._pool.free.pop()
    with pytest.raises(AssertionError, match="leaked"):
        store.check_integrity([one])


def test_wrong_blocks_are_noticed() -> None:
    store = cache()
    one = computed(store, [10] * 36)
    store.check_blocks()
    block = store._index._pages[one.pages[0]].blocks.pop()
    with pytest.raises(AssertionError, match="misplaced"):
        store.check_blocks()
    store._index._pages[one.pages[0]].blocks.append(block)
    block.pages.append(7)
    with pytest.raises(AssertionError, match="no page"):
        store.check_blocks()
