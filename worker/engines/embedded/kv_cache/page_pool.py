"""The pages of the KV store: reference counts, and the order in which unowned pages are taken.

=========  =========  ======================  =======================================
a page is  ref_count  holds                   becomes
=========  =========  ======================  =======================================
free       0          nothing                 owned by `take`
owned      1 or more  its owners' tokens      cached or free by `release`
cached     0          one cached block, more  owned by `share`, or evicted by `take`
=========  =========  ======================  =======================================
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict

MAX_PAGES_MOVED = 2
"""Pages that one call of `PagePool.compact` moves at most, so that a step's copies stay short."""

FREE_AHEAD = 4
"""Pages behind the owned ones that `PagePool.compact` clears as well, for the next requests."""

CHANGES_PER_CHECK = 1 / 32
"""Changes of owners, as a share of the pages, after which `PagePool.check_counts` looks at every
page. A look costs about 0.1 µs a page, so that it adds 3 µs to each change.
"""


class PagePool:
    """Page numbers from 0 to below `num_pages`, each free, owned or cached.

    Args:
        num_pages: Pages in the store.

    Attributes:
        free: A heap: the lowest free page is taken first, so that owned pages lie densely.
        cached: Pages with cached blocks that no request owns, least recently used first.
        ref_counts: Number of owners, by page.
        num_owned: Pages that have owners.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.ref_counts = [0] * num_pages
        self.num_owned = 0
        self._num_changes = 0  # of owners, since every page was looked at
        self._is_compact = True

    @property
    def num_available(self) -> int:
        """Pages that no request owns: free and cached."""
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """Give a page one owner: a free one, or the least recently used one, which is evicted.

        The caller drops the blocks that it may still hold.
        """
        number = heapq.heappop(self.free) if self.free else self.cached.popitem(last=False)[0]
        self.ref_counts[number] = 1
        self.num_owned += 1
        self._num_changes += 1
        self._is_compact = False
        return number

    def share(self, number: int) -> None:
        """Give a page that holds blocks one more owner."""
        self.ref_counts[number] += 1
        self._num_changes += 1
        if self.ref_counts[number] == 1:
            self.num_owned += 1
            del self.cached[number]
            self._is_compact = False

    def touch(self, number: int) -> None:
        """Make a page the most recently used one, if it is cached."""
        if number in self.cached:
            self.cached.move_to_end(number)

    def release(self, number: int, *, holds_blocks: bool) -> None:
        """Take one owner from a page; without owners it is cached if it holds blocks, else free."""
        self.ref_counts[number] -= 1
        self._num_changes += 1
        if self.ref_counts[number]:
            return
        self.num_owned -= 1
        if holds_blocks:
            self.cached[number] = None
            self._is_compact = False
        else:
            heapq.heappush(self.free, number)

    def evict_all(self) -> list[int]:
        """Free every cached page; returns them, least recently used first."""
        evicted = list(self.cached)
        self.cached.clear()
        self.free += evicted
        heapq.heapify(self.free)
        return evicted

    def compact(self) -> dict[int, int]:
        """Move cached pages out of the store's beginning, where the owned pages should lie densely.

        A few pages are moved at a time, each to a free page or to that of the least recently used
        one. The order of use stays.

        Returns:
            New number by old number; the caller moves the blocks, once it has dropped those that
            the new ones hold.
        """
        if self._is_compact:
            return {}
        end = min(self.num_pages, self.num_pages - self.num_available + FREE_AHEAD)
        low = [number for number in range(end) if number in self.cached]
        moved: dict[int, int] = {}
        for number in low[:MAX_PAGES_MOVED]:
            target = self._take_from(end)
            if target is None:
                break
            moved[number] = target
        self._is_compact = not moved
        if moved:
            self.free += moved
            heapq.heapify(self.free)
            self.cached = OrderedDict((moved.get(number, number), None) for number in self.cached)
        return moved

    def _take_from(self, first: int) -> int | None:
        """A page from `first` on: a free or the least recently used one; None if both lie before.

        `free` is no heap afterwards.
        """
        if self.free and (number := max(self.free)) >= first:
            self.free.remove(number)
            return number
        oldest = next(iter(self.cached))
        if oldest < first:
            return None
        del self.cached[oldest]
        return oldest

    def check_counts(self, owners: Counter[int]) -> None:
        """The numbers of free, cached and owned pages are those of the store and of `owners`; now
        and then `check_integrity`, in proportion to the changes, so that large stores cost no more.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        if self._num_changes >= CHANGES_PER_CHECK * self.num_pages:
            self.check_integrity(owners)
        assert self.num_owned == len(owners), f"{self.num_owned} pages are owned, live requests own {dict(owners)}"
        total = self.num_available + self.num_owned
        assert total == self.num_pages, f"pages leaked: {total} of {self.num_pages}"

    def check_integrity(self, owners: Counter[int]) -> None:
        """Free + cached + owned is the whole store, and reference counts agree with `owners`.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        counts = {number: count for number, count in enumerate(self.ref_counts) if count}
        assert counts == owners, f"reference counts are {counts}, live requests own {dict(owners)}"
        everything = sorted([*self.free, *self.cached, *counts])
        assert everything == list(range(self.num_pages)), f"pages leaked: {len(everything)} of {self.num_pages}"
        assert self.num_owned == len(counts), f"{self.num_owned} pages are counted as owned, not {len(counts)}"
        self._num_changes = 0
