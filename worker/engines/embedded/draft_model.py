"""The draft model, a smaller one of the same vocabulary: drafts tokens and computes companions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakSet

import torch

from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.plan import Model, PageCopy, Plan, Request


class DraftModel:
    """A draft model and the pages of its KV cache.

    A running request has tokens drafted or a companion, so that there are pages for as many tokens
    as the target's KV cache holds, and for one longest companion beside: drafts never keep all of
    them. There are no more than all longest sequences take.

    Args:
        model: Model with the target's vocabulary.
        num_drafted: Requests that it drafts for at a time.
        num_companions: Companions that it computes at a time.
        context_length: Longest sequence of the target, in tokens.
        page_size: Tokens per page, a multiple of `block_size`.
        block_size: Tokens per KV block.
        num_tokens: Tokens of the target's KV cache; None for pages of all longest sequences.

    Attributes:
        model: The same.
        context_length: Longest sequence, in tokens.
        cache: Pages of sequences that it computes (`Request.by_draft_model`).
    """

    def __init__(
        self,
        model: Model,
        *,
        num_drafted: int = 0,
        num_companions: int = 0,
        context_length: int,
        page_size: int,
        block_size: int,
        num_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.context_length = min(context_length, model.context_length)
        longest = -(-self.context_length // page_size)
        num_pages = max(1, num_drafted + num_companions) * longest
        kept = longest if num_companions else 0
        if num_tokens is not None:
            num_pages = max(longest, min(num_pages, -(-num_tokens // page_size) + kept))
        model.allocate_kv(num_pages, page_size)
        self.cache = KvCache(num_pages, page_size, block_size, is_dense=False, of_draft_model=True)
        self._max_drafted_pages = min(num_drafted * longest, num_pages - kept)
        self._drafted: WeakSet[Request] = WeakSet()
        self._ended: deque[Request] = deque()  # drafts whose pages are to be freed
        self._copies: list[PageCopy] = []

    def begin_draft(self, request: Request) -> Request:
        """An empty sequence in which tokens of a request are drafted, until `end_draft`."""
        plain = replace(request, chain=None, tap=None, adapter=None, companion=None, by_draft_model=True)
        own = replace(plain, tokens=[], pages=[], num_computed=0, block_hashes=[], cached_blocks=[])
        self._drafted.add(own)
        return own

    def end_draft(self, sequence: Request) -> None:
        """Let the pages of a sequence of `begin_draft` be freed by `free_ended`.

        May be called in any thread: a request's consumer may be the last one that has the request,
        and the pages are those of the thread that computes.
        """
        self._ended.append(sequence)

    def free_ended(self) -> None:
        """Free the pages of drafts that have ended, before any are counted or taken."""
        while self._ended:
            self.cache.free(self._ended.popleft())

    def append_draft_page(self, sequence: Request) -> bool:
        """Give a sequence of `begin_draft` one more page; False if those have all of theirs."""
        self.free_ended()
        owned = sum(len(one.pages) for one in self._drafted)
        return owned < self._max_drafted_pages and self.cache.append_page(sequence)

    def allocate(self, request: Request) -> None:
        """Give a running request's companion pages for all its tokens, with its prefix hit; there
        are that many.
        """
        copies = self.cache.allocate(request)
        assert copies is not None, f"{request.id}: the draft model has too few pages: {self.cache!r}"
        self._copies += copies

    def drop_drafts(self) -> None:
        """Free the pages of all drafts, which compute their KV again."""
        self.free_ended()
        for one in self._drafted:
            self.cache.free(one)

    def clear(self) -> None:
        """Evict every cached page; no companion owns one. Copies that no step has carried out were
        for those that did.
        """
        self.free_ended()
        self.cache.clear()
        self._copies.clear()

    def forward(self, plan: Plan) -> torch.Tensor:
        """See `Model.forward`."""
        copies, self._copies = tuple(self._copies), []
        return self.model.forward(replace(plan, copies=copies) if copies else plan)

    def check_integrity(self, companions: Iterable[Request], *, whole: bool = True) -> None:
        """The pages are owned by `companions` and by drafts; see `KvCache.check_integrity`."""
        self.free_ended()
        self.cache.check_integrity([*companions, *self._drafted], whole=whole)
