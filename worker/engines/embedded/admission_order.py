"""Admission: which waiting requests join the batch, clients in turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from worker.engines import QueueTimes
from worker.engines.embedded.pinned import PinnedRequests
from worker.engines.embedded.plan import PageCopy, Request
from worker.engines.embedded.prompt_chunks import fair_chunk, remaining
from worker.engines.embedded.queues import Queues
from worker.engines.embedded.turns import counts_of, last_of_largest_client


class Admission:
    """Moves waiting requests into prefill while slots, pages and token budget last.

    Args:
        queues: The scheduler's queues.
        transfers: KV transfers, which are served in one order of arrival with the waiting queue.
    """

    def __init__(self, queues: Queues, transfers: PinnedRequests) -> None:
        self._queues = queues
        self._cache = queues.cache
        self._transfers = transfers

    def admit(self, budget: int, *, only_starved: bool) -> tuple[PageCopy, ...]:
        """Admit waiting requests, clients in turn; returns what must be copied in the store.

        A request that has its turn and gets no pages is passed by as many of other clients as may
        run, and no more.

        Args:
            budget: Prompt tokens of the next step.
            only_starved: Whether only clients without a running request are served.
        """
        queues = self._queues
        order = queues.turns.order(queues.waiting)
        copies = self._admit_starved(order)
        if only_starved:
            return tuple(copies)
        slots = queues.max_num_seqs - queues.num_rows - self._transfers.num_kept_rows
        if slots <= 0 or not order:  # what follows looks at every block of the prompts
            return tuple(copies)
        fair = fair_chunk(budget)
        reserved = sum(min(fair, remaining(request)) for request in queues.prefilling)
        prefilling = counts_of(queues.prefilling)
        pending = self._pending(queues.prefilling)
        blocked: dict[str | None, Request] = {}  # the next request of each client that gets no pages
        for request in order:
            if slots <= 0:
                break
            if request.client in blocked:
                continue
            slots -= len(request.sequences)  # one that is skipped keeps its slot free
            if slots < 0:
                break
            if reserved >= budget and prefilling[request.client]:
                continue  # a client's first prompt need not wait for the end of others'
            if request.pages or not self._may_begin(request, pending):
                continue
            copied = queues.allocate(request)
            if copied is None:
                if request.num_passed >= queues.max_num_seqs:
                    break
                blocked[request.client] = request
                continue
            copies += copied
            self._begin(request)
            pending |= self._pending([request])
            prefilling[request.client] += 1
            reserved += min(fair, remaining(request))
            for one in blocked.values():
                one.num_passed += 1
            if any(one.num_passed >= queues.max_num_seqs for one in blocked.values()):
                break
        return tuple(copies)

    def _admit_starved(self, order: Sequence[Request]) -> list[PageCopy]:
        """Make room, where slots or pages are missing, for one request of each client that has none
        running. The client that has most of them gives up its last one, and never its only one.

        A client's next request is looked at; those behind it do not pass it.
        """
        copies: list[PageCopy] = []
        running = counts_of(self._queues.running)
        if max(running.values(), default=0) < 2:
            return copies
        looked_at: set[str | None] = set()
        pending, may_go = set[int](), list[Request]()
        is_known = False  # both, of the requests that run now
        for request in order:
            if running[request.client] or request.client in looked_at:
                continue
            looked_at.add(request.client)
            if not is_known:
                pending, may_go = self._pending(self._queues.prefilling), self._may_go()
                is_known = True
            if not self._may_begin(request, pending):
                continue
            victims = self._victims(request, may_go)
            if not victims:
                continue  # it has its turn without a preemption, or none would help
            for victim in victims:
                self._queues.preempt(victim)
                self._queues.turns.give_way(victim)
                running[victim.client] -= 1
            copied = self._queues.allocate(request)
            assert copied is not None, f"there was room for {request.id}: {self._queues!r}"
            copies += copied
            self._begin(request)
            running[request.client] += 1
            is_known = False
            if max(running.values()) < 2:
                break
        return copies

    def _may_go(self) -> list[Request]:
        """Running requests that may be preempted for a starved client, one after the other the last
        of the client that has most, and nobody's only one.
        """
        running, found = list(self._queues.running), list[Request]()
        while running and counts_of(running)[(one := last_of_largest_client(running)).client] > 1:
            running.remove(one)
            found.append(one)
        return found

    def _victims(self, request: Request, may_go: Sequence[Request]) -> Sequence[Request]:
        """The first of `may_go` whose preemption makes room for one more; none if there is room, or
        if all are not enough.
        """
        has_room = self._queues.has_room
        if not has_room(request, may_go):
            return ()
        return next(may_go[:count] for count in range(len(may_go) + 1) if has_room(request, may_go[:count]))

    def _may_begin(self, request: Request, pending: set[int]) -> bool:
        """Whether neither a transfer that came before nor a prefix hit is to be waited for."""
        return not self._transfers.blocks(request) and not (pending and self._awaits_prefix(request, pending))

    def _begin(self, request: Request) -> None:
        self._queues.waiting.remove(request)
        self._queues.turns.admit(request)
        self._queues.start_prefill(request)
        request.num_passed = 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
        elif len(request.tokens) == request.prompt_length:  # what it was given before may be gone
            request.num_cached_tokens = min(request.num_cached_tokens, request.num_computed)
        if request.queue_times is None:
            now_s = time.monotonic()
            request.queue_times = QueueTimes(now_s, now_s)

    def _pending(self, requests: Iterable[Request]) -> set[int]:
        """Hashes of the blocks that `requests` are about to compute, and to cache."""
        size, sound = self._cache.block_size, (one for one in requests if not one.is_spoiled)
        return {each for one in sound for each in one.hash_blocks(size)[one.num_computed // size :]}

    def _awaits_prefix(self, request: Request, pending: set[int]) -> bool:
        """Whether more than half of what a request has to compute is about to be cached.

        It then waits for that prefix hit: n choices of one prompt compute the prompt once. What it
        computes in any case, for the logits, is not waited for.
        """
        size, hashes = self._cache.block_size, request.block_hashes
        first = len(self._cache.match_prefix(request))
        last = first + (len(request.tokens) - first * size) // (2 * size)  # of as few blocks as are more than half
        # with the last one those between are pending
        return last < request.num_reusable // size and hashes[first] in pending and hashes[last] in pending
