"""One step of the engine: synchronous, one thread."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from adapters.chain import plan_rows
from worker.engines import BATCH_SIZES
from worker.engines.embedded.adapters import LoadedAdapters
from worker.engines.embedded.companions import check_room, drafted_owners, keep_rows, take_rows
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.drafted_rows import DraftedRows
from worker.engines.embedded.held_outputs import HeldOutputs
from worker.engines.embedded.kv_cache import KvCache, choose_page_size
from worker.engines.embedded.mixed_steps import MixedSteps
from worker.engines.embedded.model import HfModel
from worker.engines.embedded.passes import count_pass
from worker.engines.embedded.plan import Edits, Model, Output, Plan, Request, Samples
from worker.engines.embedded.sampling import IsolatingSampler, NotSampled, known_and_wanted
from worker.engines.embedded.scheduler import Scheduler
from worker.engines.embedded.speculation import (
    DraftModelProposer,
    SpeculativeConfig,
    Speculator,
    agreeing_rows,
    with_pages,
)
from worker.engines.embedded.transfer import KvConnector, KvHandle
from worker.engines.forward_pass import ForwardPassSink
from worker.engines.weights import WeightVersion

STARVED_POLL_S = 0.005
"""Time until the next try where requests wait for pages that are pinned for transfer."""

_SPOILED = "the model's hidden state of a token is NaN or infinite"

_LOST_STATE = "sampling failed for it, or for a request beside it, while its processors followed the logits"

logger = logging.getLogger(__name__)


class Stepper:
    """A model, a scheduler, a speculator and a sampler.

    Args:
        model: Model that computes the logits; its KV store must hold the blocks of `scheduler`.
        scheduler: Scheduler that decides the work of a step; it knows the draft model.
        speculator: Speculator that drafts tokens; by default the requests' chains alone.

    Attributes:
        steps_by_batch_size, num_rows: See `EngineLoad`.
        speculator: The same.
        connector: Leases KV to other workers and receives it from them; None in aggregated serving.
        pass_sink: Called with what each step has computed; None if nobody wants to know.
        weights: Version of the weights that the next step computes with; None where they do not
            change.
        is_paused: Whether nothing is computed.
        adapters: LoRA adapters that new requests may choose; None where none can be served.
        gate: Requests that came while none are taken in, with their handles; None while they are.
    """

    def __init__(self, model: Model, scheduler: Scheduler, speculator: Speculator | None = None) -> None:
        self.model = model
        self.scheduler = scheduler
        self.connector: KvConnector | None = None
        self.pass_sink: ForwardPassSink | None = None
        self.weights: WeightVersion | None = None
        self.adapters: LoadedAdapters | None = None
        self.is_paused = False
        self.gate: list[tuple[Request, KvHandle | None]] | None = None
        self.speculator = speculator or Speculator()
        self.sampler = IsolatingSampler(model.vocab_size, model.undecodable_ids)
        self.steps_by_batch_size = [0] * (len(BATCH_SIZES) + 1)
        self.num_rows = 0
        self._held = HeldOutputs()
        self._starved = False  # requests wait, but pages pinned for transfer leave nothing to compute
        self._committed: tuple[Plan, list[Output]] | None = None  # of the step under way
        self._tapped: set[str] = set()  # ids of live requests with a tap; nearly always empty

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model, None if there is none."""
        return self.scheduler.queues.draft_model

    def add(self, request: Request, kv: KvHandle | None = None) -> None:
        """Queue a request; one with a handle joins once the KV that it describes has arrived."""
        if self.weights is not None:
            request.compute_with(self.weights)  # others may have been there when it came to the gate
        if self.gate is not None:
            self.gate.append((request, kv))
            return
        request.num_sent = len(request.tokens)
        if request.tap is not None:
            self._tapped.add(request.id)
        if kv is None or self.connector is None:
            self.scheduler.add(request)
        else:
            self.connector.receive(request, kv)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch, those at the gate and those that wait for their KV
        among them. May be read by any thread.
        """
        others = 0 if self.connector is None else self.connector.num_waiting
        return len(self.scheduler.queues.waiting) + len(self.gate or ()) + others

    def check(self, request: Request, where: str = "") -> None:
        """Check that a request can ever run here; see `check_room`. Any thread."""
        check_room(request, self.scheduler.queues.max_num_seqs, self.scheduler.cache, where)

    def abort(self, request_id: str) -> Output | None:
        """End a request and free its pages; None if it has ended already."""
        self._tapped.discard(request_id)
        for entry in self.gate or ():
            request, kv = entry
            if request.id == request_id and self.gate is not None:
                self.gate.remove(entry)
                if kv is not None and self.connector is not None:
                    self.connector.release(kv)
                return Output(request_id, finish_reason="cancelled", chain=request.chain)
        self.sampler.forget([request_id])
        self._held.drop(request_id, self.scheduler.cache.block_size)
        if self.connector is not None and (given_up := self.connector.abort(request_id)) is not None:
            return given_up
        return self.scheduler.abort(request_id)

    def shut_gate(self) -> None:
        """Take in no more requests, and compute those that have run; others wait outside, too."""
        self.is_paused = False
        if self.gate is None:
            waiting = self.scheduler.queues.waiting
            self.gate = [(one, None) for one in waiting if one.num_cached_tokens is None]
            for one, _ in self.gate:
                waiting.remove(one)

    def open_gate(self) -> None:
        """Take in the requests that came meanwhile, in order, and compute again."""
        self.is_paused = False
        gated, self.gate = self.gate, None
        for request, kv in gated or ():
            self.add(request, kv)

    @property
    def is_drained(self) -> bool:
        """Whether every request that was taken in has ended."""
        return self.scheduler.is_idle and (self.connector is None or self.connector.is_drained)

    def change_weights(self, change: Callable[[], None], weights: WeightVersion) -> None:
        """Let the next step compute with other weights; between two steps.

        KV of the old ones is of no use: requests that run wait, to compute theirs again, and
        nothing stays cached. Tokens that chains hold are sampled again.

        Args:
            change: Changes the weights of the model.
            weights: The new version.
        """
        self.drop_kv()
        change()
        self.weights = weights
        if self.connector is not None:
            self.connector.change_model(weights.digest)
        for request in self.scheduler.queues.live:
            if request.chain is not None and request.chain.backtracks:
                self._held.drop(request.id, self.scheduler.cache.block_size)
                request.chain.forget_ruled_out()
            request.compute_with(weights)

    def drop_kv(self) -> None:
        """Give up all KV but that which is pinned for transfer; its requests compute it again."""
        scheduler = self.scheduler
        if self.connector is not None:
            self.connector.recompute()
        for request in scheduler.queues.running:
            scheduler.queues.requeue(request)
        scheduler.cache.clear()
        if self.draft_model is not None:
            self.draft_model.clear()
        for request in scheduler.queues.pinned:
            scheduler.cache.withdraw(request, 0)

    def close(self) -> None:
        """End all KV transfers."""
        if self.connector is not None:
            self.connector.close()

    @property
    def wait_s(self) -> float | None:
        """Time until `step` should be called: 0 at once, None for not before a request is added."""
        wait_s = None if self.connector is None else self.connector.wait_s
        if self.scheduler.is_idle or self.is_paused:
            return wait_s
        if not self._starved:
            return 0.0
        return 0.0 if wait_s == 0 else STARVED_POLL_S  # a read goes on, whose pages may be those that are missing

    @torch.inference_mode()
    def step(self, prompts_first: bool = False) -> list[Output]:
        """Compute one step; returns one output for each request that got a token or ended.

        Args:
            prompts_first: Leave out the decoding requests if there are prompt tokens to compute.
        """
        if self.connector is not None:
            self.connector.poll()
            if self.scheduler.is_idle:
                return []
        if self.is_paused:
            return []
        started = time.perf_counter()
        plan = self.scheduler.schedule(prompts_first)
        self._starved = not plan.num_tokens and plan.companions is None
        if self._starved:
            assert not plan.copies, f"a prefix hit would never be copied: {self.scheduler!r}"
            return []
        counted = None if self.pass_sink is None else count_pass(plan, self.scheduler.queues.waiting)
        if plan.decode:
            plan = self.scheduler.add_drafts(plan, self.speculator.draft(plan))
        if plan.drafts:
            plan = self.speculator.leave_out(plan)
        drafted = plan
        if plan.companions is not None:
            plan = self._compute_companions(plan, plan.companions)
            if not plan.num_tokens:
                self.model.forward(plan)  # its copies
                return []
        rows = len(plan.sampled)
        self.steps_by_batch_size[bisect_left(BATCH_SIZES, rows)] += 1
        self.num_rows += rows
        logits = self.model.forward(plan)
        computed = plan
        if plan.drafts:
            plan, logits = self._recompute_spoiled(plan, logits)
        if plan.num_companions:
            self.scheduler.settle_companions(plan)
            plan, logits = take_rows(plan, logits, self.scheduler.queues.decoding)
        drafts = DraftedRows(self.model, plan, logits) if computed.drafts else None
        try:
            if drafts is None:
                outputs = self._sample(plan, logits, computed)
            else:
                outputs = self._sample_drafted(plan, drafts, plan.first_rows(), computed)
        except NotSampled:
            return self._leave(plan, self._isolate(plan))
        self._committed = plan, outputs
        if self.connector is not None and self.scheduler.queues.pinned:
            self.connector.lease(plan, outputs)
        if computed.decode:
            self.speculator.learn_cost(computed)
        if drafts is not None:
            accepted = self._verify(plan, drafts, outputs)
            owners = (one for one in drafted.decode if not one.is_companion)
            self.speculator.learn(drafted, [accepted.get(id(one), 0) for one in owners])
            self.speculator.learn_late(drafted, drafts.late)
        if computed.decode:
            self.scheduler.learn_cost(computed, time.perf_counter() - started)
        if self.pass_sink is not None and counted is not None:
            self.pass_sink(replace(counted, seconds=time.perf_counter() - started))
        return self._leave(plan, outputs)

    def recover(self) -> list[Output]:
        """Go on after an exception in `step`: not all KV that it was to compute, or copy, is there.

        Returns:
            Outputs of that step, of tokens that its requests have.
        """
        self.drop_kv()
        return [] if self._committed is None else self._leave(*self._committed)

    def _compute_companions(self, plan: Plan, companions: Plan) -> Plan:
        """Compute the draft model's part of a step, and keep its rows for the companions' owners.

        Returns:
            The plan without the rows that had to be preempted; see `_recompute_spoiled`.
        """
        assert self.draft_model is not None
        logits = self.draft_model.forward(companions)
        spoiled = self.draft_model.model.spoiled(companions)
        if again := drafted_owners(plan, companions, spoiled):
            for request in again:
                self.scheduler.queues.preempt(request)
            plan = replace(plan.without(again)[0], unread={})  # whose indices are those of the step before
            companions, rows = companions.without([one.companion for one in again if one.companion is not None])
            logits = logits[rows]
        for request, (first, end) in zip(
            companions.sampled, pairwise([*companions.first_rows(), len(logits)]), strict=True
        ):
            keep_rows(request, logits[first:end])
        self.scheduler.settle_companions(companions)
        self.scheduler.spoil(companions, [one for one in spoiled if one.pages])
        return plan

    def _sample(self, plan: Plan, logits: torch.Tensor, computed: Plan) -> list[Output]:
        """Sample and commit a position of each of ``plan.sampled``.

        Args:
            plan: Plan of the rows.
            logits: One row each.
            computed: Plan that `Model.forward` was given.
        """
        edits = plan_edits(plan)
        if self._tapped:
            show_logits(plan, logits)
        return self._take(plan, self.sampler.sample(logits, edits, plan), computed)

    def _sample_drafted(
        self, plan: Plan, drafts: DraftedRows, rows: Sequence[int], computed: Plan | None = None
    ) -> list[Output]:
        """Sample and commit a position of each of ``plan.sampled`` of a step with drafts. Only the
        logits that somebody wants are looked at.

        Args:
            plan: Plan of the rows.
            drafts: Logits of the step.
            rows: Number of each row in it.
            computed: Plan that `Model.forward` was given, where these are its first positions.
        """
        edits = plan_edits(plan)
        known, wanted = known_and_wanted(plan.sampled, edits)
        samples = Samples([0] * len(rows))
        if known:
            samples.put(known, self.sampler.force(edits.of(known), len(known)))
        if wanted:
            some = Plan((), (), tuple([plan.sampled[row] for row in wanted]))
            logits = drafts.take([rows[row] for row in wanted])
            if self._tapped:
                show_logits(some, logits)
            samples.put(wanted, self.sampler.sample(logits, edits.of(wanted), some))
        return self._take(plan, samples, computed)

    def _take(self, plan: Plan, samples: Samples, computed: Plan | None) -> list[Output]:
        self.scheduler.settle(plan)
        if computed is not None:
            self.scheduler.spoil(computed, [one for one in self.model.spoiled(computed) if one.pages])
        samples.errors = spoiled_errors(plan) | samples.errors
        if self._tapped:
            samples.errors |= tap_errors(plan)
        return self.scheduler.commit(plan, samples)

    def _recompute_spoiled(self, plan: Plan, logits: torch.Tensor) -> tuple[Plan, torch.Tensor]:
        """Preempt rows with a draft of which a token is not finite; plan and logits of the others.

        If that token is a drafted one, NaN may also be in the rows before it, and in their KV:
        decoded alone they might be finite. After a preemption they are computed without a draft. A
        companion is preempted with its owner.
        """
        again = drafted_owners(plan, plan, self.model.spoiled(plan))
        if not again:
            return plan, logits
        for request in again:
            self.scheduler.queues.preempt(request)
        left, rows = plan.without(again)
        return left, logits[rows]

    def _verify(self, plan: Plan, drafts: DraftedRows, outputs: list[Output]) -> dict[int, int]:
        """Sample the drafted positions, each as in a step of its own whose logits are known.

        A row continues while the sampled token is the drafted one. Then the rest is rolled back.

        Args:
            plan: Plan of the step, whose first positions have been committed.
            drafts: Logits of all positions.
            outputs: Outputs of the first positions; those of the drafted ones are added.

        Returns:
            Accepted tokens of each decode row's draft, by the ``id`` of its request.
        """
        first, accepted = plan.first_rows(), dict.fromkeys(map(id, plan.decode), 0)
        depth, latest = 0, outputs[: len(plan.decode)]
        rows: Sequence[int] = range(len(plan.decode))
        while rows := agreeing_rows(plan, depth, rows, latest):
            depth += 1
            requests = tuple(plan.decode[row] for row in rows)
            self.scheduler.settle_drafted(requests)
            position = Plan(requests, (), requests)
            try:
                latest = self._sample_drafted(position, drafts, [first[row] + depth for row in rows])
            except NotSampled:
                outputs += self._isolate(position)
                break
            outputs += latest
            for request in requests:
                accepted[id(request)] = depth
        self.scheduler.roll_back(plan)
        return accepted

    def _isolate(self, plan: Plan) -> list[Output]:
        """Preempt all requests, so that their rows are computed again and sampled one by one.

        Those that processors follow the logits of were perhaps followed already: they end.

        Args:
            plan: Plan that `_sample` has raised `NotSampled` for.

        Returns:
            Outputs of the requests that end.
        """
        running, ended = self.scheduler.queues.running, []
        logger.exception("sampling for %d requests failed: each is sampled alone until it ends", len(plan.sampled))
        self.sampler.suspect(running)
        for request in running:
            self.scheduler.queues.preempt(request)
        for request in plan.sampled:
            if request.chain is not None and request.chain.observes_logits:
                self.scheduler.abort(request.id)
                ended.append(Output(request.id, finish_reason="error", error=_LOST_STATE, chain=request.chain))
        return ended

    def _leave(self, plan: Plan, outputs: list[Output]) -> list[Output]:
        """The outputs of a step that may be sent; notes which requests have ended."""
        ended = {output.request_id: output for output in outputs if output.finish_reason is not None}
        if ended:
            self._tapped -= ended.keys()
            self.sampler.forget(ended)
            for request in plan.sampled:
                if request.id in ended:
                    self.speculator.remember(request, ended[request.id])
        self._committed = None
        return self._held.release(plan.sampled, outputs)


def show_logits(plan: Plan, logits: torch.Tensor) -> None:
    """Show every tap the row that its request's next token is sampled from."""
    for row, request in enumerate(plan.sampled):
        request.show_generated(logits[row])


