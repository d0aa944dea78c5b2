"""The paged KV cache's bookkeeping: which request owns which pages; automatic prefix caching.

A page holds the KV of consecutive tokens of one sequence. Full pages are shared by the requests
whose tokens begin with what they hold; a request writes only into its last page, which it owns
alone. Pages that no request owns stay cached until they are needed, and are evicted least recently
used first.

=========  =========  =======================  ====================================
a page is  ref_count  holds                    becomes
=========  =========  =======================  ====================================
free       0          nothing                  owned by `allocate` or `append_page`
owned      1 or more  its owners' tokens       cached or free by `free`
cached     0          at least a cached block  owned by `allocate`, or evicted
=========  =========  =======================  ====================================
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from worker.engines.embedded.kv_cache.blocks import ROOT, Block, BlocksRemoved, BlocksStored, hash_blocks
from worker.engines.embedded.plan import PageCopy, Request

MAX_PAGES_MOVED = 2
"""Pages that one call of `KvCache.compact` moves at most, so that a step's copies stay short."""

FREE_AHEAD = 4
"""Pages behind the owned ones that `KvCache.compact` clears as well, for the next requests."""


@dataclass(eq=False, slots=True)
class Page:
    """The bookkeeping of one page.

    Attributes:
        parent: The page before it in the sequence, -1 for the first.
        ref_count: Requests that own it.
        blocks: Its full blocks whose KV has been computed, in order.
    """

    parent: int = -1
    ref_count: int = 0
    blocks: list[Block] = field(default_factory=list)


