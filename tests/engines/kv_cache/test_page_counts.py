"""Pages are taken in their order; and checks of them whenever the engine goes idle cost no more in
a large store.
"""

from __future__ import annotations

from collections import Counter

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.embedded.kv_cache.page_pool import CHANGES_PER_CHECK, FREE_AHEAD, MAX_PAGES_MOVED, PagePool

NUM_PAGES = 6400


class CountingPool(PagePool):
    """Counts how often every page was looked at."""

    num_looks = 0

    def check_integrity(self, owners: Counter[int]) -> None:
        self.num_looks += 1
        super().check_integrity(owners)


def test_every_page_is_looked_at_in_proportion_to_the_changes() -> None:
    pool, num_turns = CountingPool(NUM_PAGES), 1000
    for turn in range(num_turns):
        number = pool.take()
        pool.check_counts(Counter([number]))
        pool.release(number, holds_blocks=turn % 2 == 0)
        pool.check_counts(Counter())
    changes = 2 * num_turns
    assert pool.num_looks == int(changes / (CHANGES_PER_CHECK * NUM_PAGES)) == 10


def test_a_shared_page_counts_once() -> None:
    pool = PagePool(NUM_PAGES)
    number = pool.take()
    pool.release(number, holds_blocks=True)
    pool.share(number)
    pool.share(number)
    assert pool.num_owned == 1
    pool.check_counts(Counter([number, number]))
    pool.release(number, holds_blocks=True)
    pool.check_counts(Counter([number]))
    pool.release(number, holds_blocks=True)
    pool.check_counts(Counter())


def test_a_leak_is_found_at_once() -> None:
    pool = PagePool(NUM_PAGES)
    number = pool.take()
    with pytest.raises(AssertionError, match="1 pages are owned"):
        pool.check_counts(Counter())
    pool.release(number, holds_blocks=False)
    pool.free.remove(number)
    with pytest.raises(AssertionError, match="pages leaked: 6399 of 6400"):
        pool.check_counts(Counter())


def test_counts_that_agree_are_not_enough_for_ever() -> None:
    """A page that is free twice in place of another is found once there were changes."""
    pool = PagePool(NUM_PAGES)
    pool.free[-1] = pool.free[0]
    pool.check_counts(Counter())
    for _ in range(int(CHANGES_PER_CHECK * NUM_PAGES / 2) - 1):
        pool.release(pool.take(), holds_blocks=False)
        pool.check_counts(Counter())
    pool.release(pool.take(), holds_blocks=False)
    with pytest.raises(AssertionError, match="pages leaked"):
        pool.check_counts(Counter())


KINDS = ("take", "take", "take", "share", "touch", "release", "release", "evict all", "compact")


@settings(max_examples=examples(1000), deadline=None)
@given(
    num_pages=st.integers(1, 24),
    operations=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.booleans()), max_size=80),
)
def test_the_lowest_free_page_is_taken_then_the_oldest(num_pages: int, operations: list[tuple[str, int, bool]]) -> None:
    pool, oldest, owned = PagePool(num_pages), list[int](), list[int]()
    for kind, number, holds_blocks in operations:
        free = set(range(num_pages)) - set(oldest) - set(owned)
        if kind == "take" and pool.num_available:
            owned.append(pool.take())
            assert owned[-1] == (min(free) if free else oldest.pop(0))
        elif kind in ("share", "touch") and (known := [*oldest, *(owned if kind == "share" else ())]):
            page = known[number % len(known)]
            getattr(pool, kind)(page)
            if page in oldest:
                oldest.remove(page)
            (owned if kind == "share" else oldest).append(page)
        elif kind == "release" and owned:
            page = owned.pop(number % len(owned))
            pool.release(page, holds_blocks=holds_blocks)
            if holds_blocks and page not in owned:
                oldest.append(page)
        elif kind == "evict all":
            assert pool.evict_all() == oldest
            oldest.clear()
        elif kind == "compact":
            end = min(num_pages, len(set(owned)) + FREE_AHEAD)
            moved = pool.compact()
            assert len(moved) <= MAX_PAGES_MOVED
            assert set(moved) <= {page for page in oldest if page < end}
            assert all(page >= end for page in moved.values())
            oldest = [moved.get(page, page) for page in oldest if page not in moved.values()]
        assert list(pool.cached) == oldest
        pool.check_integrity(Counter(owned))
