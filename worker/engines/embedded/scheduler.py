"""Which tokens each step computes: decode rows first, then prompts, fairly, within the step's
budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

from adapters.chain import ProcessorChain
from worker.engines.embedded.kv_cache import KvCache, hash_blocks
from worker.engines.embedded.plan import TILE, Chunk, Output, PageCopy, Plan, Request, Samples

FAIR_CHUNK = 128
"""Tokens of each prompt that a step computes before any prompt gets more, a quarter of the
budget at most.
"""

FEW_ROWS = 16
"""Below this number of requests that decode, a step is so short that a whole mixed chunk takes
more than two steps.
"""

LONG_CONTEXT = 1024
"""Tokens after which computing one more of a prompt takes a small model half as long again."""

RUNNING_PER_SPARE = 16
"""Running requests for which one page stays available when another is admitted, so that it does
not drive one out, or is driven out, at the next full page."""


class Scheduler:
    """First come, first served; the last one goes first where memory ends. Pure bookkeeping, one
    thread.

    ====================  =================  ==================================================
    a request is          held in            and owns
    ====================  =================  ==================================================
    waiting               ``waiting``        nothing; after a preemption it has generated tokens
    in prefill            ``prefilling``     pages for all its tokens
    decoding              ``decoding``       pages for all its tokens
    a guest               ``guests``         pages; `exchange` says why, and does the rest
    finished or aborted   nowhere            nothing
    ====================  =================  ==================================================

    Args:
        cache: KV pages.
        max_num_seqs: Requests in ``prefilling`` and ``decoding`` together at most.
        max_num_batched_tokens: Tokens in one plan at most; at least `max_num_seqs`.
        max_mixed_chunk: Prompt tokens per prompt that is waited for in a plan that decodes too;
            None for no limit. It bounds the time between two tokens of those who decode, except
            where as many others wait to. Behind `LONG_CONTEXT` tokens it is half as large. Of fewer
            than `FEW_ROWS`, half of it is the bound, and they count; it becomes a third smaller.
            Where it is `TILE` or more, the step is whole tiles.

    Attributes:
        waits_outside: Place in the order of arrival of a request that waits for pages before it
            can become a guest, None if none does. Nobody who came after it is admitted.
    """

    def __init__(
        self, cache: KvCache, max_num_seqs: int, max_num_batched_tokens: int, max_mixed_chunk: int | None = None
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self.max_mixed_chunk = max_mixed_chunk
        self.waiting: deque[Request] = deque()  # in order of arrival
        self.prefilling: list[Request] = []
        self.decoding: tuple[Request, ...] = ()
        self.guests: list[Request] = []
        self.waits_outside: int | None = None
        self._num_arrived = 0

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.waiting)} waiting, {len(self.prefilling)} in prefill, "
            f"{len(self.decoding)} decoding, {self.cache!r})"
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.decoding or self.prefilling or self.waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether there is a prompt of which some is still to be computed."""
        return bool(self.prefilling or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request in order of arrival; the store must have room for the longest answer
        to it.
        """
        longest = self.cache.count_pages(request.limit)
        assert longest <= self.cache.num_pages, f"{request.id} may take {longest} pages: {self!r}"
        self.arrive(request)
        self._enqueue(request)

    def arrive(self, request: Request) -> None:
        """Give a request its place in the order of arrival, unless it has one."""
        if request.arrival < 0:
            request.arrival = self._num_arrived
            self._num_arrived += 1

    def abort(self, request_id: str) -> Output | None:
        """Forget a request and free what it holds, between steps; None if it is not here any
        more.
        """
        for request in (*self.decoding, *self.prefilling, *self.waiting):
            if request.id == request_id:
                self._remove(request)
                return Output(request_id, finish_reason="cancelled", chain=request.chain)
        return None

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue, between steps; its KV is computed again when
        its turn comes.
        """
        self._release([request])
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        place = len(self.waiting)
        while place and self.waiting[place - 1].arrival > request.arrival:
            place -= 1
        self.waiting.insert(place, request)

    @property
    def has_slot(self) -> bool:
        """Whether one more request may run."""
        return len(self.decoding) + len(self.prefilling) < self.max_num_seqs

    def invite(self, request: Request) -> tuple[PageCopy, ...] | None:
        """Make a request a guest, with pages for all its tokens and as much KV in them as is
        known.

        Returns:
            What has to be copied in the store before anything is written; None if there are too few
            pages.
        """
        copies = self.cache.admit(request, self._spare())
        if copies is not None:
            request.num_cached_tokens = request.num_computed
            self.guests.append(request)
        return copies

    def resume(self, request: Request) -> None:
        """Let a guest run; there must be a slot."""
        self.guests.remove(request)
        self._join(request)

    def dismiss(self, request: Request) -> None:
        """Free what a guest holds."""
        self.guests.remove(request)
        self.cache.release(request)

    def schedule(self, prompts_first: bool = False) -> Plan:
        """The next step's work; admits waiting requests while slots, KV and budget last.

        Args:
            prompts_first: Leave out the requests that are decoding if there are prompts to compute.
        """
        fits = self._grow()
        budget = self._prompt_budget()
        copies: tuple[PageCopy, ...] = self._admit(budget) if fits and self.waiting else ()
        chunks = self._cut(budget) if self.prefilling else ()
        ended = tuple(chunk.request for chunk in chunks if chunk.is_last)
        decode = () if prompts_first and chunks else self.decoding
        if decode:
            copies += self.cache.compact()
        return Plan(decode, chunks, decode + ended if ended else decode, copies)

    def settle(self, plan: Plan) -> None:
        """Take over what the step computes, but for the tokens that come out of it; these may
        still be under way.
        """
        for request in plan.decode:
            self.cache.complete(request, request.num_computed + 1)
        for chunk in plan.chunks:
            self.cache.complete(chunk.request, chunk.stop)
        if plan.sampled is not plan.decode:
            self.decoding = plan.sampled if plan.decode else self.decoding + plan.sampled
            self.prefilling = [one for one in self.prefilling if one.num_computed < len(one.tokens)]

    def commit(self, plan: Plan, samples: Samples) -> list[Output]:
        """Take over the tokens of a step that was settled; returns one output per sampled row."""
        outputs = [advance(request, samples, row) for row, request in enumerate(plan.sampled)]
        for row in range(len(plan.decode), len(outputs)):
            outputs[row].num_cached_tokens = plan.sampled[row].num_cached_tokens or 0
        finished = [plan.sampled[row] for row, output in enumerate(outputs) if output.finish_reason is not None]
        if finished:
            self._keep([plan.sampled[row] for row, output in enumerate(outputs) if output.finish_reason == "length"])
            self._release(finished)
        if self.is_idle:
            self.check_integrity()
        return outputs

    def check_integrity(self) -> None:
        """Every live request is in one place and every KV page has its owners. Raises
        `AssertionError`.
        """
        running = [*self.prefilling, *self.decoding]
        live = [*running, *self.waiting]
        assert len({id(request) for request in live}) == len(live), f"a request is listed twice: {self!r}"
        assert len(running) <= self.max_num_seqs, f"more than {self.max_num_seqs} requests run: {self!r}"
        assert not any(request.pages for request in self.waiting), f"a waiting request owns pages: {self!r}"
        self.cache.check_integrity([*running, *self.guests])

    def _grow(self) -> bool:
        """A page for each decode row whose last one is full; whether that drove nobody out."""
        size, before = self.cache.page_size, self.num_preemptions
        full = [request for request in self.decoding if request.num_computed == len(request.pages) * size]
        for request in sorted(full, key=_arrival):
            while request.pages and not self.cache.grow(request):
                self.preempt(max((*self.decoding, *self.prefilling), key=_arrival))
        return self.num_preemptions == before

    def _prompt_budget(self) -> int:
        """Prompt tokens that the next step may compute."""
        most = self.max_num_batched_tokens - len(self.decoding)
        if self.max_mixed_chunk is None or not self.decoding:
            return most
        rows, chunk, part = len(self.decoding), self.max_mixed_chunk, 2
        if rows < FEW_ROWS:
            chunk, part = max(1, chunk // 2 - rows), 3
        new = min(self.max_num_seqs - rows - len(self.prefilling), len(self.waiting))
        wanted = chunk * (len(self.prefilling) + new)
        wanted -= sum(chunk * min(one.num_computed, LONG_CONTEXT) // (part * LONG_CONTEXT) for one in self.prefilling)
        if wanted >= TILE:
            wanted = (rows + wanted + TILE // 2) // TILE * TILE - rows
        return min(most, wanted)

    def _admit(self, budget: int) -> tuple[PageCopy, ...]:
        """Move waiting requests into prefill, in order of arrival."""
        slots = self.max_num_seqs - len(self.decoding) - len(self.prefilling)
        fair = _fair_chunk(budget)
        reserved = sum(min(fair, _remaining(request)) for request in self.prefilling)
        if slots <= 0 or reserved >= budget:
            return ()
        copies: list[PageCopy] = []
        pending = self._pending(self.prefilling)
        for request in list(islice(self.waiting, slots)):  # one that is passed over keeps its slot free
            if self.waits_outside is not None and request.arrival > self.waits_outside:
                break
            if pending and self._awaits(request, pending):
                continue
            copied = self.cache.admit(request, self._spare())
            if copied is None:
                break
            copies += copied
            self._begin(request)
            pending |= self._pending([request])
            reserved += min(fair, _remaining(request))
            if reserved >= budget:
                break
        return tuple(copies)

    def _spare(self) -> int:
        """Pages that are to stay available: as many as running requests will soon need."""
        running = (*self.decoding, *self.prefilling)
        growth = sum(self.cache.count_pages(one.limit) - len(one.pages) for one in running)
        return min(growth, -(-len(running) // RUNNING_PER_SPARE))

    def _begin(self, request: Request) -> None:
        self.waiting.remove(request)
        self._join(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed

    def _join(self, request: Request) -> None:
        self.prefilling.append(request)
        self.prefilling.sort(key=_arrival)

    def _pending(self, requests: Iterable[Request]) -> set[int]:
        """Hashes of the blocks that are being computed."""
        size = self.cache.block_size
        return {each for one in requests for each in hash_blocks(one, size)[one.num_computed // size :]}

    def _awaits(self, request: Request, pending: set[int]) -> bool:
        """Whether the larger part of what a request has to compute is being computed for another
        one.
        """
        first = len(self.cache.match(request))
        shared = 0
        while first + shared < len(request.block_hashes) and request.block_hashes[first + shared] in pending:
            shared += 1
        return 2 * shared * self.cache.block_size > len(request.tokens) - first * self.cache.block_size

    def _cut(self, budget: int) -> tuple[Chunk, ...]:
        """Chunks of the prompts: a fair one for each while the budget lasts; the oldest get what
        is left.
        """
        fair = max(_fair_chunk(budget), budget // (2 * len(self.prefilling)))
        left = budget
        counts = []
        for request in self.prefilling:
            counts.append(min(fair, _remaining(request), left))
            left -= counts[-1]
        chunks = []
        for request, count in zip(self.prefilling, counts, strict=True):
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

    def _keep(self, requests: list[Request]) -> None:
        """Make those guests whose KV another worker wants."""
        self.guests += [request for request in requests if request.keeps_kv]

    def _release(self, requests: list[Request]) -> None:
        gone = set(map(id, requests))
        self.decoding = tuple(request for request in self.decoding if id(request) not in gone)
        self.prefilling = [request for request in self.prefilling if id(request) not in gone]
        for request in requests:
            if request not in self.guests:
                self.cache.release(request)


_arrival = attrgetter("arrival")


def _fair_chunk(budget: int) -> int:
    return min(FAIR_CHUNK, max(1, budget // 4))


def _remaining(request: Request) -> int:
    return len(request.tokens) - request.num_computed


def advance(request: Request, samples: Samples, row: int) -> Output:
    """Append the token sampled in `row` to `request`, and say what the caller is to hear of it."""
    chain = request.chain
    if samples.errors and row in samples.errors:
        return Output(request.id, finish_reason="error", error=samples.errors[row], chain=chain)
    token = samples.token_ids[row]
    logprobs = samples.logprobs.get(row) if samples.logprobs else None
    request.tokens.append(token)
    ends = token in request.end_ids or len(request.tokens) >= request.limit
    data = _accept(chain, token, len(request.tokens) - 1, ends) if chain is not None else None
    if token in request.end_ids:
        if not request.params.include_stop_str_in_output:
            return Output(request.id, finish_reason="stop", stop_reason=token, engine_data=data, chain=chain)
        return Output(request.id, token, logprobs, "stop", token, engine_data=data, chain=chain)
    if len(request.tokens) >= request.limit:
        return Output(request.id, token, logprobs, "length", engine_data=data, chain=chain)
    return Output(request.id, token, logprobs, engine_data=data)


def _accept(chain: ProcessorChain, token_id: int, position: int, ends: bool) -> dict[str, object] | None:
    """Tell the chain; its receipt so far, if the request wants one, with the attribution where
    the answer ``ends``.
    """
    chain.accept(token_id, position)
    return {"logits_processors": chain.report(attribution=ends)} if chain.wants_receipt else None
