"""Continuous batching with chunked prefill: which tokens a step computes, in a token budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from worker.engines.embedded.admission_order import Admission
from worker.engines.embedded.advance import advance
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.mixed_steps import MixedSteps
from worker.engines.embedded.pinned import PinnedRequests
from worker.engines.embedded.plan import Chunk, Output, PageCopy, Plan, Request, Samples
from worker.engines.embedded.prompt_chunks import cut_chunks, prompt_budget
from worker.engines.embedded.queues import Queues
from worker.engines.embedded.turns import Turns, last_of_largest_client


class Scheduler:
    """Clients in turn, first come, first served; preemption by recomputation. Pure bookkeeping,
    one thread.

    Where pages run out, the last request of the client that has most of them running goes back to
    the waiting queue; so it does where slots are taken, and another client has none.

    Args:
        cache: The bookkeeping of the KV pages.
        max_num_seqs: Requests that run at most; one with a companion counts twice.
        max_num_batched_tokens: Tokens in one plan at most; at least `max_num_seqs`.
        mixed: Prompt tokens in a mixed batch, one that decodes too; or what steps take, so that
            they take a part of its time; None for no limit. See `prompt_budget`.
        turns: Turns between clients.
        draft_model: Draft model, which computes companions; None for none.

    Attributes:
        queues: The requests by state.
        transfers: The requests whose pages are pinned for a KV transfer.
    """

    def __init__(
        self,
        cache: KvCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        mixed: MixedSteps | int | None = None,
        turns: Turns | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.mixed = mixed
        self.queues = Queues(cache, max_num_seqs, turns or Turns(), draft_model)
        self.transfers = PinnedRequests(self.queues)
        self._admission = Admission(self.queues, self.transfers)

    def __repr__(self) -> str:
        return f"Scheduler({self.queues!r})"

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return self.queues.is_idle

    def add(self, request: Request) -> None:
        """Queue a request in order of arrival; its longest answer must fit into the store."""
        self.queues.add(request)

    def abort(self, request_id: str) -> Output | None:
        """Drop a request and free its pages, between steps; None if it is in no queue."""
        request = next((one for one in self.queues.live if one.id == request_id), None)
        if request is None:
            return None
        if request in self.queues.waiting:
            self.queues.waiting.remove(request)
        else:
            self.queues.release([request])
        return Output(request_id, finish_reason="cancelled", chain=request.chain)

    def schedule(self, prompts_first: bool = False) -> Plan:
        """Plan the next step; admits waiting requests while slots, pages and token budget last.

        Args:
            prompts_first: Leave out the decoding requests if there are prompt tokens to compute.
        """
        queues = self.queues
        if queues.draft_model is not None:
            queues.draft_model.free_ended()
        fits = self._append_pages()
        budget = prompt_budget(queues, self.max_num_batched_tokens, self.mixed)
        copies: tuple[PageCopy, ...] = self._admission.admit(budget, only_starved=not fits) if queues.waiting else ()
        if not budget and not queues.decoding:  # the rows that were to be decoded alone made room for a starved client
            budget = prompt_budget(queues, self.max_num_batched_tokens, self.mixed)
        chunks = cut_chunks(queues, budget) if queues.prefilling and budget else ()
        decode, owners, rows = (
            ((), (), ()) if prompts_first and chunks else (queues.decode_rows, queues.decoding, queues.companion_rows)
        )
        drafted = tuple(chunk for chunk in chunks if chunk.request.by_draft_model)
        if drafted:
            chunks = tuple(chunk for chunk in chunks if not chunk.request.by_draft_model)
        if decode:
            copies += self.cache.compact()
        return Plan(
            decode,
            chunks,
            _sampled(decode, chunks),
            copies=copies,
            num_companions=len(decode) - len(owners) + sum([chunk.request.is_companion for chunk in chunks]),
            companions=Plan(rows, drafted, _sampled(rows, drafted)) if rows or drafted else None,
        )

    def _append_pages(self) -> bool:
        """A page for each decode row whose last one is full; whether that preempted no request."""
        queues, before = self.queues, self.queues.num_preemptions
        full = _full(queues.decode_rows, self.cache)
        if queues.draft_model is not None:
            full += _full(queues.companion_rows, queues.draft_model.cache)
        for request, cache in sorted(full, key=lambda row: row[0].arrival):
            while request.pages and not cache.append_page(request):
                queues.preempt(last_of_largest_client([one for one in queues.running if cache.count_owned(one)]))
        return queues.num_preemptions == before

    def add_drafts(self, plan: Plan, drafts: Sequence[Sequence[int]]) -> Plan:
        """`plan` with `drafts` behind its decode rows, one each, cut to what may be computed.

        That is the token budget, the rest of the answer but its last token, and the pages that no
        request owns: a draft preempts no request. Nothing is drafted from an end token on. A
        companion's draft is its owner's, which takes pages and, where the model itself computes
        both, twice its length of the budget.
        """
        if not any(drafts):
            return plan
        left = self.max_num_batched_tokens - plan.num_tokens
        cut: dict[int, tuple[int, ...]] = {}
        for request, draft in zip(plan.decode, drafts, strict=True):
            if not draft:
                continue
            length = next((index for index, token in enumerate(draft) if token in request.end_ids), len(draft))
            num_rows = sum(not one.by_draft_model for one in request.sequences)
            wanted = min(length, left // num_rows, request.limit - len(request.tokens) - 1)
            found = tuple(draft[: self._reserve(request, wanted)])
            cut |= {id(one): found for one in request.sequences}
            left -= num_rows * len(found)
        return _with_drafts(plan, cut) if any(cut.values()) else plan

    def _reserve(self, request: Request, count: int) -> int:
        """Give a request and its companion pages for `count` drafted tokens each; returns for how
        many there are.
        """
        caches = [(one, self.queues.cache_of(one)) for one in request.sequences]
        while count > 0:
            missing = [(one, cache, _missing(one, cache, count)) for one, cache in caches]
            needed: Counter[KvCache] = Counter()
            for _, cache, number in missing:
                needed[cache] += number
            if all(number <= cache.num_available for cache, number in needed.items()):
                for one, cache, number in missing:
                    for _ in range(number):
                        cache.append_page(one)
                return count
            count -= 1
        return 0

    def roll_back(self, plan: Plan) -> None:
        """Free the pages that hold nothing but rejected drafts of a committed step."""
        for request, draft in zip(plan.decode, plan.drafts, strict=False):
            if draft and request.pages:
                for one in request.sequences:
                    self.queues.cache_of(one).trim(one)

    def learn_cost(self, plan: Plan, seconds: float) -> None:
        """Take the time of a step that decodes."""
        if isinstance(self.mixed, MixedSteps):
            self.mixed.learn(plan, seconds)

    def settle(self, plan: Plan) -> None:
        """Take over the KV that the step computes; its sampled tokens may still be on their way."""
        for request in plan.decode:
            self.cache.complete(request, request.num_computed + 1)
        for chunk in plan.chunks:
            self.cache.complete(chunk.request, chunk.stop)
        if plan.sampled is not plan.decode:
            queues = self.queues
            queues.decoding = plan.sampled if plan.decode else queues.decoding + plan.sampled
            queues.prefilling = [one for one in queues.prefilling if one.num_computed < len(one.tokens)]

    def settle_companions(self, plan: Plan) -> None:
        """Take over the KV of the companions in a step; the rest is up to `settle`."""
        for request in plan.decode:
            if request.is_companion:
                self.queues.cache_of(request).complete(request, request.num_computed + 1)
        for chunk in plan.chunks:
            if chunk.request.is_companion:
                self.queues.cache_of(chunk.request).complete(chunk.request, chunk.stop)

    def settle_drafted(self, owners: Sequence[Request]) -> None:
        """Take over the KV of an accepted draft's next token in the companions of `owners`."""
        for companion in (one.companion for one in owners):
            if companion is not None:
                self.queues.cache_of(companion).complete(companion, companion.num_computed + 1)

    def spoil(self, plan: Plan, spoiled: Sequence[Request]) -> None:
        """Mark requests whose KV of a settled step without drafts is not finite (`Model.spoiled`).

        KV that earlier steps computed for them is sound.
        """
        starts = {id(chunk.request): chunk.start for chunk in plan.chunks}
        for request in spoiled:
            request.is_spoiled = True
            self.queues.cache_of(request).withdraw(request, starts.get(id(request), request.num_computed - 1))

    def commit(self, plan: Plan, samples: Samples) -> list[Output]:
        """Take over the sampled tokens of a settled step; returns one output per sampled row."""
        outputs = [advance(request, samples, row) for row, request in enumerate(plan.sampled)]
        for row in range(len(plan.decode), len(outputs)):
            outputs[row].num_cached_tokens = plan.sampled[row].num_cached_tokens or 0
        finished = [plan.sampled[row] for row, output in enumerate(outputs) if output.finish_reason is not None]
        if finished:
            self.queues.pinned += [
                request
                for request, output in zip(plan.sampled, outputs, strict=True)
                if request.keeps_kv and output.finish_reason == "length"
            ]
            self.queues.release(finished)
        for request, output in zip(plan.sampled, outputs, strict=True):
            if output.rewound_to is not None:  # computed from there on; its KV up to there is cached
                request.rewind(output.rewound_to, self.cache.block_size)
                self.queues.requeue(request)
        if self.is_idle:
            self.check_integrity(whole=False)
        return outputs

    def check_integrity(self, *, whole: bool = True) -> None:
        """Every live request is in one queue and owns its pages. Raises `AssertionError`.

        Args:
            whole: See `KvCache.check_integrity`.
        """
        queues, live = self.queues, [*self.queues.live]
        assert len({id(request) for request in live}) == len(live), f"a request is listed twice: {self!r}"
        assert queues.num_rows <= queues.max_num_seqs, f"more than {queues.max_num_seqs} rows run: {self!r}"
        waiting = (sequence for request in queues.waiting for sequence in request.sequences)
        assert not any(sequence.pages for sequence in waiting), f"a waiting request owns pages: {self!r}"
        owners = [one for each in (*queues.running, *queues.pinned) for one in each.sequences]
        self.cache.check_integrity((one for one in owners if not one.by_draft_model), whole=whole)
        if queues.draft_model is not None:
            queues.draft_model.check_integrity((one for one in owners if one.by_draft_model), whole=whole)


def _full(rows: Sequence[Request], cache: KvCache) -> list[tuple[Request, KvCache]]:
    return [(one, cache) for one in rows if one.num_computed == len(one.pages) * cache.page_size]


def _missing(sequence: Request, cache: KvCache, count: int) -> int:
    """Pages that `count` drafted tokens take beyond a sequence's own."""
    return max(0, cache.count_pages(len(sequence.tokens) + count) - len(sequence.pages))


def _with_drafts(plan: Plan, drafts: Mapping[int, tuple[int, ...]]) -> Plan:
    """A plan with drafts by the ``id`` of a request, the draft model's part of it, too."""
    companions = plan.companions
    if companions is not None:
        companions = _with_drafts(companions, drafts)
    found = tuple(drafts.get(id(one), ()) for one in plan.decode)
    return replace(plan, drafts=found if any(found) else (), companions=companions)


def _sampled(decode: tuple[Request, ...], chunks: tuple[Chunk, ...]) -> tuple[Request, ...]:
    ended = tuple([chunk.request for chunk in chunks if chunk.is_last])
    return decode + ended if ended else decode
