"""The index of automatic prefix caching: cached blocks by hash, and the pages that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from worker.engines.embedded.blocks import Block
from worker.engines.embedded.kv_cache.block_events import BlockEvents
from worker.engines.embedded.plan import PageCopy, Request


@dataclass(eq=False, slots=True)
class Page:
    """Content of one page.

    Attributes:
        parent: The page before it in the sequence, -1 for the first.
        blocks: Full blocks in it whose KV has been computed, in order.
    """

    parent: int = -1
    blocks: list[Block] = field(default_factory=list)


class PrefixIndex:
    """Blocks by hash. A block is cached only as long as the one before it is.

    The first block of a hash is cached; another one of that hash is not, and so neither is what
    follows it.

    Args:
        num_pages: Pages in the store.
        page_size: Tokens per page.
        block_size: Tokens per block.

    Attributes:
        blocks: The cached blocks by hash, a parent before its children.
        events: Record of cached and evicted blocks, None while it is not read.
    """

    def __init__(self, num_pages: int, page_size: int, block_size: int) -> None:
        self.events: BlockEvents | None = None
        self._block_size = block_size
        self._per_page = page_size // block_size
        self._pages = [Page() for _ in range(num_pages)]
        self.blocks: dict[int, Block] = {}

    def match(self, request: Request) -> list[Block]:
        """The prefix hit: the longest chain of cached blocks that a request's tokens begin with.

        At least one token is left to compute, for its logits; more where a tap wants theirs. The
        hit of the last call is extended and not looked up again: of a chain whose last block is
        cached, every block is. It may be too long by now, if the request was rewound.
        """
        size, tokens, chain = self._block_size, request.tokens, request.cached_blocks
        num_wanted = request.num_reusable // size
        hashes = request.hash_blocks(size)
        del chain[num_wanted:]
        while chain and self.blocks.get(chain[-1].hash) is not chain[-1]:
            chain.pop()
        for index in range(len(chain), num_wanted):
            block = self.blocks.get(hashes[index])
            parent = chain[-1] if chain else None
            if block is None or not block.is_made_of(parent, tokens[index * size : (index + 1) * size]):
                break
            chain.append(block)
        return chain

    def full_pages(self, chain: list[Block]) -> list[int]:
        """The pages that a chain of cached blocks fills, in order."""
        if not chain:
            return []
        number = chain[-1].pages[0]
        if len(chain) % self._per_page:
            number = self._pages[number].parent
        found = []
        while number >= 0:
            found.append(number)
            number = self._pages[number].parent
        found.reverse()
        return found

    def count_blocks(self, page: int) -> int:
        """Full blocks that a page holds, whose KV has been computed."""
        return len(self._pages[page].blocks)

    def begin_page(self, page: int, parent: int) -> None:
        """Empty a page that was evicted or free; `parent` comes before it, -1 for none."""
        if self._pages[page].blocks:
            self.withdraw([page], 0)
        self._pages[page].parent = parent

    def register(self, request: Request, first: int, end: int) -> None:
        """Add the blocks ``[first, end)`` of a request, whose KV has been computed."""
        size = self._block_size
        hashes, pages = request.hash_blocks(size), request.pages
        parent, lora_name = None, request.adapter.name if request.adapter is not None else None
        if first:
            parent = self._pages[pages[(first - 1) // self._per_page]].blocks[(first - 1) % self._per_page]
        for index in range(first, end):
            tokens = request.tokens[index * size : (index + 1) * size]
            block = self.blocks.get(hashes[index])
            if block is None or not block.is_made_of(parent, tokens):
                block = Block(hashes[index], parent, tokens, lora_name=lora_name, cache_salt=request.cache_salt)
            self.attach(block, pages[index // self._per_page])
            parent = block

    def attach(self, block: Block, page: int) -> None:
        """Add a block to a page, behind those that it holds."""
        if block.hash not in self.blocks and self._is_cached(block.parent):
            self.blocks[block.hash] = block
            if self.events is not None:
                self.events.add_stored(block)
        block.pages.append(page)
        self._pages[page].blocks.append(block)

    def withdraw(self, pages: Iterable[int], num_blocks: int) -> None:
        """Remove the blocks in consecutive pages of a sequence, but for the first `num_blocks`."""
        removed: list[int] = []
        for index, number in enumerate(pages):
            removed += self._detach(number, max(0, num_blocks - index * self._per_page))
        if removed and self.events is not None:
            self.events.add_removed(removed)

    def move(self, moved: Mapping[int, int], cached: Iterable[int]) -> tuple[PageCopy, ...]:
        """Move blocks between pages, from old to new number; returns what must be copied.

        Args:
            moved: New number by old number.
            cached: All cached pages by their new numbers: what follows a cached page is cached.
        """
        copies = []
        for number in moved.values():
            self.withdraw([number], 0)
        for number, target in moved.items():
            old, new = self._pages[number], self._pages[target]
            new.parent, new.blocks, old.blocks = old.parent, old.blocks, []
            for block in new.blocks:
                block.pages[block.pages.index(number)] = target
            copies.append(PageCopy(number, target, len(new.blocks) * self._block_size))
        for number in cached:
            page = self._pages[number]
            page.parent = moved.get(page.parent, page.parent)
        return tuple(copies)

    def check_integrity(self) -> None:
        """The index agrees with what the pages hold. Raises `AssertionError`."""
        pages: dict[int, list[int]] = {}
        for number, page in enumerate(self._pages):
            before = self._pages[page.parent].blocks[-1] if page.blocks and page.parent >= 0 else None
            for block in page.blocks:
                pages.setdefault(id(block), []).append(number)
                assert block.parent is before, f"page {number}: a block is misplaced"
                assert sorted(block.pages) == sorted(set(block.pages)) and number in block.pages
                before = block
        cached = {id(block): block for block in self.blocks.values()}
        assert all(block.hash == key for key, block in self.blocks.items())
        assert all(self._is_cached(block.parent) for block in cached.values()), "a block is cached, its parent is not"
        assert all(sorted(block.pages) == pages.get(key) for key, block in cached.items()), "a block has no page"

    def _detach(self, page: int, num_kept: int) -> list[int]:
        """Take a page's blocks from it, but for the first `num_kept`; the hashes of those that no
        page holds any more."""
        removed, blocks = [], self._pages[page].blocks
        for block in blocks[num_kept:]:
            block.pages.remove(page)
            if not block.pages and self.blocks.get(block.hash) is block:
                del self.blocks[block.hash]
                removed.append(block.hash)
        del blocks[num_kept:]
        return removed

    def _is_cached(self, block: Block | None) -> bool:
        return block is None or self.blocks.get(block.hash) is block
