"""Who owns which page of the KV store, and what the pages hold. The store itself belongs to
the model.

A page holds the KV of consecutive tokens of a sequence. Full ones are shared among the requests
whose tokens begin alike; a request writes only into its last one, which it owns alone. What no
request owns any more stays until its place is needed, least recently used first.

==============  =========  ==========================  ============================
a page is    owners     holds                       becomes
==============  =========  ==========================  ============================
free            0          nothing                     held by `admit` or `grow`
held            1 or more  the tokens of its owners    cached or free by `release`
cached          0          one known block at least    held by `admit`, or evicted
==============  =========  ==========================  ============================
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.engines.embedded.kv_cache.blocks import ROOT, Block, BlocksRemoved, BlocksStored, hash_blocks
from worker.engines.embedded.plan import PageCopy, Request

MOVED_AT_ONCE = 2
"""Pages that one call of `KvCache.compact` moves at most."""

FREE_AHEAD = 4
"""Places behind those for what is held that it clears too, for the next requests."""


@dataclass(eq=False, slots=True)
class Page:
    """The bookkeeping of one page.

    Attributes:
        parent: The page before it in the sequence, -1 for the first.
        owners: Requests that own it.
        blocks: Its full blocks whose KV has been computed, in order.
    """

    parent: int = -1
    owners: int = 0
    blocks: list[Block] = field(default_factory=list)


class KvCache:
    """Pages with reference counts, found again by the blocks that they hold. Pure bookkeeping,
    one thread.

    A request's pages are released last one first, and held together: a page is therefore
    never evicted before those that follow it in a sequence. So a block is known only as long as the
    one before it is.

    Args:
        num_pages: Pages in the store.
        page_size: Tokens per page, a multiple of `block_size`.
        block_size: Tokens per block.
        is_dense: Whether what is held is kept together by `compact`.
    """

    def __init__(self, num_pages: int, page_size: int, block_size: int, *, is_dense: bool = True) -> None:
        assert page_size % block_size == 0, f"a page of {page_size} tokens does not hold whole blocks"
        self.num_pages = num_pages
        self.page_size = page_size
        self.block_size = block_size
        self._per_page = page_size // block_size
        self._pages = [Page() for _ in range(num_pages)]
        self._free = list(range(num_pages))  # a heap: running requests lie densely at the store's beginning
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._is_dense = is_dense
        self._is_compact = True
        self._index: dict[int, Block] = {}
        self._events: list[BlocksStored | BlocksRemoved] | None = None

    def __repr__(self) -> str:
        held = self.num_pages - self.num_available
        return f"KvCache({self.num_pages} pages: {held} held, {len(self._cached)} cached)"

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that no request owns: free and cached."""
        return len(self._free) + len(self._cached)

    def count_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def match(self, request: Request) -> list[Block]:
        """The longest chain of known blocks that a request's tokens begin with; it leaves one token
        to compute.

        What it found before is not looked at again: of a chain whose last block is known, all are.
        """
        if request.tap is not None and request.tap.wants_prompt:
            return []
        size, tokens, chain = self.block_size, request.tokens, request.known_blocks
        hashes = hash_blocks(request, size)
        while chain and self._index.get(chain[-1].hash) is not chain[-1]:
            chain.pop()
        for index in range(len(chain), (len(tokens) - 1) // size):
            block = self._index.get(hashes[index])
            parent = chain[-1] if chain else None
            if block is None or not block.is_made_of(parent, tokens[index * size : (index + 1) * size]):
                break
            chain.append(block)
        return chain

    def admit(self, request: Request, spare: int = 0) -> tuple[PageCopy, ...] | None:
        """Give a request pages for all its tokens, with as much KV in them as is known.

        Whole pages are shared; of one that is known in part, that part is to be copied.

        Args:
            request: Owns no pages; its `pages` and `num_computed` are set.
            spare: Pages that must be available afterwards.

        Returns:
            What the model has to copy before it writes; None, and nothing is changed, if there are
            too few pages.
        """
        chain = self.match(request)
        num_whole, num_copied = divmod(len(chain), self._per_page)
        shared = self._line(chain, num_whole)
        missing = self.count_pages(len(request.tokens)) - num_whole
        if missing + spare > self.num_available - sum(page in self._cached for page in shared):
            return None
        for page in shared:
            self._hold(page)
        request.pages = shared
        request.num_computed = len(chain) * self.block_size
        copies = self._copy(request, chain[-num_copied:]) if num_copied else ()
        for _ in range(missing - bool(num_copied)):
            self._append(request)
        return copies

    def grow(self, request: Request) -> bool:
        """Give a request one more page; False if all are held."""
        if not self.num_available:
            return False
        self._append(request)
        return True

    def complete(self, request: Request, num_computed: int) -> None:
        """A request's KV is valid up to `num_computed` tokens: its full blocks become known."""
        size = self.block_size
        first, end = request.num_computed // size, num_computed // size
        request.num_computed = num_computed
        if first < end:
            self._register(request, first, end)

    def release(self, request: Request) -> None:
        """Take a request's pages back. What they hold stays known until their places are
        needed.
        """
        for number in reversed(request.pages):
            page = self._pages[number]
            page.owners -= 1
            if page.owners:
                continue
            if page.blocks:
                self._cached[number] = None
                self._is_compact = False
            else:
                heapq.heappush(self._free, number)
        request.pages = []
        request.num_computed = 0

    def compact(self) -> tuple[PageCopy, ...]:
        """Move what is cached out of the store's beginning, where the pages that are held should
        lie densely.

        Torch's attention reads pages at a constant distance in one call. What is moved, not much
        at a time, takes the place of what is free or was used least recently.

        Returns:
            What the model has to copy before it writes.
        """
        if self._is_compact or not self._is_dense:
            return ()
        end = min(self.num_pages, self.num_pages - self.num_available + FREE_AHEAD)
        low = [number for number in range(end) if number in self._cached]
        moved: dict[int, int] = {}
        for number in low[:MOVED_AT_ONCE]:
            place = self._take_from(end)
            if place is None:
                break
            moved[number] = place
        self._is_compact = not moved
        if self._is_compact:
            return ()
        self._free += moved
        heapq.heapify(self._free)
        return self._move(moved)

    def _take_from(self, first: int) -> int | None:
        """A place from `first` on, None if what is free or oldest lies before it. It leaves no
        heap.
        """
        if self._free and (place := max(self._free)) >= first:
            self._free.remove(place)
            return place
        oldest = next(iter(self._cached))
        return self._evict() if oldest >= first else None

    def _move(self, moved: dict[int, int]) -> tuple[PageCopy, ...]:
        """Rename cached pages, by their old numbers; they keep their places in the order of
        use.
        """
        copies = []
        for number, target in moved.items():
            old, new = self._pages[number], self._pages[target]
            new.parent, new.blocks, old.blocks = old.parent, old.blocks, []
            for block in new.blocks:
                block.holders[block.holders.index(number)] = target
            copies.append(PageCopy(number, target, len(new.blocks) * self.block_size))
        self._cached = OrderedDict((moved.get(number, number), None) for number in self._cached)
        for number in self._cached:  # what follows a cached page is cached
            page = self._pages[number]
            page.parent = moved.get(page.parent, page.parent)
        return tuple(copies)

    def clear(self) -> None:
        """Forget what no request owns."""
        while self._cached:
            heapq.heappush(self._free, self._evict())

    def record_events(self) -> None:
        """Keep what becomes known and forgotten for `drain_events`, beginning with what is known
        already.

        There must be somebody who drains them.
        """
        self._events = []
        for block in self._index.values():  # a block has become known after the one before it
            _record(self._events, block)

    def drain_events(self) -> list[BlocksStored | BlocksRemoved]:
        """What has become known and forgotten since the last call, oldest first; nothing before
        `record_events`.
        """
        events = self._events or []
        if self._events is not None:
            self._events = []
        return events

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Free + cached + held is the whole store, and held is exactly what `requests` own, as
        often as they own it.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        owned = Counter(page for request in requests for page in request.pages)
        held = {number: page.owners for number, page in enumerate(self._pages) if page.owners}
        assert held == owned, f"owners are {held}, live requests own {dict(owned)}"
        everything = sorted([*self._free, *self._cached, *held])
        assert everything == list(range(self.num_pages)), f"pages leaked: {self!r}"

    def check_blocks(self) -> None:
        """What is known of blocks agrees with what the pages hold; slower than
        `check_integrity`.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        holders: dict[int, list[int]] = {}
        for number, page in enumerate(self._pages):
            assert bool(page.blocks) or number not in self._cached, f"page {number} is cached without a block"
            assert not page.blocks or number not in self._free, f"page {number} is free and holds blocks"
            assert page.owners < 2 or len(page.blocks) == self._per_page, f"page {number} is shared early"
            for index, block in enumerate(page.blocks):
                holders.setdefault(id(block), []).append(number)
                assert block.parent is self._before(page, index), f"page {number}: block {index} is misplaced"
                assert sorted(block.holders) == sorted(set(block.holders)) and number in block.holders
        known = {id(block): block for block in self._index.values()}
        assert all(block.hash == key for key, block in self._index.items())
        assert all(self._is_known(block.parent) for block in known.values()), "a block is known, the one before is not"
        assert all(sorted(block.holders) == holders.get(key) for key, block in known.items()), "a block has no page"

    def _before(self, page: Page, index: int) -> Block | None:
        if index:
            return page.blocks[index - 1]
        return self._pages[page.parent].blocks[-1] if page.parent >= 0 else None

    def _line(self, chain: list[Block], num_whole: int) -> list[int]:
        """The pages that hold the first `num_whole` whole pages of a chain, one following
        the other.
        """
        if not chain:
            return []
        number = chain[-1].holders[0]
        if len(chain) > num_whole * self._per_page:
            number = self._pages[number].parent
        line = []
        while number >= 0:
            line.append(number)
            number = self._pages[number].parent
        line.reverse()
        return line

    def _copy(self, request: Request, blocks: list[Block]) -> tuple[PageCopy, ...]:
        source = blocks[-1].holders[0]
        if source in self._cached:
            self._cached.move_to_end(source)
        target = self._append(request)  # the source itself, where it was the last one to be had
        for block in blocks:
            self._attach(block, target)
        if target == source:
            return ()
        return (PageCopy(source, target, len(blocks) * self.block_size),)

    def _hold(self, number: int) -> None:
        page = self._pages[number]
        page.owners += 1
        if page.owners == 1:
            del self._cached[number]
            self._is_compact = False

    def _append(self, request: Request) -> int:
        number = heapq.heappop(self._free) if self._free else self._evict()
        page = self._pages[number]
        page.owners = 1
        self._is_compact = False
        page.parent = request.pages[-1] if request.pages else -1
        request.pages.append(number)
        return number

    def _evict(self) -> int:
        number, _ = self._cached.popitem(last=False)
        page = self._pages[number]
        forgotten = []
        for block in page.blocks:
            block.holders.remove(number)
            if not block.holders and self._index.get(block.hash) is block:
                del self._index[block.hash]
                forgotten.append(block.hash)
        page.blocks = []
        if forgotten and self._events is not None:
            self._events.append(BlocksRemoved(tuple(forgotten)))
        return number

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

    def _is_known(self, block: Block | None) -> bool:
        return block is None or self._index.get(block.hash) is block

    def _attach(self, block: Block, number: int) -> None:
        # another block of the same hash stays the known one, and what follows this one could not be
        # found
        if not block.holders and block.hash not in self._index and self._is_known(block.parent):
            self._index[block.hash] = block
            if self._events is not None:
                _record(self._events, block)
        block.holders.append(number)
        self._pages[number].blocks.append(block)


def _record(events: list[BlocksStored | BlocksRemoved], block: Block) -> None:
    """Add a block that has become known; to the last event, if it follows that one's last block."""
    parent = block.parent.hash if block.parent else ROOT
    event = BlocksStored(parent, (block.hash,), tuple(block.tokens))
    last = events[-1] if events else None
    if isinstance(last, BlocksStored) and last.block_hashes[-1] == parent:
        hashes, tokens = last.block_hashes + event.block_hashes, last.token_ids + event.token_ids
        events[-1] = BlocksStored(last.parent_hash, hashes, tokens)
    else:
        events.append(event)