def tap_errors(plan: Plan) -> dict[int, str]:
    """Errors of sampled rows, by row: of requests whose tap has failed."""
    return {row: request.tap_error for row, request in enumerate(plan.sampled) if request.tap_error is not None}


def spoiled_errors(plan: Plan) -> dict[int, str]:
    """Errors of sampled rows, by row: of requests that are spoiled, or their companions."""
    rows = enumerate(plan.sampled)
    return {row: _SPOILED for row, one in rows if one.is_spoiled or (one.companion and one.companion.is_spoiled)}


def plan_edits(plan: Plan) -> Edits:
    """Edits that the chains of the sampled rows make; needs no logits."""
    chains = [(row, request.chain) for row, request in enumerate(plan.sampled) if request.chain is not None]
    return Edits(*plan_rows(chains)) if chains else Edits()


def make_stepper(config: EmbeddedConfig, model: Model, num_kv_blocks: int, draft: HfModel | None = None) -> Stepper:
    """A stepper for `model` with `num_kv_blocks` KV blocks; `StartupError` if they do not fit.

    Args:
        config: Settings of the engine.
        model: Model that answers.
        num_kv_blocks: Blocks of its KV store.
        draft: Draft model; None for none.
    """
    page_size = choose_page_size(config.kv_block_size, config.context_length or model.context_length)
    num_pages = num_kv_blocks * config.kv_block_size // page_size
    model.allocate_kv(num_pages, page_size)
    cache = KvCache(num_pages, page_size, config.kv_block_size, is_dense=model.wants_dense_kv)
    draft_model = None if draft is None else with_pages(config, draft, model, num_kv_blocks * config.kv_block_size)
    mixed = config.max_mixed_chunk or MixedSteps()
    scheduler = Scheduler(cache, config.max_num_seqs, config.max_num_batched_tokens, mixed, draft_model=draft_model)
    speculative = SpeculativeConfig.parse(config.speculative_config, _usual_method(model))
    if draft_model is None or speculative.method != "draft_model":
        return Stepper(model, scheduler, Speculator(speculative))
    return Stepper(model, scheduler, Speculator(speculative, partial(DraftModelProposer, draft_model)))


def _usual_method(model: Model) -> str:
    """The method of speculation where the settings name none: n-grams where drafts change no token,
    and a step of a few more takes little longer.
    """
    return "ngram" if model.numerics == "exact" and model.device.type == "cpu" else "none"
