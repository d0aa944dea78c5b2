"""Which tokens each step computes: decode rows first, then prompts in order of arrival, within the step's budget."""

from __future__ import annotations

from collections import deque

from adapters.chain import ProcessorChain
from worker.engines.embedded.kv_cache import KvCache
from worker.engines.embedded.plan import Chunk, Output, Plan, Request, Samples


class Scheduler:
    """First come, first served, without preemption. Pure bookkeeping: no tensors, no I/O, one thread.

    ====================  =================  =================================
    a request is          held in            and owns
    ====================  =================  =================================
    waiting               ``waiting``        nothing
    in its prompt         ``prefilling``     a KV range
    decoding              ``decoding``       a KV range
    finished or aborted   nowhere            nothing
    ====================  =================  =================================

    Args:
        cache: KV ranges.
        max_num_seqs: Requests in ``prefilling`` and ``decoding`` together at most.
        max_num_batched_tokens: Tokens in one plan at most; at least `max_num_seqs`.
    """

    def __init__(self, cache: KvCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: tuple[Request, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.waiting)} waiting, {len(self.prefilling)} in prefill, "
            f"{len(self.decoding)} decoding, {self.cache!r})"
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.decoding or self.prefilling or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def abort(self, request_id: str) -> Output | None:
        """Forget a request and free what it holds; None if it is not here any more."""
        for request in (*self.decoding, *self.prefilling, *self.waiting):
            if request.id == request_id:
                self._remove(request)
                return Output(request_id, finish_reason="cancelled", chain=request.chain)
        return None

    def schedule(self) -> Plan:
        """The next step's work; admits waiting requests while slots, KV and budget last."""
        budget = self.max_num_batched_tokens - len(self.decoding)
        chunks: list[Chunk] = []
        for request in self.prefilling:
            budget = self._plan_chunk(request, budget, chunks)
        while self.waiting and budget > 0 and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.prefilling.append(request)
            budget = self._plan_chunk(request, budget, chunks)
        ended = tuple(chunk.request for chunk in chunks if chunk.is_last)
        return Plan(self.decoding, tuple(chunks), self.decoding + ended if ended else self.decoding)

    def commit(self, plan: Plan, samples: Samples) -> list[Output]:
        """Take over what the step computed; returns one output per sampled row."""
        for chunk in plan.chunks:
            chunk.request.num_computed = chunk.stop
        if plan.sampled is not plan.decode:
            self.decoding = plan.sampled
            self.prefilling = [one for one in self.prefilling if one.num_computed < one.prompt_length]
        outputs = []
        finished = []
        for row, request in enumerate(plan.sampled):
            output = advance(request, samples, row)
            outputs.append(output)
            request.num_computed = len(request.tokens) - 1
            if output.finish_reason is not None:
                finished.append(request)
        if finished:
            self._release(finished)
        if self.is_idle:
            self.check_integrity()
        return outputs

    def check_integrity(self) -> None:
        """Every live request is in one place and every KV range has one live owner. Raises `AssertionError`."""
        running = [*self.prefilling, *self.decoding]
        live = [*running, *self.waiting]
        assert len({id(request) for request in live}) == len(live), f"a request is listed twice: {self!r}"
        assert len(running) <= self.max_num_seqs, f"more than {self.max_num_seqs} requests run: {self!r}"
        self.cache.check_integrity([segment for request in running for segment in request.segments])

    def _plan_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        stop = min(request.prompt_length, request.num_computed + budget)
        if stop > request.num_computed:
            chunks.append(Chunk(request, request.num_computed, stop))
        return budget - (stop - request.num_computed)

    def _admit(self, request: Request) -> bool:
        if len(self.decoding) + len(self.prefilling) >= self.max_num_seqs:
            return False
        segments = self.cache.allocate(request.limit)
        if segments is None:
            return False
        request.segments = segments
        return True

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
            self.cache.free(request.segments)
            request.segments = []


def advance(request: Request, samples: Samples, row: int) -> Output:
    """Append the token sampled in `row` to `request`, and say what the caller is to hear of it."""
    chain = request.chain
    if samples.errors and row in samples.errors:
        return Output(request.id, finish_reason="error", error=samples.errors[row], chain=chain)
    token = samples.token_ids[row]
    logprobs = samples.logprobs.get(row) if samples.logprobs else None
    request.tokens.append(token)
    data = _accept(chain, token, len(request.tokens) - 1) if chain is not None else None
    if token in request.end_ids:
        if not request.params.include_stop_str_in_output:
            return Output(request.id, finish_reason="stop", stop_reason=token, engine_data=data, chain=chain)
        return Output(request.id, token, logprobs, "stop", token, engine_data=data, chain=chain)
    if len(request.tokens) >= request.limit:
        return Output(request.id, token, logprobs, "length", engine_data=data, chain=chain)
    return Output(request.id, token, logprobs, engine_data=data)


def _accept(chain: ProcessorChain, token_id: int, position: int) -> dict[str, object] | None:
    """Tell the chain; its receipt so far, if the request wants one."""
    chain.accept(token_id, position)
    return {"logits_processors": chain.report()} if chain.wants_receipt else None
