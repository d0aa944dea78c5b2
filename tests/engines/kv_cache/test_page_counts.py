"""What is checked of the pages whenever the engine goes idle costs no more in a large store."""

from __future__ import annotations

from collections import Counter

import pytest

from worker.engines.embedded.kv_cache.page_pool import CHANGES_PER_CHECK, PagePool

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
