"""The queues of the scheduler: where each request is, and what it owns there.

====================  =================  ==================================================
a request is          in                 and owns
====================  =================  ==================================================
waiting               ``waiting``        nothing; after a preemption it has generated tokens
in prefill            ``prefilling``     pages for all its tokens
decoding              ``decoding``       pages for all its tokens
pinned for transfer   ``pinned``         pages that another worker reads, or that are read into
finished or aborted   nowhere            nothing
====================  =================  ==================================================
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.plan import PageCopy, Request
from worker.engines.embedded.turns import Turns

by_arrival = attrgetter("arrival")

RUNNING_PER_SPARE = 16
"""Running requests per page that an admission leaves available, so that the next full page does not
lead to a preemption."""


class Queues:
    """Requests by state, and the moves between states that free pages.

    Args:
        cache: The bookkeeping of the KV pages.
        max_num_seqs: Rows of ``prefilling`` and ``decoding`` together at most: one for each
            request, and one for each companion.
        turns: Turns between clients, which count each arrival.
        draft_model: Draft model, which computes companions of requests that run; None for none.

    Attributes:
        waiting: Waiting queue, in order of arrival.
        prefilling: Requests in prefill, in order of arrival.
        decoding: Decode rows; the same tuple object while the rows are the same.
        pinned: Requests whose pages are pinned for transfer.
        num_preemptions: Preemptions since the start.
    """

    def __init__(self, cache: KvCache, max_num_seqs: int, turns: Turns, draft_model: DraftModel | None = None) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.turns = turns
        self.draft_model = draft_model
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: tuple[Request, ...] = ()
        self.pinned: list[Request] = []
        self.num_preemptions = 0
        self._num_arrived = 0
        self._decode_rows: tuple[Request, ...] = ()
        self._companion_rows: tuple[Request, ...] = ()
        self._decode_rows_of: tuple[Request, ...] = ()

    def __repr__(self) -> str:
        return (
            f"{len(self.waiting)} waiting, {len(self.prefilling)} in prefill, "
            f"{len(self.decoding)} decoding, {len(self.pinned)} pinned, {self.cache!r}"
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.decoding or self.prefilling or self.waiting)

    @property
    def decode_rows(self) -> tuple[Request, ...]:
        """`decoding`, then those of their companions that the model computes; the same tuple object
        while the rows are the same.
        """
        self._note_rows()
        return self._decode_rows

    @property
    def companion_rows(self) -> tuple[Request, ...]:
        """Companions of `decoding` that the draft model computes; the same tuple object, too."""
        self._note_rows()
        return self._companion_rows

    def _note_rows(self) -> None:
        if self._decode_rows_of is self.decoding:
            return
        companions = [one.companion for one in self.decoding if one.companion is not None]
        own = tuple(one for one in companions if not one.by_draft_model)
        self._decode_rows = self.decoding + own if own else self.decoding
        self._companion_rows = tuple(one for one in companions if one.by_draft_model)
        self._decode_rows_of = self.decoding

    @property
    def num_rows(self) -> int:
        """Rows that the running requests take."""
        return sum(len(one.sequences) for one in self.running)

    def has_slot(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether one more request may run, once the running ones `without` have been preempted:
        there are rows, and the draft model has pages if it computes its companion.
        """
        given_up = sum(len(one.sequences) for one in without)
        fits = self.num_rows - given_up + len(request.sequences) <= self.max_num_seqs
        return fits and self._has_draft_pages(request, without)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests in the batch: those that decode, then those in prefill."""
        return (*self.decoding, *self.prefilling)

    @property
    def live(self) -> Iterator[Request]:
        """Requests with tokens to compute: running and waiting ones."""
        return itertools.chain(self.decoding, self.prefilling, self.waiting)

    def allocate(self, request: Request) -> tuple[PageCopy, ...] | None:
        """Pages for all tokens of a request that is about to run, if some stay available for those
        that run; see `KvCache.allocate`. Pages of the draft model are given by `start_prefill`.
        """
        if not self._has_draft_pages(request):
            return None
        return self.cache.allocate(request, spare_pages(self, self.cache))

    def has_room(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether a request may run and has pages, once the running ones `without` have been
        preempted.
        """
        spare = spare_pages(self, self.cache, without)
        return self.has_slot(request, without) and self.cache.has_room(request, spare, without)

    def _has_draft_pages(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether the draft model has pages for the companion that it computes for a request."""
        if self.draft_model is None or request.companion is None or not request.companion.by_draft_model:
            return True
        cache = self.draft_model.cache
        return cache.has_room(request, spare_pages(self, cache, without), without)

    def arrive(self, request: Request) -> None:
        """Number a request in order of arrival, unless it has a number."""
        if request.arrival < 0:
            self.turns.arrived(request)
            for one in request.sequences:
                one.arrival = self._num_arrived
            self._num_arrived += 1

    def add(self, request: Request) -> None:
        """Queue a request in order of arrival; its longest answer must fit into the store."""
        longest = self.cache.count_longest(request)
        assert longest <= self.cache.num_pages, f"{request.id} may take {longest} pages: {self!r}"
        self.arrive(request)
        insort(self.waiting, request, key=by_arrival)

    def start_prefill(self, request: Request) -> None:
        """Add a request that owns pages for all its tokens to those in prefill.

        A companion that the draft model computes gets its pages here, where the request has rows.
        """
        if self.draft_model is not None:
            self.draft_model.allocate(request)
        self.prefilling.append(request)
        self.prefilling.sort(key=by_arrival)

    def preempt(self, request: Request) -> None:
        """Move a running request to the waiting queue, between steps; its KV is recomputed."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Free a running request's pages and let it wait; blocks that stay cached are its hit."""
        self.release([request])
        insort(self.waiting, request, key=by_arrival)

    def cache_of(self, sequence: Request) -> KvCache:
        """The pages that hold the KV of a request's own sequence, or of a companion."""
        if not sequence.by_draft_model:
            return self.cache
        assert self.draft_model is not None
        return self.draft_model.cache

    def release(self, requests: Sequence[Request]) -> None:
        """Take requests out of the batch, and free their pages but for those that are pinned."""
        gone = set(map(id, requests))
        self.decoding = tuple(request for request in self.decoding if id(request) not in gone)
        self.prefilling = [request for request in self.prefilling if id(request) not in gone]
        for request in requests:
            if request not in self.pinned:
                self.cache.free(request)
            if self.draft_model is not None:
                self.draft_model.cache.free(request)


def spare_pages(queues: Queues, cache: KvCache, without: Sequence[Request] = ()) -> int:
    """Pages that an admission must leave available: running requests will need them soon.

    Args:
        queues: The scheduler's queues.
        cache: The model's pages, or the draft model's.
        without: Running requests that will have been preempted by then.
    """
    gone = set(map(id, without))
    running = [one for one in queues.running if id(one) not in gone and cache.count_owned(one)]
    growth = sum(cache.count_longest(one) - cache.count_owned(one) for one in running)
    return min(growth, -(-len(running) // RUNNING_PER_SPARE))
