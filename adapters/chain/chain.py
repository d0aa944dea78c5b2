"""`ProcessorChain`: the ordered processors of one choice of one request, over one token history."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from time import thread_time
from typing import Literal

from adapters.chain.failures import Failures, ProcessorFailed
from adapters.chain.history import History
from adapters.chain.members import Act, Member, in_order, member_of
from adapters.chain.plan import PlannedEdits, RowPlan
from adapters.chain.receipts import Receipt
from adapters.chain.thinking_scope import ThinkingScope
from adapters.chain.usual_tokens import can_prefer, prefer_usual_tokens, sure_member
from adapters.contract import BacktrackingProcessor, Context, Processor, Reads, Scope, ShapingProcessor, Stage
from adapters.contract.companion import CompanionProcessor
from adapters.interrupts import is_interrupt

DEFAULT_STEP_BUDGET_S = 0.1
"""CPU time of its thread that a third-party processor may take for one step, seconds."""

TIMED_EVERY = 16
"""Built-ins are timed at one position in this many, which counts for all of them: reading the clock
takes as long as most of their edits. Third-party processors are timed at every position.
"""

Mode = Literal["aggregated", "disaggregated", "local prefill", "migrated"]


class ProcessorChain:
    """The ordered processors of one choice, which share one copy of the history.

    Args:
        processors: Processors in the order of the request; sorted by stage, ties keep it.
        context: Context of the request.
        scopes: Scope of each processor, ``all`` by default.
        step_budget_s: CPU time of its thread that a third-party processor may take for one step,
            seconds (wall time would depend on the load); by default `DEFAULT_STEP_BUDGET_S`.
        attribution: Keep per-token attribution in the receipt.
        order: Names of processors of the stages temperature and truncation, in the order in which
            they are applied. Those of these stages that are not named are applied after them.
        tokens: Empty list to keep the history in, a new one by default.

    Attributes:
        members: The processors with scope and record, in the order in which they are applied.
        tokens: Prompt and generated tokens.
        receipt: Record of what each processor did.
        failures: Recorder of the chain's failures.
        has_shaping: True if a member maps the whole row, so that the result must be checked.
        is_checked: True if the result must be checked for one of these reasons: `has_shaping`, or
            edits of a third party, whose numbers may be too large.
        shapes_late: True if a member acts at the temperature stage or later, or an order of them is
            given: the request's own truncation then joins the chain.
        observes_logits: True if some state can only be rebuilt by replaying on logits
            (`adapters.chain.batch.replay`).
        needs_last_token: True if it needs the last token, which overlapped scheduling shows late.
        foresees: True if `foresee` may ever find tokens.
        backtracks: True if one of them does: the engine holds tokens and calls `rewind_if_asked`.
        companion: The processor that needs a second row of logits of the engine, None if none does.
        wants_receipt: Whether the request asked for its receipt.
        wants_random_sampling: Whether a request that sets no temperature, top-k or top-p is sampled
            randomly instead of greedily, because it names a processor that acts at the temperature
            stage or later. The catalogue overrides it for processors of the operator's policy.
        speculates: Whether tokens may be drafted for the request.
        masks_alone: Whether nothing but the chain masks tokens, so that it may force the usual
            token of a text (`SteeringProcessor.usual_token`). False by default: who serves the
            chain knows.

    Raises:
        ValueError: a scope is given and the model has no thinking tags.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        context: Context,
        *,
        scopes: Sequence[Scope] | None = None,
        step_budget_s: float | None = None,
        attribution: bool = False,
        order: Sequence[str] = (),
        tokens: list[int] | None = None,
    ) -> None:
        scopes = ["all"] * len(processors) if scopes is None else scopes
        members = [member_of(p, s, context.vocabulary) for p, s in zip(processors, scopes, strict=True)]
        scoped = [member for member in members if member.scope != "all"]
        self.context = context
        self.order = tuple(order)
        self.members: list[Member] = []
        self.tokens: list[int] = [] if tokens is None else tokens
        self.receipt = Receipt([], attribution=attribution, seed=context.seed)
        self.wants_receipt = False
        self.speculates = True
        self.masks_alone = False
        self._num_tokens = context.vocabulary.num_tokens
        self._scope = ThinkingScope(in_order(scoped, order), context) if scoped else None
        self._set_members(members)
        self.wants_random_sampling = any(member.stage >= Stage.TEMPERATURE for member in self.members)
        self._planned = PlannedEdits()
        step_budget_s = DEFAULT_STEP_BUDGET_S if step_budget_s is None else step_budget_s
        self.failures = Failures(self.tokens, self.members, self._planned, step_budget_s)
        self._history = History(self.tokens, self.members, self._scope, self.failures)

    def _set_members(self, members: Sequence[Member]) -> None:
        self.members[:] = in_order(members, self.order)
        self.receipt.records = [member.record for member in self.members]
        processors = [member.processor for member in self.members]
        self.has_shaping = any(isinstance(processor, ShapingProcessor) for processor in processors)
        self.is_checked = self.has_shaping or any(member.is_third_party for member in self.members)
        self.shapes_late = bool(self.order) or any(member.stage >= Stage.TEMPERATURE for member in self.members)
        self.observes_logits = any(processor.observes_logits for processor in processors)
        reads = any(processor.reads is not Reads.NOTHING for processor in processors)
        self.needs_last_token = reads or self._scope is not None
        self.foresees = any(member.foresees for member in self.members)
        self._prefers = can_prefer(self.members)
        self._sure = sure_member(self.members) if self._prefers and self._scope is None else None
        self.backtracks = any(isinstance(processor, BacktrackingProcessor) for processor in processors)
        self.companion = next((one for one in processors if isinstance(one, CompanionProcessor)), None)

    def add(self, processors: Sequence[Processor], *, last: bool = False) -> None:
        """Add ``processors`` before the chain's own of the same stage, or after them with ``last``.

        They start with the same history.

        Raises:
            ProcessorFailed: one of them raised on the history.
        """
        added = [member_of(processor, "all", self.context.vocabulary) for processor in processors]
        self._set_members([*self.members, *added] if last else [*added, *self.members])
        for member in added:
            self._history.show(member)
        if any(isinstance(processor, BacktrackingProcessor) for processor in processors):
            self._planned.acts = []
            self.receipt.rewind(self.prompt_length)
            self._history.replay()

    @property
    def is_too_short(self) -> bool:
        """True while a minimum length is not reached.

        A minimum with scope ``thinking`` counts inside the thinking section only, every other
        everywhere.

        Raises:
            ProcessorFailed: a processor raised.
        """
        is_thinking = self._scope is not None and self._scope.is_thinking
        for member in self.members:
            try:
                if (member.scope != "thinking" or is_thinking) and member.processor.is_too_short:
                    return True
            except BaseException as error:  # the processor boundary: third-party code
                raise self.failures.raised(member, error) from error
        return False

    @property
    def position(self) -> int:
        """Absolute index of the token to be sampled next."""
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return self._history.prompt_length

    # History

    def start(self, prompt: Sequence[int], generated: Sequence[int] = (), *, mode: Mode = "aggregated") -> None:
        """Begin after ``prompt``; ``generated`` tokens of an earlier run are replayed.

        Raises:
            ValueError: there are generated tokens and the chain observes logits; use
                `adapters.chain.batch.replay`.
            ProcessorFailed: a processor raised on the prompt, or on the generated tokens.
        """
        if generated and self.observes_logits:
            names = ", ".join(m.name for m in self.members if m.processor.observes_logits)
            raise ValueError(f"{names} can be rebuilt only by replaying on logits")
        self.failures.newest = None
        self._history.start(prompt)
        self.receipt.begin(mode, len(prompt), len(generated))
        for token_id in generated:
            self._history.append(token_id)
        if generated:  # now: the next step has a budget
            self._history.catch_up()

    def accept(self, token_id: int, position: int) -> None:
        """Take the sampled token. Idempotent by position; a different token there rewinds first.

        Raises:
            ValueError: the position is inside the prompt, or beyond the next one.
            ProcessorFailed: a backtracking processor raised.
        """
        tokens = self.tokens
        if position != len(tokens):
            if not self.prompt_length <= position < len(tokens):
                raise ValueError(f"position {position} is not between {self.prompt_length} and {len(tokens)}")
            if tokens[position] == token_id:
                return
            self.rewind(position)
        for record, _, _, kind, masked in self._planned.acts:
            self.receipt.add(record, position, token_id, kind, masked)
        self._planned.acts = []
        self._history.append(token_id)

    def replay_token(self, token_id: int) -> None:
        """Take a token that an earlier run sampled; counted as replayed."""
        self._planned.acts = []
        self._history.append(token_id)
        self.receipt.replayed += 1

    def record(self, token_id: int, edits: Sequence[tuple[int, str, int]]) -> None:
        """Take the next token with the `last_edits` of the copy in the engine's process.

        Runs no processor: this copy only keeps the receipt, in the worker's process.
        """
        for index, kind, masked in edits:
            self.receipt.add(self.members[index].record, self.position, token_id, kind, masked)
        self.tokens.append(token_id)

    def rewind(self, position: int) -> None:
        """Rewind to the tokens before ``position``, as when draft tokens are rejected.

        Raises:
            ValueError: the position is inside the prompt or in the future.
        """
        self._history.rewind(position)
        self._planned.acts = []
        self.receipt.rewind(position)

    def sync(self, tokens: Sequence[int], *, unchanged: int = 0) -> None:
        """Make the history equal to ``tokens`` (prompt + generated), from the first difference on.

        Args:
            tokens: The whole history.
            unchanged: Length of the prefix known to equal the chain's own history, which is not
                compared. By default everything is compared, O(length): too slow for every step of
                an engine, whose caller knows better (`adapters.trtllm.adapter.ChainAdapter`).

        Raises:
            ValueError: ``tokens`` is shorter than the prompt or differs from it: another request's
                history.
        """
        if len(tokens) < self.prompt_length:
            raise ValueError(f"history of {len(tokens)} tokens is shorter than the prompt of {self.prompt_length}")
        same = self._history.num_equal(tokens, unchanged)
        if same < self.prompt_length:
            raise ValueError(f"history differs from the prompt at position {same}")
        if same < len(self.tokens):
            self.rewind(same)
        for position in range(same, len(tokens)):
            self.accept(tokens[position], position)

    # The step

    def plan(self) -> RowPlan:
        """The edits for the row of the token at `position`. Needs no logits; idempotent.

        Raises:
            ProcessorFailed: a processor raised or was over its budget, or the chain cannot be
                satisfied here.
        """
        return self._plan(self._sure if self.masks_alone else None)

    def _plan(self, sure: Member | None) -> RowPlan:
        """See `plan`.

        Args:
            sure: Member that may force a token before the others' edits are known; if they forbid
                it, all is planned anew without one.
        """
        plan, scope, position = RowPlan([]), self._scope, len(self.tokens)
        acts = self._planned.acts = plan.acts
        forced: Act | None = None  # by it
        weight = 0 if position % TIMED_EVERY else TIMED_EVERY
        for member in self.members if scope is None else scope.active(self.members):
            act = member.act
            try:
                if position >= member.same_until:
                    with member.kept():
                        if member.is_third_party and member.processor.begins_anew:
                            member.processor.catch_up()  # with the whole history: a budget is for a step
                        times = 1 if member.is_third_party else weight
                        began = thread_time() if times else 0.0
                        edit = member.step(member is sure) if scope is None else scope.step(member)
                    if times:
                        self.failures.charge(member, thread_time() - began, times)
                    act = member.act_of(edit, self._num_tokens)
                if act is not None:
                    acts.append(act)
                    plan.num_masked += act[4]
                    if act[3] == "forced":
                        if member is sure:
                            forced = act
                        else:
                            plan.force_by(member, act)
            except BaseException as error:  # the processor boundary: third-party code
                raise self.failures.raised(member, error) from error
        if self._history.backtracking is not None:
            plan.mask(self._history.backtracking.acts())
        if scope is not None:
            plan.mask(scope.end_bans())
        if forced is not None and sure is not None:
            if plan.forced_by is None:
                plan.force_by(sure, forced)
                if plan.force is not None and plan.masks_permit(plan.force):
                    return plan
            return self._plan(None)
        if plan.forced_by is not None or plan.num_masked >= self._num_tokens:
            self.failures.check(plan)
        self._prefer(plan)
        return plan

    def _prefer(self, plan: RowPlan) -> None:
        if self._prefers and self.masks_alone and plan.force is None:
            members = self.members if self._scope is None else self._scope.decisive(self.members)
            prefer_usual_tokens(plan, members, self.failures)

    def plan_each(self) -> list[tuple[Member, RowPlan]]:
        """`plan`, member by member in the order in which they are applied, to look at one position.

        A forced token leaves nothing else to apply. Whether all can be satisfied is not checked.

        Raises:
            ProcessorFailed: a processor raised.
        """
        backtracking = self._history.backtracking
        self._planned.acts = []
        found: list[tuple[Member, RowPlan]] = []
        for member in self._active_members():
            try:
                edit = member.step() if self._scope is None else self._scope.step(member)
                act = member.act_of(edit, self._num_tokens)
            except BaseException as error:  # the processor boundary: third-party code
                raise self.failures.raised(member, error) from error
            acts = [] if act is None else [act]
            if backtracking is not None:
                acts += backtracking.acts(member)
            found += [(member, RowPlan.of(member, each)) for each in acts]
        if self._scope is not None and (binding := self._scope.binding) is not None:
            found += [(binding, RowPlan.of(binding, each)) for each in self._scope.end_bans()]
        forced = [each for each in found if each[1].force is not None]
        whole = RowPlan([act for _, plan in found for act in plan.acts])
        if not forced:
            self._prefer(whole)
            found = [(member, RowPlan.of(member, act)) for (member, _), act in zip(found, whole.acts, strict=True)]
        self._planned.acts = whole.acts
        return sorted(forced[:1] or found, key=lambda each: bool(each[1].late))  # masks before shaping of their stage

    def _active_members(self) -> Sequence[Member]:
        return self.members if self._scope is None else self._scope.active(self.members)

    def peek(self, draft: Sequence[int]) -> list[RowPlan]:
        """Plans for the next position and after each draft token; the history is left as it was.

        Raises:
            ProcessorFailed: as `plan`, for the next position only. The list is shorter than
                ``len(draft) + 1`` if the chain rejects a draft token, or fails, at a later
                position.
        """
        position = self.position
        plans = [self.plan()]
        acts = self._planned.acts
        try:
            for token_id in draft:
                if not plans[-1].permits(token_id):
                    break
                self._history.append(token_id)
                plans.append(self.plan())
        except ProcessorFailed:
            self.failures.newest = None
        finally:
            self.rewind(position)
            self._planned.acts = acts
        return plans

    def foresee(self, limit: int) -> Sequence[int]:
        """The tokens that the chain is about to force, or to leave alone, at most ``limit``.

        A guess, for speculation. No third-party processor is called for it, and the history and the
        receipt are left as they were.
        """
        for member in self._active_members():
            if member.foresees:
                try:
                    member.processor.catch_up()
                    found = member.processor.foresee(limit)
                except BaseException as error:  # the processor boundary: the next plan shows what is wrong
                    if is_interrupt(error):
                        raise
                    return ()
                if found:
                    return found
        return ()

    def last_edits(self) -> list[tuple[int, str, int]]:
        """Edits of the last planned position: member index, kind, number of masked entries."""
        return self._planned.by_index(self.members)

    @property
    def held_from(self) -> int | None:
        """Position of the first token that may still be sampled again, None if none may.

        No token before it is rewound, whatever tokens come: those may be sent.
        """
        backtracking = self._history.backtracking
        return None if backtracking is None else backtracking.held_from

    @property
    def num_ruled_out(self) -> int:
        """Number of tokens that were sampled at this position, rewound and masked."""
        backtracking = self._history.backtracking
        return 0 if backtracking is None else backtracking.num_ruled_out

    def rewind_if_asked(self, sent: int = 0, *, ends: bool = False) -> int | None:
        """Rewind to where a backtracking processor asks for, and mask there the token that was.

        Returns:
            The position, None if no processor asks for a rewind.

        Args:
            sent: Position before which all tokens were sent: none of them is rewound.
            ends: Whether the answer ends here.

        Raises:
            ProcessorFailed: a processor raised, or asks for a token that was sent.
        """
        backtracking = self._history.backtracking
        position = None if backtracking is None else backtracking.rule_out_first(sent, ends=ends)
        if position is not None:
            self.rewind(position)
        return position

    def rule_out(self, token_id: int) -> bool:
        """Mask a token here that an earlier run, which is replayed, has sampled here and rewound.

        Returns:
            False if no processor can have asked for that: the earlier run did not sample it.

        Raises:
            ProcessorFailed: a processor raised.
        """
        backtracking = self._history.backtracking
        return backtracking is not None and backtracking.rule_out(token_id)

    def forget_ruled_out(self) -> None:
        """Mask nothing of what was sampled and rewound: another model samples from here on."""
        if self._history.backtracking is not None:
            self._history.backtracking.forget_ruled_out()

    def copy_ruled_out(self, other: ProcessorChain) -> None:
        """Mask what ``other``, a chain of the same request and history, masks after rewinds."""
        mine, theirs = self._history.backtracking, other._history.backtracking
        if mine is not None and theirs is not None:
            mine.copy_ruled_out(theirs)

    @property
    def suspects(self) -> str:
        """Names of the processors of third parties, or of all, for what any of them may have done
        where the chain is not at hand.
        """
        names = [member.name for member in self.members if member.is_third_party]
        return ", ".join(dict.fromkeys(names or [member.name for member in self.members])) or "chain"

    def unpicklable(self) -> str:
        """Name of the first processor that cannot be pickled; that of the chain if each can."""
        for member in self.members:
            try:
                pickle.dumps(member.processor)
            except BaseException as error:  # of any class: third parties' processors
                if is_interrupt(error):
                    raise
                return member.name
        return "the chain"

    @property
    def failure(self) -> ProcessorFailed | None:
        """The newest failure, None while there is none."""
        return self.failures.newest

    def fail(self, name: str, reason: str, message: str) -> ProcessorFailed:
        """Record that processor ``name`` failed; returns the failure to raise or report."""
        return self.failures.fail(name, reason, message)
