"""The paged KV cache's bookkeeping: which request owns which pages; automatic prefix caching.

A page holds the KV of consecutive tokens of one sequence. Full pages are shared by the requests
whose tokens begin with what they hold; a request writes only into its last page, which it owns
alone. Pages that no request owns stay cached until they are needed, and are evicted least recently
used first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set

from worker.engines.embedded.blocks import Block
from worker.engines.embedded.kv_cache.block_events import BlockEvents, BlocksRemoved, BlocksStored
from worker.engines.embedded.kv_cache.page_pool import PagePool
from worker.engines.embedded.kv_cache.prefix_index import PrefixIndex
from worker.engines.embedded.plan import PageCopy, Request


class KvCache:
    """Page tables of requests, over a pool of pages and an index of the blocks that they hold.

    Pure bookkeeping, one thread. A request's pages are freed last one first, and shared together: a
    page is therefore never evicted before those that follow it in a sequence.

    Args:
        num_pages: Pages in the store.
        page_size: Tokens per page, a multiple of `block_size`.
        block_size: Tokens per block.
        is_dense: Whether `compact` keeps the owned pages together.
        of_draft_model: Whether the pages hold KV of the draft model: of a request and its companion
            those are concerned that are computed by the model of the pages.
    """

    def __init__(
        self, num_pages: int, page_size: int, block_size: int, *, is_dense: bool = True, of_draft_model: bool = False
    ) -> None:
        assert page_size % block_size == 0, f"a page of {page_size} tokens does not hold whole blocks"
        self.num_pages = num_pages
        self.page_size = page_size
        self.block_size = block_size
        self._per_page = page_size // block_size
        self._is_dense = is_dense
        self._of_draft_model = of_draft_model
        self._pool = PagePool(num_pages)
        self._index = PrefixIndex(num_pages, page_size, block_size)

    def __repr__(self) -> str:
        owned = self.num_pages - self.num_available
        return f"KvCache({self.num_pages} pages: {owned} owned, {len(self._pool.cached)} cached)"

    @property
    def num_available(self) -> int:
        """Pages that no request owns: free and cached."""
        return self._pool.num_available

    @property
    def num_used_blocks(self) -> int:
        """Blocks in pages that requests own; those that are only cached are not counted.

        May be read by any thread.
        """
        return (self.num_pages - self.num_available) * self._per_page

    @property
    def num_blocks(self) -> int:
        """Blocks in all pages."""
        return self.num_pages * self._per_page

    def count_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def count_longest(self, request: Request) -> int:
        """Pages that a request and its companion take at most."""
        return sum(self.count_pages(one.limit) for one in self._kept(request))

    def count_owned(self, request: Request) -> int:
        """Pages that a request and its companion have, shared ones too."""
        return sum(len(one.pages) for one in self._kept(request))

    def _kept(self, request: Request) -> Iterator[Request]:
        """The sequences of a request whose KV is in these pages."""
        return (one for one in request.sequences if one.by_draft_model == self._of_draft_model)

    def match_prefix(self, request: Request) -> list[Block]:
        """The prefix hit of a request; see `PrefixIndex.match`."""
        return self._index.match(request)

    def allocate(self, request: Request, spare: int = 0) -> tuple[PageCopy, ...] | None:
        """Give a request and its companion pages for all their tokens, with their prefix hits.

        Whole cached pages are shared. A partly cached one is copied on write: the sequence gets a
        page of its own, and the cached blocks are to be copied into it.

        Args:
            request: Owns no pages; its `pages` and `num_computed` are set.
            spare: Pages that must be available afterwards.

        Returns:
            Copies within the store to carry out before the step writes; None, and nothing is
            changed, if there are too few pages.
        """
        if not self.has_room(request, spare):
            return None
        return tuple(copy for sequence in self._kept(request) for copy in self._allocate(sequence))

    def _allocate(self, sequence: Request) -> tuple[PageCopy, ...]:
        chain = self._index.match(sequence)
        shared = self._index.full_pages(chain)
        for page in shared:
            self._pool.share(page)
        sequence.pages = shared
        sequence.num_computed = len(chain) * self.block_size
        num_copied = len(chain) % self._per_page
        copies = self._copy_on_write(sequence, chain[-num_copied:]) if num_copied else ()
        for _ in range(self.count_pages(len(sequence.tokens)) - len(sequence.pages)):
            self._append(sequence)
        return copies

    def has_room(self, request: Request, spare: int = 0, without: Sequence[Request] = ()) -> bool:
        """Whether `allocate` would give a request its pages.

        Args:
            request: Owns no pages.
            spare: Pages that must be available afterwards.
            without: Requests whose pages will have been freed by then.
        """
        freed = self._freed_with(without) if without else set[int]()
        missing = sum(self._count_missing(sequence, freed) for sequence in self._kept(request))
        return missing + spare <= self._pool.num_available + len(freed)

    def _freed_with(self, requests: Sequence[Request]) -> set[int]:
        """Pages that nobody owns once the pages of `requests` have been freed."""
        owned = Counter(page for one in requests for sequence in self._kept(one) for page in sequence.pages)
        return {page for page, count in owned.items() if count == self._pool.ref_counts[page]}

    def _count_missing(self, sequence: Request, freed: Set[int]) -> int:
        """Available pages that a sequence takes: all but the owned ones that it shares."""
        shared = self._index.full_pages(self._index.match(sequence))
        kept = sum(page not in self._pool.cached and page not in freed for page in shared)
        return self.count_pages(len(sequence.tokens)) - kept

    def append_page(self, request: Request) -> bool:
        """Give a request one more page; False if requests own all of them."""
        if not self._pool.num_available:
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
            self._index.register(request, first, end)

    def withdraw(self, request: Request, num_tokens: int) -> None:
        """The KV of a request's first `num_tokens` tokens alone is sound: blocks that hold later
        ones, which no other request has been given yet, are no longer cached.
        """
        self._index.withdraw(request.pages, num_tokens // self.block_size)

    def trim(self, request: Request) -> None:
        """Free the pages behind a request's computed tokens: they hold rejected drafts."""
        while len(request.pages) > self.count_pages(request.num_computed):
            number = request.pages.pop()
            assert not self._index.count_blocks(number), f"page {number} holds more than a draft"
            self._pool.release(number, holds_blocks=False)

    def free(self, request: Request) -> None:
        """Free the pages of a request and its companion; their blocks stay cached until the pages
        are needed.
        """
        for one in self._kept(request):
            for number in reversed(one.pages):
                self._pool.release(number, holds_blocks=self._index.count_blocks(number) > 0)
            one.pages = []
            one.num_computed = 0

    def compact(self) -> tuple[PageCopy, ...]:
        """Move a few cached pages out of the store's beginning; see `PagePool.compact`.

        Torch reads pages at a constant distance from one another in one call, and so needs fewer
        calls for dense ones.

        Returns:
            Copies within the store to carry out before the step writes.
        """
        moved = self._pool.compact() if self._is_dense else {}
        return self._index.move(moved, self._pool.cached) if moved else ()

    def clear(self) -> None:
        """Evict every cached page."""
        for number in self._pool.evict_all():
            self._index.withdraw([number], 0)

    def record_events(self) -> None:
        """Record cached and evicted blocks for `drain_events`, those cached by now first.

        From then on they must be drained.
        """
        self._index.events = BlockEvents(self._index.blocks.values())

    def drain_events(self) -> list[BlocksStored | BlocksRemoved]:
        """Blocks cached and evicted since the last call, in order; none before `record_events`."""
        return [] if self._index.events is None else self._index.events.drain()

    def check_integrity(self, requests: Iterable[Request], *, whole: bool = True) -> None:
        """Free + cached + owned is the whole store, and reference counts agree with `requests`.

        Args:
            requests: Owners of pages.
            whole: Look at every page; else mostly at their numbers, see `PagePool.check_counts`.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        owners = Counter(page for request in requests for page in request.pages)
        if whole:
            self._pool.check_integrity(owners)
        else:
            self._pool.check_counts(owners)

    def check_blocks(self) -> None:
        """The index of blocks agrees with what the pages hold; slower than `check_integrity`.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        self._index.check_integrity()
        for number in range(self.num_pages):
            num_blocks = self._index.count_blocks(number)
            assert num_blocks or number not in self._pool.cached, f"page {number} is cached without a block"
            assert not num_blocks or number not in self._pool.free, f"page {number} is free and holds blocks"
            is_shared = self._pool.ref_counts[number] > 1
            assert not is_shared or num_blocks in (0, self._per_page), f"page {number} is shared early"  # 0: withdrawn

    def _copy_on_write(self, request: Request, blocks: list[Block]) -> tuple[PageCopy, ...]:
        source = blocks[-1].pages[0]
        self._pool.touch(source)
        target = self._append(request)  # the source itself, where it was the only page left
        for block in blocks:
            self._index.attach(block, target)
        return (PageCopy(source, target, len(blocks) * self.block_size),)

    def _append(self, request: Request) -> int:
        number = self._pool.take()
        self._index.begin_page(number, request.pages[-1] if request.pages else -1)
        request.pages.append(number)
        return number