class KvCache:
    """Pages with reference counts, and an index of the blocks that they hold.

    Pure bookkeeping, one thread. A request's pages are freed last one first, and shared together: a
    page is therefore never evicted before those that follow it in a sequence. So a block is cached
    only as long as the one before it is.

    Args:
        num_pages: Pages in the store.
        page_size: Tokens per page, a multiple of `block_size`.
        block_size: Tokens per block.
        is_dense: Whether `compact` keeps the owned pages together.
    """

    def __init__(self, num_pages: int, page_size: int, block_size: int, *, is_dense: bool = True) -> None:
        assert page_size % block_size == 0, f"a page of {page_size} tokens does not hold whole blocks"
        self.num_pages = num_pages
        self.page_size = page_size
        self.block_size = block_size
        self._per_page = page_size // block_size
        self._pages = [Page() for _ in range(num_pages)]
        self._free = list(range(num_pages))  # a heap: the lowest free page is taken, so that owned ones lie densely
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._is_dense = is_dense
        self._is_compact = True
        self._index: dict[int, Block] = {}
        self._events: list[BlocksStored | BlocksRemoved] | None = None

    def __repr__(self) -> str:
        owned = self.num_pages - self.num_available
        return f"KvCache({self.num_pages} pages: {owned} owned, {len(self._cached)} cached)"

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that no request owns: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in pages that requests own; those that are only cached are not counted."""
        return (self.num_pages - self.num_available) * self._per_page

    def count_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def match_prefix(self, request: Request) -> list[Block]:
        """The prefix hit: the longest chain of cached blocks that a request's tokens begin with.

        At least one token is left to compute, for its logits; more where a tap wants theirs. The
        hit of the last call is extended and not looked up again: of a chain whose last block is
        cached, every block is. It may be too long by now, if the request was rewound.
        """
        size, tokens, chain = self.block_size, request.tokens, request.cached_blocks
        num_wanted = request.num_reusable // size
        hashes = hash_blocks(request, size)
        del chain[num_wanted:]
        while chain and self._index.get(chain[-1].hash) is not chain[-1]:
            chain.pop()
        for index in range(len(chain), num_wanted):
            block = self._index.get(hashes[index])
            parent = chain[-1] if chain else None
            if block is None or not block.is_made_of(parent, tokens[index * size : (index + 1) * size]):
                break
            chain.append(block)
        return chain

    def allocate(self, request: Request, spare: int = 0) -> tuple[PageCopy, ...] | None:
        """Give a request pages for all its tokens, with its prefix hit in them.

        Whole cached pages are shared. A partly cached one is copied on write: the request gets a
        page of its own, and the cached blocks are to be copied into it.

        Args:
            request: Owns no pages; its `pages` and `num_computed` are set.
            spare: Pages that must be available afterwards.

        Returns:
            What must be copied in the store before the step writes; None, and nothing is changed,
            if there are too few pages.
        """
        if not self.has_room(request, spare):
            return None
        chain = self.match_prefix(request)
        num_whole, num_copied = divmod(len(chain), self._per_page)
        shared = self._whole_pages(chain, num_whole)
        missing = self.count_pages(len(request.tokens)) - num_whole
        for page in shared:
            self._share(page)
        request.pages = shared
        request.num_computed = len(chain) * self.block_size
        copies = self._copy_on_write(request, chain[-num_copied:]) if num_copied else ()
        for _ in range(missing - bool(num_copied)):
            self._append(request)
        return copies

    def has_room(self, request: Request, spare: int = 0) -> bool:
        """Whether `allocate` would give a request its pages."""
        chain = self.match_prefix(request)
        num_whole = len(chain) // self._per_page
        missing = self.count_pages(len(request.tokens)) - num_whole
        shared = self._whole_pages(chain, num_whole)
        return missing + spare <= self.num_available - sum(page in self._cached for page in shared)

    def append_page(self, request: Request) -> bool:
        """Give a request one more page; False if requests own all of them."""
        if not self.num_available:
            return False
        self._append(request)
        return True

    def complete(self, request: Request, num_computed: int) -> None:
        """A request's KV is computed up to `num_computed` tokens: its full blocks are cached, those
        of a spoiled request are not.
        """
        size = self.block_size
        first, end = request.num_computed // size, num_computed // size
        request.num_computed = num_computed
        if first < end and not request.is_spoiled:
            self._register(request, first, end)

    def withdraw(self, request: Request, num_tokens: int) -> None:
        """The KV of a request's first `num_tokens` tokens alone is sound: blocks that hold later
        ones, which no other request has been given yet, are no longer cached.
        """
        removed: list[int] = []
        for index, number in enumerate(request.pages):
            kept = max(0, num_tokens // self.block_size - index * self._per_page)
            removed += self._detach(number, kept)
        self._record_removed(removed)

    def trim(self, request: Request) -> None:
        """Take back the pages behind a request's computed tokens: they hold rejected drafts."""
        while len(request.pages) > self.count_pages(request.num_computed):
            number = request.pages.pop()
            page = self._pages[number]
            page.ref_count -= 1
            assert not page.ref_count and not page.blocks, f"page {number} holds more than a draft"
            heapq.heappush(self._free, number)

    def free(self, request: Request) -> None:
        """Take a request's pages back; their blocks stay cached until the pages are needed."""
        for number in reversed(request.pages):
            page = self._pages[number]
            page.ref_count -= 1
            if page.ref_count:
                continue
            if page.blocks:
                self._cached[number] = None
                self._is_compact = False
            else:
                heapq.heappush(self._free, number)
        request.pages = []
        request.num_computed = 0

    def compact(self) -> tuple[PageCopy, ...]:
        """Move cached pages out of the store's beginning, where the owned pages should lie densely.

        Torch reads pages at a constant distance from one another in one call, and so needs fewer
        calls for dense ones. A few pages are moved at a time, each to a free page or to that of the
        least recently used one.

        Returns:
            What must be copied in the store before the step writes.
        """
        if self._is_compact or not self._is_dense:
            return ()
        end = min(self.num_pages, self.num_pages - self.num_available + FREE_AHEAD)
        low = [number for number in range(end) if number in self._cached]
        moved: dict[int, int] = {}
        for number in low[:MAX_PAGES_MOVED]:
            target = self._take_from(end)
            if target is None:
                break
            moved[number] = target
        self._is_compact = not moved
        if self._is_compact:
            return ()
        self._free += moved
        heapq.heapify(self._free)
        return self._move(moved)

    def _take_from(self, first: int) -> int | None:
        """A page from `first` on: a free or the least recently used one; None if both lie before.

        `_free` is no heap afterwards.
        """
        if self._free and (number := max(self._free)) >= first:
            self._free.remove(number)
            return number
        oldest = next(iter(self._cached))
        return self._evict() if oldest >= first else None

    def _move(self, moved: dict[int, int]) -> tuple[PageCopy, ...]:
        """Renumber cached pages, old number to new; their order of use stays."""
        copies = []
        for number, target in moved.items():
            old, new = self._pages[number], self._pages[target]
            new.parent, new.blocks, old.blocks = old.parent, old.blocks, []
            for block in new.blocks:
                block.pages[block.pages.index(number)] = target
            copies.append(PageCopy(number, target, len(new.blocks) * self.block_size))
        self._cached = OrderedDict((moved.get(number, number), None) for number in self._cached)
        for number in self._cached:  # what follows a cached page is cached
            page = self._pages[number]
            page.parent = moved.get(page.parent, page.parent)
        return tuple(copies)

    def clear(self) -> None:
        """Evict every cached page."""
        while self._cached:
            heapq.heappush(self._free, self._evict())

    def record_events(self) -> None:
        """Record cached and evicted blocks for `drain_events`, those cached by now first.

        From then on somebody must drain them.
        """
        self._events = []
        for block in self._index.values():  # in the order of caching: a block comes after its parent
            _record(self._events, block)

    def drain_events(self) -> list[BlocksStored | BlocksRemoved]:
        """Blocks cached and evicted since the last call, in order; none before `record_events`."""
        events = self._events or []
        if self._events is not None:
            self._events = []
        return events

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Free + cached + owned is the whole store, and reference counts agree with `requests`.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        owned = Counter(page for request in requests for page in request.pages)
        counts = {number: page.ref_count for number, page in enumerate(self._pages) if page.ref_count}
        assert counts == owned, f"reference counts are {counts}, live requests own {dict(owned)}"
        everything = sorted([*self._free, *self._cached, *counts])
        assert everything == list(range(self.num_pages)), f"pages leaked: {self!r}"

    def check_blocks(self) -> None:
        """The index of blocks agrees with what the pages hold; slower than `check_integrity`.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        pages: dict[int, list[int]] = {}
        for number, page in enumerate(self._pages):
            assert bool(page.blocks) or number not in self._cached, f"page {number} is cached without a block"
            assert not page.blocks or number not in self._free, f"page {number} is free and holds blocks"
            assert page.ref_count < 2 or len(page.blocks) == self._per_page, f"page {number} is shared early"
            for index, block in enumerate(page.blocks):
                pages.setdefault(id(block), []).append(number)
                assert block.parent is self._before(page, index), f"page {number}: block {index} is misplaced"
                assert sorted(block.pages) == sorted(set(block.pages)) and number in block.pages
        cached = {id(block): block for block in self._index.values()}
        assert all(block.hash == key for key, block in self._index.items())
        assert all(self._is_cached(block.parent) for block in cached.values()), "a block is cached, its parent is not"
        assert all(sorted(block.pages) == pages.get(key) for key, block in cached.items()), "a block has no page"

    def _before(self, page: Page, index: int) -> Block | None:
        if index:
            return page.blocks[index - 1]
        return self._pages[page.parent].blocks[-1] if page.parent >= 0 else None

    def _whole_pages(self, chain: list[Block], num_whole: int) -> list[int]:
        """The pages that hold the first `num_whole` whole pages of a chain, in order."""
        if not chain:
            return []
        number = chain[-1].pages[0]
        if len(chain) > num_whole * self._per_page:
            number = self._pages[number].parent
        found = []
        while number >= 0:
            found.append(number)
            number = self._pages[number].parent
        found.reverse()
        return found

    def _copy_on_write(self, request: Request, blocks: list[Block]) -> tuple[PageCopy, ...]:
        source = blocks[-1].pages[0]
        if source in self._cached:
            self._cached.move_to_end(source)
        target = self._append(request)  # the source itself, where it was the only page left
        for block in blocks:
            self._attach(block, target)
        if target == source:
            return ()
        return (PageCopy(source, target, len(blocks) * self.block_size),)

    def _share(self, number: int) -> None:
        page = self._pages[number]
        page.ref_count += 1
        if page.ref_count == 1:
            del self._cached[number]
            self._is_compact = False

    def _append(self, request: Request) -> int:
        number = heapq.heappop(self._free) if self._free else self._evict()
        page = self._pages[number]
        page.ref_count = 1
        self._is_compact = False
        page.parent = request.pages[-1] if request.pages else -1
        request.pages.append(number)
        return number

    def _evict(self) -> int:
        number, _ = self._cached.popitem(last=False)
        self._record_removed(self._detach(number, 0))
        return number

    def _detach(self, number: int, kept: int) -> list[int]:
        """Take a page's blocks from it, but for the first `kept`; the hashes of those that no page
        holds any more."""
        page, removed = self._pages[number], []
        for block in page.blocks[kept:]:
            block.pages.remove(number)
            if not block.pages and self._index.get(block.hash) is block:
                del self._index[block.hash]
                removed.append(block.hash)
        del page.blocks[kept:]
        return removed

    def _record_removed(self, hashes: Sequence[int]) -> None:
        if hashes and self._events is not None:
            self._events.append(BlocksRemoved(tuple(hashes)))

    def _register(self, request: Request, first: int, end: int) -> None:
        size = self.block_size
        hashes = hash_blocks(request, size)
        parent = self._block(request, first - 1) if first else None
        for index in range(first, end):
            tokens = request.tokens[index * size : (index + 1) * size]
            block = self._index.get(hashes[index])
            if block is None or not block.is_made_of(parent, tokens):
                block = Block(hashes[index], parent, tokens)
            self._attach(block, request.pages[index // self._per_page])
            parent = block

    def _block(self, request: Request, index: int) -> Block:
        return self._pages[request.pages[index // self._per_page]].blocks[index % self._per_page]

    def _is_cached(self, block: Block | None) -> bool:
        return block is None or self._index.get(block.hash) is block

    def _attach(self, block: Block, number: int) -> None:
        # the index keeps the first block of a hash; another one of that hash is not cached, and so
        # neither is what follows it
        if not block.pages and block.hash not in self._index and self._is_cached(block.parent):
            self._index[block.hash] = block
            if self._events is not None:
                _record(self._events, block)
        block.pages.append(number)
        self._pages[number].blocks.append(block)


def _record(events: list[BlocksStored | BlocksRemoved], block: Block) -> None:
    """Add a cached block; to the last event, if it follows that one's last block."""
    parent = block.parent.hash if block.parent else ROOT
    event = BlocksStored(parent, (block.hash,), tuple(block.tokens))
    last = events[-1] if events else None
    if isinstance(last, BlocksStored) and last.block_hashes[-1] == parent:
        hashes, tokens = last.block_hashes + event.block_hashes, last.token_ids + event.token_ids
        events[-1] = BlocksStored(last.parent_hash, hashes, tokens)
    else:
        events.append(event)
