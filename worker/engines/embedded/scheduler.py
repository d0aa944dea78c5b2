"""Continuous batching with chunked prefill: which tokens a step computes, in a token budget."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from worker.engines import QueueTimes
from worker.engines.embedded.advance import advance
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.plan import TILE, Chunk, Output, PageCopy, Plan, Request, Samples
from worker.engines.embedded.turns import Turns, counts_of

FAIR_CHUNK = 128
"""Tokens of each prompt that a step computes before any prompt gets more; a quarter of the token
budget at most. So short prompts do not wait for the end of a long one.
"""

SHARED_CHUNKS = 2
"""Prompt tokens of a step while several clients share the engine, in units of ``max_mixed_chunk``.
"""

FEW_ROWS = 16
"""Below this number of decode rows, a step is so short that ``max_mixed_chunk`` prompt tokens take
longer than two steps without them.
"""

LONG_CONTEXT = 1024
"""Position at which attention over the tokens before it makes a prompt token of a small model half
as expensive again.
"""

RUNNING_PER_SPARE = 16
"""Running requests per page that an admission leaves available, so that the next full page does not
lead to a preemption."""


class Scheduler:
    """Clients in turn, first come, first served; preemption by recomputation. Pure bookkeeping,
    one thread.

    Where pages run out, the last request of the client that has most of them running goes back to
    the waiting queue; so it does where slots are taken, and another client has none. Only the
    scheduler edits its queues; see `worker.engines.embedded.transfer.connector` for what pins.

    ====================  =================  ==================================================
    a request is          in                 and owns
    ====================  =================  ==================================================
    waiting               ``waiting``        nothing; after a preemption it has generated tokens
    in prefill            ``prefilling``     pages for all its tokens
    decoding              ``decoding``       pages for all its tokens
    pinned for transfer   ``pinned``         pages that another worker reads, or that are read into
    finished or aborted   nowhere            nothing
    ====================  =================  ==================================================

    Args:
        cache: The bookkeeping of the KV pages.
        max_num_seqs: Requests in ``prefilling`` and ``decoding`` together at most.
        max_num_batched_tokens: Tokens in one plan at most; at least `max_num_seqs`.
        max_mixed_chunk: Prompt tokens per prompt in a mixed batch, one that decodes too; None for
            no limit. It bounds the time between two tokens of the decoding requests; see
            `_prompt_budget`.
        turns: Between clients.
    """

    def __init__(
        self,
        cache: KvCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_mixed_chunk: int | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self.max_mixed_chunk = max_mixed_chunk
        self.waiting: deque[Request] = deque()  # in order of arrival
        self.prefilling: list[Request] = []
        self.decoding: tuple[Request, ...] = ()
        self.pinned: list[Request] = []
        self._blocked_transfer: Request | None = None  # nobody who arrived after it is admitted
        self._num_arrived = 0
        self._turns = turns or Turns()
        self._passed: Request | None = None  # the request that had its turn and got no pages
        self._num_passed = 0  # admissions of other clients' requests meanwhile

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.waiting)} waiting, {len(self.prefilling)} in prefill, "
            f"{len(self.decoding)} decoding, {len(self.pinned)} pinned, {self.cache!r})"
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.decoding or self.prefilling or self.waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return bool(self.prefilling or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request in order of arrival; its longest answer must fit into the store."""
        longest = self.cache.count_pages(request.limit)
        assert longest <= self.cache.num_pages, f"{request.id} may take {longest} pages: {self!r}"
        self.arrive(request)
        self._enqueue(request)

    def arrive(self, request: Request) -> None:
        """Number a request in order of arrival, unless it has a number."""
        if request.arrival < 0:
            self._turns.arrived(request)
            request.arrival = self._num_arrived
            self._num_arrived += 1

    def abort(self, request_id: str) -> Output | None:
        """Drop a request and free its pages, between steps; None if it is in no queue."""
        for request in (*self.decoding, *self.prefilling, *self.waiting):
            if request.id == request_id:
                self._remove(request)
                return Output(request_id, finish_reason="cancelled", chain=request.chain)
        return None

    def preempt(self, request: Request) -> None:
        """Move a running request to the waiting queue, between steps; its KV is recomputed."""
        self._release([request])
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        index = len(self.waiting)
        while index and self.waiting[index - 1].arrival > request.arrival:
            index -= 1
        self.waiting.insert(index, request)

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the store in pages that requests own. May be read by any thread."""
        return self.cache.num_used_blocks

    @property
    def has_slot(self) -> bool:
        """Whether one more request may run."""
        return len(self.decoding) + len(self.prefilling) < self.max_num_seqs

    def pin(self, request: Request) -> tuple[PageCopy, ...] | None:
        """Allocate pages for all tokens of a request that has arrived, and pin them for transfer.

        Transfers and the waiting queue are served in one order of arrival. Where only pages are
        missing, nobody who arrived later is admitted until `pin` or `unblock` is called again.

        Returns:
            What must be copied in the store before anything is written; None if there are too few
            pages, or a request that arrived earlier is waiting.
        """
        self._blocked_transfer = None
        if self.waiting and self.waiting[0].arrival < request.arrival:
            return None
        copies = self.cache.allocate(request, self._spare())
        if copies is None:
            self._blocked_transfer = request
            return None
        request.num_cached_tokens = request.num_computed
        now_s = time.monotonic()
        request.queue_times = QueueTimes(now_s, now_s)
        self.pinned.append(request)
        return copies

    def unblock(self, request: Request) -> None:
        """`pin` will not be called for this request again."""
        if self._blocked_transfer is request:
            self._blocked_transfer = None

    def complete_transfer(self, request: Request, num_computed: int) -> None:
        """The KV of the first `num_computed` tokens of a pinned request has been received."""
        self.cache.complete(request, num_computed)

    def resume(self, request: Request) -> None:
        """Move a pinned request into prefill; there must be a slot."""
        self.pinned.remove(request)
        if request.queue_times is not None:
            request.queue_times = QueueTimes(request.queue_times.allocated_s, time.monotonic())
        self._join(request)

    def unpin(self, request: Request) -> None:
        """Free the pages of a pinned request."""
        self.pinned.remove(request)
        self.cache.free(request)

    def detach_pages(self, request: Request) -> Request:
        """Take a pinned request's pages from it, for as long as something may still write there.

        Returns:
            A stand-in that owns them; they stay pinned until `unpin` is called for it.
        """
        stand_in = replace(request, chain=None)
        self.pinned[self.pinned.index(request)] = stand_in
        request.pages, request.num_computed = [], 0
        return stand_in

    def schedule(self, prompts_first: bool = False) -> Plan:
        """Plan the next step; admits waiting requests while slots, pages and token budget last.

        Args:
            prompts_first: Leave out the decoding requests if there are prompt tokens to compute.
        """
        fits = self._append_pages()
        budget = self._prompt_budget()
        copies: tuple[PageCopy, ...] = self._admit(budget, only_starved=not fits) if self.waiting else ()
        chunks = self._cut(budget) if self.prefilling else ()
        ended = tuple(chunk.request for chunk in chunks if chunk.is_last)
        decode = () if prompts_first and chunks else self.decoding
        if decode:
            copies += self.cache.compact()
        return Plan(decode, chunks, decode + ended if ended else decode, copies)

    def add_drafts(self, plan: Plan, drafts: Sequence[Sequence[int]]) -> Plan:
        """`plan` with `drafts` behind its decode rows, one each, cut to what may be computed.

        That is the token budget, the rest of the answer but its last token, and the pages that
        nobody owns: a draft preempts nobody. Nothing is drafted from an end token on.
        """
        left = self.max_num_batched_tokens - plan.num_tokens
        cut: list[tuple[int, ...]] = []
        for request, draft in zip(plan.decode, drafts, strict=True):
            length = next((index for index, token in enumerate(draft) if token in request.end_ids), len(draft))
            wanted = min(length, left, request.limit - len(request.tokens) - 1)
            cut.append(tuple(draft[: self._reserve(request, wanted)]))
            left -= len(cut[-1])
        return replace(plan, drafts=tuple(cut)) if any(cut) else plan

    def _reserve(self, request: Request, count: int) -> int:
        """Give a request pages for `count` drafted tokens; returns for how many there are."""
        size = self.cache.page_size
        while len(request.pages) * size < len(request.tokens) + count and self.cache.append_page(request):
            pass
        return max(0, min(count, len(request.pages) * size - len(request.tokens)))

    def roll_back(self, plan: Plan) -> None:
        """Free the pages that hold nothing but rejected drafts of a committed step."""
        for request, draft in zip(plan.decode, plan.drafts, strict=False):
            if draft and request.pages:
                self.cache.trim(request)

    def settle(self, plan: Plan) -> None:
        """Take over the KV that the step computes; its sampled tokens may still be on their way."""
        for request in plan.decode:
            self.cache.complete(request, request.num_computed + 1)
        for chunk in plan.chunks:
            self.cache.complete(chunk.request, chunk.stop)
        if plan.sampled is not plan.decode:
            self.decoding = plan.sampled if plan.decode else self.decoding + plan.sampled
            self.prefilling = [one for one in self.prefilling if one.num_computed < len(one.tokens)]

    def spoil(self, plan: Plan, spoiled: Sequence[Request]) -> None:
        """Set requests of a settled step without drafts apart, whose KV `Model.spoiled` tells of.

        What earlier steps computed of them is sound.
        """
        starts = {id(chunk.request): chunk.start for chunk in plan.chunks}
        for request in spoiled:
            request.is_spoiled = True
            self.cache.withdraw(request, starts.get(id(request), request.num_computed - 1))

    def commit(self, plan: Plan, samples: Samples) -> list[Output]:
        """Take over the sampled tokens of a settled step; returns one output per sampled row."""
        outputs = [advance(request, samples, row) for row, request in enumerate(plan.sampled)]
        for row in range(len(plan.decode), len(outputs)):
            outputs[row].num_cached_tokens = plan.sampled[row].num_cached_tokens or 0
        finished = [plan.sampled[row] for row, output in enumerate(outputs) if output.finish_reason is not None]
        if finished:
            self.pinned += [
                request
                for request, output in zip(plan.sampled, outputs, strict=True)
                if request.keeps_kv and output.finish_reason == "length"
            ]
            self._release(finished)
        for request, output in zip(plan.sampled, outputs, strict=True):
            if output.rolled_back_to is not None:
                self._take_back(request, output.rolled_back_to)
        if self.is_idle:
            self.check_integrity()
        return outputs

    def _take_back(self, request: Request, position: int) -> None:
        """Cut a running request's tokens off at `position`, and compute it from there on.

        As after a preemption it is in the waiting queue then; its KV up to there is cached.
        """
        request.rewind(position, self.cache.block_size)
        self._release([request])
        self._enqueue(request)

    def check_integrity(self) -> None:
        """Every live request is in one queue and owns its pages. Raises `AssertionError`."""
        running = [*self.prefilling, *self.decoding]
        live = [*running, *self.waiting]
        assert len({id(request) for request in live}) == len(live), f"a request is listed twice: {self!r}"
        assert len(running) <= self.max_num_seqs, f"more than {self.max_num_seqs} requests run: {self!r}"
        assert not any(request.pages for request in self.waiting), f"a waiting request owns pages: {self!r}"
        self.cache.check_integrity([*running, *self.pinned])

    def _append_pages(self) -> bool:
        """A page for each decode row whose last one is full; whether that preempted nobody."""
        size, before = self.cache.page_size, self.num_preemptions
        full = [request for request in self.decoding if request.num_computed == len(request.pages) * size]
        for request in sorted(full, key=_arrival):
            while request.pages and not self.cache.append_page(request):
                self.preempt(self._victim())
        return self.num_preemptions == before

    def _prompt_budget(self) -> int:
        """Prompt tokens that the next step may compute.

        While requests decode, prompts are to slow them by about two steps and no more, so a mixed
        batch gets ``max_mixed_chunk`` prompt tokens, corrected for what makes them cheap or dear.
        Where several clients share the engine, a step is short whatever one of them has sent:
        another's request waits for its end.
        """
        most = self.max_num_batched_tokens - len(self.decoding)
        rows, chunk, part = len(self.decoding), self.max_mixed_chunk, 2
        if chunk is not None and self._is_shared():
            return min(most, _whole_tiles(SHARED_CHUNKS * chunk + TILE // 2 - 1, rows))
        if chunk is None or not self.decoding:
            return most
        if rows < FEW_ROWS:
            # a step with few rows is short: half a chunk already takes as long as two of them, and
            # the rows themselves count
            chunk, part = max(1, chunk // 2 - rows), 3
        # One chunk for each prompt that a client waits for: with n of them a decoding request
        # waits n times as long, but so would n clients if they had to share one chunk.
        new = min(self.max_num_seqs - rows - len(self.prefilling), len(self.waiting))
        wanted = chunk * (len(self.prefilling) + new)
        # Attention makes tokens deep in a prompt dearer, so there are fewer of them: a third or
        # half less behind LONG_CONTEXT tokens, in proportion before.
        wanted -= sum(chunk * min(one.num_computed, LONG_CONTEXT) // (part * LONG_CONTEXT) for one in self.prefilling)
        if wanted >= TILE:
            wanted = _whole_tiles(wanted, rows)
        return min(most, wanted)

    def _admit(self, budget: int, only_starved: bool) -> tuple[PageCopy, ...]:
        """Move waiting requests into prefill, clients in turn, or only those that starve."""
        order = self._turns.order(self.waiting)
        copies = self._admit_starved(order)
        if only_starved:
            return tuple(copies)
        fair = _fair_chunk(budget)
        reserved = sum(min(fair, _remaining(request)) for request in self.prefilling)
        prefilling = counts_of(self.prefilling)
        pending = self._pending(self.prefilling)
        slots = self.max_num_seqs - len(self.decoding) - len(self.prefilling)
        blocked: set[str | None] = set()  # clients whose next request gets no pages
        for request in order:
            if slots <= 0:
                break
            if request.client in blocked:
                continue
            slots -= 1  # one that is skipped keeps its slot free
            if reserved >= budget and prefilling[request.client]:
                continue  # a client's first prompt need not wait for the end of others'
            if request.pages or not self._may_begin(request, pending):
                continue
            copied = self.cache.allocate(request, self._spare())
            if copied is None:
                if not blocked and not self._may_be_passed(request):
                    break
                blocked.add(request.client)
                continue
            copies += copied
            self._begin(request)
            self._num_passed += bool(blocked)
            pending |= self._pending([request])
            prefilling[request.client] += 1
            reserved += min(fair, _remaining(request))
        return tuple(copies)

    def _may_be_passed(self, request: Request) -> bool:
        """Whether other clients' requests may come before the next one, which gets no pages: as
        many as may run, and no more.
        """
        if self._passed is not request:
            self._passed, self._num_passed = request, 0
        return self._num_passed < self.max_num_seqs

    def _admit_starved(self, order: Sequence[Request]) -> list[PageCopy]:
        """Where slots or pages are missing, make room for one request of each client that has none
        running. The client that has most of them gives up its last one, and never its only one.
        """
        copies: list[PageCopy] = []
        running = counts_of((*self.decoding, *self.prefilling))
        if max(running.values(), default=0) < 2:
            return copies
        for request in order:
            if running[request.client] or not self._may_begin(request, self._pending(self.prefilling)):
                continue
            preempted = False
            while not self._has_room(request) and max(running.values(), default=0) > 1:
                self._make_room(running)
                preempted = True
            copied = self.cache.allocate(request, self._spare()) if preempted and self._has_room(request) else None
            if copied is not None:  # without a preemption it has its turn
                copies += copied
                self._begin(request)
                running[request.client] += 1
        return copies

    def _has_room(self, request: Request) -> bool:
        return self.has_slot and self.cache.has_room(request, self._spare())

    def _make_room(self, running: Counter[str | None]) -> None:
        victim = self._victim()
        self.preempt(victim)
        self._turns.give_way(victim)
        running[victim.client] -= 1

    def _is_shared(self) -> bool:
        """Whether several clients' requests are here, or were until a moment ago."""
        if self._turns.is_shared:
            return True
        requests = itertools.chain(self.decoding, self.prefilling, self.waiting)
        first = next(requests, None)
        return first is not None and any(request.client != first.client for request in requests)

    def _victim(self) -> Request:
        """The running request to preempt: the last one of the client that has most of them, so that
        the oldest of all goes on.
        """
        running = (*self.decoding, *self.prefilling)
        counts = counts_of(running)
        return max(running, key=lambda request: (counts[request.client], request.arrival))

    def _may_begin(self, request: Request, pending: set[int]) -> bool:
        """Whether neither a transfer that came before nor a prefix hit is to be waited for."""
        blocked = self._blocked_transfer
        if blocked is not None and request.arrival > blocked.arrival:
            return False
        return not (pending and self._awaits_prefix(request, pending))

    def _spare(self) -> int:
        """Pages that an admission must leave available: running requests will need them soon."""
        running = (*self.decoding, *self.prefilling)
        growth = sum(self.cache.count_pages(one.limit) - len(one.pages) for one in running)
        return min(growth, -(-len(running) // RUNNING_PER_SPARE))

    def _begin(self, request: Request) -> None:
        self.waiting.remove(request)
        self._turns.admit(request)
        self._join(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
        if request.queue_times is None:
            now_s = time.monotonic()
            request.queue_times = QueueTimes(now_s, now_s)

    def _join(self, request: Request) -> None:
        self.prefilling.append(request)
        self.prefilling.sort(key=_arrival)

    def _pending(self, requests: Iterable[Request]) -> set[int]:
        """Hashes of the blocks that `requests` are about to compute, and to cache."""
        size, sound = self.cache.block_size, (one for one in requests if not one.is_spoiled)
        return {each for one in sound for each in one.hash_blocks(size)[one.num_computed // size :]}

    def _awaits_prefix(self, request: Request, pending: set[int]) -> bool:
        """Whether more than half of what a request has to compute is about to be cached.

        It then waits for that prefix hit: n choices of one prompt compute the prompt once.
        """
        first = len(self.cache.match_prefix(request))
        shared = 0
        while first + shared < len(request.block_hashes) and request.block_hashes[first + shared] in pending:
            shared += 1
        return 2 * shared * self.cache.block_size > len(request.tokens) - first * self.cache.block_size

    def _cut(self, budget: int) -> tuple[Chunk, ...]:
        """Chunks of the prompts: a fair one each while the budget lasts, the rest to the first."""
        prompts, fair = self.prefilling, max(_fair_chunk(budget), budget // (2 * len(self.prefilling)))
        if self._is_shared():
            prompts, fair = self._turns.prompts(self.prefilling), FAIR_CHUNK
        self._turns.computed(prompts[0])
        left = budget
        counts = []
        for request in prompts:
            counts.append(min(fair, _remaining(request), left))
            left -= counts[-1]
        chunks = []
        for request, count in zip(prompts, counts, strict=True):
            more = min(left, _remaining(request) - count)
            left -= more
            if count + more:
                chunks.append(Chunk(request, request.num_computed, request.num_computed + count + more))
        return tuple(chunks)

    def _remove(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._release([request])

    def _release(self, requests: list[Request]) -> None:
        gone = set(map(id, requests))
        self.decoding = tuple(request for request in self.decoding if id(request) not in gone)
        self.prefilling = [request for request in self.prefilling if id(request) not in gone]
        for request in requests:
            if request not in self.pinned:
                self.cache.free(request)


_arrival = attrgetter("arrival")


def _whole_tiles(wanted: int, rows: int) -> int:
    """Prompt tokens beside decode rows: GEMMs compute whole tiles, and a started one is paid."""
    return max(1, (rows + wanted + TILE // 2) // TILE * TILE - rows)


def _fair_chunk(budget: int) -> int:
    return min(FAIR_CHUNK, max(1, budget // 4))


def _remaining(request: Request) -> int:
    return len(request.tokens) - request.num_computed
