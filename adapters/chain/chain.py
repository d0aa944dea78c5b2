"""`ProcessorChain`: the ordered processors of one choice of one request, over one token history."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from time import thread_time
from typing import Any, Literal

from adapters.chain.backtracking import Backtracking
from adapters.chain.plan import Act, Member, ProcessorFailed, RowPlan
from adapters.chain.receipts import ProcessorRecord, Receipt
from adapters.chain.scoped import ScopedProcessors
from adapters.contract import (
    Allow,
    BacktrackingProcessor,
    Ban,
    Context,
    Edit,
    Force,
    MalformedEdit,
    Processor,
    Reads,
    Scope,
    ShapingProcessor,
    Stage,
    StateLost,
    ThinkingTracker,
    Unsatisfiable,
    bitmask_of,
    check_edit,
    is_allowed,
)
from adapters.vocabulary import Vocabulary

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
        processors: In the order of the request; sorted by stage, ties keep that order.
        context: Of the request.
        scopes: Scope of each processor, ``all`` by default.
        step_budget_s: CPU time of its thread that a third-party processor may take for one step,
            seconds; wall time would depend on the machine's load. `DEFAULT_STEP_BUDGET_S` by
            default.
        attribution: Keep per-token attribution in the receipt.
        order: Names of processors of the stages temperature and truncation, in the order in which
            they are applied. Those of these stages that are not named are applied after them.

    Attributes:
        has_shaping: A member maps the whole row, so that the result must be checked.
        failure: Why the chain failed, None while it has not.
        wants_receipt: Whether the request asked for its receipt.
        wants_random_sampling: Whether a request that sets no temperature, top-k or top-p is sampled
            randomly instead of greedily, because it names a processor that acts at the temperature
            stage or later. The catalogue overrides it for processors of the operator's policy.
        speculates: Whether tokens may be drafted for the request.

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
    ) -> None:
        scopes = ["all"] * len(processors) if scopes is None else scopes
        members = [_member(p, s, context.vocabulary) for p, s in zip(processors, scopes, strict=True)]
        self.order = tuple(order)
        self.members = self._in_order(members)
        self.context = context
        self.step_budget_s = DEFAULT_STEP_BUDGET_S if step_budget_s is None else step_budget_s
        self.receipt = Receipt([member.record for member in self.members], attribution=attribution, seed=context.seed)
        self.tokens: list[int] = []
        self.prompt_length = 0
        self.failure: ProcessorFailed | None = None
        self.wants_receipt = False
        self.speculates = True
        self.wants_random_sampling = any(member.processor.stage >= Stage.TEMPERATURE for member in self.members)
        self.has_shaping = _any_shapes(self.members)
        self._backtracking = self._backtracking_of(self.members)
        self._pending: list[Act] = []
        self._derived: dict[Hashable, Any] = {}
        self._num_tokens = context.vocabulary.num_tokens
        scoped = [member for member in self.members if member.scope != "all"]
        self._tracker = _tracker(context) if scoped else None
        self._scoped = None if self._tracker is None else _scoped(scoped, self._tracker)
        self._binding = next((member for member in scoped if _binds_the_answer(member)), None)
        self._end_ban = Ban.of(context.end_token_ids - {*context.think_end})

    # Facts

    @property
    def observes_logits(self) -> bool:
        """True if some state can only be rebuilt by replaying on logits.

        See `adapters.chain.batch.replay`.
        """
        return any(member.processor.observes_logits for member in self.members)

    @property
    def shapes_late(self) -> bool:
        """True if a member acts at the temperature stage or later, or an order of them is given.

        The request's own truncation then joins the chain.
        """
        return bool(self.order) or any(member.processor.stage >= Stage.TEMPERATURE for member in self.members)

    @property
    def needs_last_token(self) -> bool:
        """True if the chain needs the last token, which overlapped scheduling shows late."""
        return self._scoped is not None or any(m.processor.reads is not Reads.NOTHING for m in self.members)

    @property
    def is_too_short(self) -> bool:
        """True while a minimum length is not reached.

        A minimum with scope ``thinking`` counts inside the thinking section only, every other
        everywhere.
        """
        is_thinking = self._tracker is not None and self._tracker.thinking
        members = (member for member in self.members if member.scope != "thinking" or is_thinking)
        return any(member.processor.is_too_short for member in members)

    @property
    def position(self) -> int:
        """Absolute index of the token to be sampled next."""
        return len(self.tokens)

    def _in_order(self, members: Sequence[Member]) -> list[Member]:
        """``members`` as they are applied: by stage, and by the request's order if it has one."""
        late = (Stage.TEMPERATURE, Stage.TRUNCATION)
        if not self.order:
            return sorted(members, key=lambda member: member.turn)
        places = {name: place for place, name in enumerate(self.order)}
        for member in members:
            member.turn = Stage.TEMPERATURE if member.processor.stage in late else member.processor.stage

        def key(member: Member) -> tuple[int, int]:
            behind = len(places) + member.processor.stage
            return member.turn, places.get(member.name, behind) if member.processor.stage in late else 0

        return sorted(members, key=key)

    # History

    def add(self, processors: Sequence[Processor], *, last: bool = False) -> None:
        """Add ``processors`` before the chain's own of the same stage, or after them with ``last``.

        They start with the same history.

        Raises:
            ProcessorFailed: one of them raised on the history.
        """
        added = [_member(p, "all", self.context.vocabulary) for p in processors]
        both = [*self.members, *added] if last else [*added, *self.members]
        self.members = self._in_order(both)
        self.receipt.records = [member.record for member in self.members]
        self.has_shaping = _any_shapes(self.members)
        for member in added:
            self._begin(member)
        if any(isinstance(processor, BacktrackingProcessor) for processor in processors):
            self._backtracking = self._backtracking_of(self.members)
            self._replay_history()

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
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self._derived = {}
        self.failure = None
        if self._scoped is not None:
            self._scoped.reset(prompt)
        for member in self.members:
            self._begin(member)
        if self._backtracking is not None:
            self._backtracking.reset()
            self._backtracking.note()
        self.receipt.begin(mode, len(prompt), len(generated))
        for token_id in generated:
            self._append(token_id)
        if generated:  # now: the next step has a budget
            for member in self.members:
                self._catch_up(member)

    def _begin(self, member: Member) -> None:
        prompt = self.tokens[: self.prompt_length]
        member.same_until = 0
        try:
            shared = self.tokens if member.scope == "all" else None
            member.processor.start(prompt, shared=shared, derived=self._derived)
        except Exception as error:  # the processor boundary: third-party code
            raise self.fail_from(member, error) from error

    def _replay_history(self) -> None:
        """Take the history again token by token, for what was open after each of them."""
        assert self._backtracking is not None
        generated = self.tokens[self.prompt_length :]
        self.rewind(self.prompt_length)
        self._backtracking.note()
        for token_id in generated:
            self._append(token_id)

    def _catch_up(self, member: Member) -> None:
        try:
            member.processor.catch_up()
        except Exception as error:  # the processor boundary: third-party code
            raise self.fail_from(member, error) from error

    def accept(self, token_id: int, position: int) -> None:
        """Take the sampled token. Idempotent by position; a different token there rewinds first.

        Raises:
            ValueError: the position is inside the prompt, or beyond the next one.
            ProcessorFailed: a backtracking processor raised.
        """
        if not self.prompt_length <= position <= len(self.tokens):
            raise ValueError(f"position {position} is not between {self.prompt_length} and {len(self.tokens)}")
        if position < len(self.tokens):
            if self.tokens[position] == token_id:
                return
            self.rewind(position)
        for record, _, _, kind, masked in self._pending:
            record.add(position, kind, masked)
            self.receipt.attribute(position, token_id, record, kind)
        self._pending = []
        self._append(token_id)

    def replay_token(self, token_id: int) -> None:
        """Take a token that an earlier run sampled; counted as replayed."""
        self._pending = []
        self._append(token_id)
        self.receipt.replayed += 1

    def rewind(self, position: int) -> None:
        """Forget every token from ``position`` on, as when draft tokens are rejected.

        Raises:
            ValueError: the position is inside the prompt or in the future.
        """
        if not self.prompt_length <= position <= len(self.tokens):
            raise ValueError(f"cannot rewind to {position}: not between {self.prompt_length} and {len(self.tokens)}")
        self._pending = []
        self.receipt.rewind(position)
        for member in self.members:
            member.same_until = 0
            if member.scope == "all":
                member.processor.rewind_lazily(position)
        if self._scoped is not None:
            self._scoped.rewind(self.tokens, position, self.prompt_length)
        if self._backtracking is not None:
            self._backtracking.rewind(position - self.prompt_length)
        del self.tokens[position:]

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
        same = _num_equal(tokens, self.tokens, unchanged)
        if same < self.prompt_length:
            raise ValueError(f"history differs from the prompt at position {same}")
        if same < len(self.tokens):
            self.rewind(same)
        for position in range(same, len(tokens)):
            self.accept(tokens[position], position)

    def _append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self._scoped is not None:
            self._scoped.append(token_id, len(self.tokens) - self.prompt_length)
        if self._backtracking is not None:
            self._backtracking.note()

    # The step

    def plan(self) -> RowPlan:
        """The edits for the row of the token at `position`. Needs no logits; idempotent.

        Raises:
            ProcessorFailed: a processor raised or was over its budget, or the chain cannot be
                satisfied here.
        """
        plan, tracker, position = RowPlan([]), self._tracker, len(self.tokens)
        acts = self._pending = plan.acts
        weight = 0 if position % TIMED_EVERY else TIMED_EVERY
        for member in self.members if tracker is None else self._active_members():
            act = member.act
            if position >= member.same_until:
                times = 1 if member.is_third_party else weight
                began = thread_time() if times else 0.0
                try:
                    edit = member.step() if tracker is None else self._step(member, tracker)
                except Exception as error:  # the processor boundary: third-party code
                    raise self.fail_from(member, error) from error
                if times:
                    self.charge(member, thread_time() - began, times)
                act = member.act_of(edit, self._num_tokens)
            if act is not None:
                acts.append(act)
                plan.num_masked += act[4]
                if act[3] == "forced":
                    self._force(plan, member, act)
        if self._backtracking is not None:
            for act in self._backtracking.acts(position - self.prompt_length):
                acts.append(act)
                plan.num_masked += act[4]
        if self._binding is not None:
            self._end_outside_thinking(plan, self._binding)
        if plan.forced_by is not None or plan.num_masked >= self._num_tokens:
            self._check(plan)
        return plan

    def plan_each(self) -> list[tuple[Member, RowPlan]]:
        """`plan`, member by member in the order in which they are applied, to look at one position.

        A forced token leaves nothing else to apply. Whether all can be satisfied is not checked.

        Raises:
            ProcessorFailed: a processor raised.
        """
        self._pending = []
        found: list[tuple[Member, RowPlan]] = []
        for member in self.members if self._tracker is None else self._active_members():
            try:
                act = member.act_of(member.step(), self._num_tokens)
            except Exception as error:  # the processor boundary: third-party code
                raise self.fail_from(member, error) from error
            if act is not None:
                found.append((member, RowPlan([act])))
                self._force(found[-1][1], member, act)
            if self._backtracking is not None:
                ruled_out = self._backtracking.acts(self.position - self.prompt_length, member)
                found += [(member, RowPlan([each])) for each in ruled_out]
        if self._binding is not None:
            found.append((self._binding, RowPlan([])))
            self._end_outside_thinking(found[-1][1], self._binding)
        self._pending = [act for _, plan in found for act in plan.acts]
        forced = [each for each in found if each[1].force is not None]
        acting = forced[:1] or [each for each in found if not each[1].is_empty]
        return sorted(acting, key=lambda each: bool(each[1].late))  # masks before shaping of their stage

    def peek(self, draft: Sequence[int]) -> list[RowPlan]:
        """Plans for the next position and after each draft token; the history is left as it was.

        Raises:
            ProcessorFailed: as `plan`, for the next position only. The list is shorter than
                ``len(draft) + 1`` if the chain rejects a draft token, or fails, at a later
                position.
        """
        position = self.position
        plans = [self.plan()]
        pending, self._pending = self._pending, []
        try:
            for token_id in draft:
                if not plans[-1].permits(token_id):
                    break
                self._append(token_id)
                plans.append(self.plan())
        except ProcessorFailed:
            self.failure = None
        finally:
            self.rewind(position)
            self._pending = pending
        return plans

    @property
    def foresees(self) -> bool:
        """Whether `foresee` may ever tell anything."""
        return any(member.foresees for member in self.members)

    def foresee(self, limit: int) -> Sequence[int]:
        """The tokens that the chain is about to force, or to leave alone, as far as it can tell.

        For speculation: a guess at the next tokens, at most ``limit``. No third-party processor is
        called for it, and the history and the receipt are left as they were.
        """
        for member in self.members if self._tracker is None else self._active_members():
            if member.foresees:
                try:
                    member.processor.catch_up()
                    found = member.processor.foresee(limit)
                except Exception:  # the processor boundary: the next plan shows what is wrong
                    return ()
                if found:
                    return found
        return ()

    # Backtracking

    @property
    def backtracks(self) -> bool:
        """Whether a processor backtracks: the engine holds tokens, and calls `rewind_if_asked`."""
        return self._backtracking is not None

    @property
    def held_from(self) -> int | None:
        """Position of the first token that may still be taken back, None if none may.

        No token before it is taken back, whatever tokens come: those may be sent.
        """
        held = None if self._backtracking is None else self._backtracking.held_from
        return None if held is None else self.prompt_length + held

    def rewind_if_asked(self, sent: int = 0, *, ends: bool = False) -> int | None:
        """Rewind to where a processor takes tokens back; the position to sample again, or None.

        The token that was there is masked there from now on.

        Args:
            sent: Position before which all tokens were sent: none of them is taken back.
            ends: Whether the answer ends here.

        Raises:
            ProcessorFailed: a processor raised, or takes back a token that was sent.
        """
        if self._backtracking is None:
            return None
        begin = self.prompt_length
        index = self._backtracking.rule_out_first(self.tokens, begin, sent - begin, ends=ends)
        if index is None:
            return None
        self.rewind(begin + index)
        return begin + index

    def rule_out(self, token_id: int) -> bool:
        """For a replay: mask a token here that an earlier run has sampled here and taken back.

        Returns:
            False if no processor can have taken it back: the earlier run did not sample it.

        Raises:
            ProcessorFailed: a processor raised.
        """
        if self._backtracking is None:
            return False
        position = self.position
        self.tokens.append(token_id)
        try:
            return self._backtracking.rule_out(token_id, position - self.prompt_length)
        finally:
            for member in self.members:
                if member.scope == "all":
                    member.processor.rewind_lazily(position)
            del self.tokens[position:]

    def copy_ruled_out(self, other: ProcessorChain) -> None:
        """Mask what ``other`` masks as taken back: a chain of the same request and history."""
        if self._backtracking is not None and other._backtracking is not None:
            self._backtracking.copy_ruled_out(other._backtracking)

    def _backtracking_of(self, members: Sequence[Member]) -> Backtracking | None:
        able = [member for member in members if isinstance(member.processor, BacktrackingProcessor)]
        return Backtracking(able, self.fail_from) if able else None

    def _active_members(self) -> list[Member]:
        assert self._tracker is not None
        section = "thinking" if self._tracker.thinking else "answer"
        return [member for member in self.members if member.scope in ("all", section)]

    def charge(self, member: Member, seconds: float, times: int = 1) -> None:
        """Record CPU time of one step, and enforce the budget of a third-party processor.

        Args:
            member: Whose step it was.
            seconds: CPU time of the step.
            times: Steps that it stands for in the record.

        Raises:
            ProcessorFailed: it took longer than the budget.
        """
        member.record.seconds += seconds * times
        failure = self.over_budget(member, seconds, self.step_budget_s)
        if failure is not None:
            raise failure

    def over_budget(self, member: Member, seconds: float, budget_s: float) -> ProcessorFailed | None:
        """The failure of a third-party processor that took more than ``budget_s``, else None."""
        if not member.is_third_party or seconds <= budget_s:
            return None
        message = f"took {seconds * 1e3:.0f} ms of CPU time for one step, the budget is {budget_s * 1e3:.0f} ms"
        return self.fail(member.name, "budget", message)

    def _force(self, plan: RowPlan, member: Member, act: Act) -> None:
        """Note the token that an edit forces, if it forces one."""
        edit = act[2]
        if not isinstance(edit, Force):
            return
        if plan.forced_by is not None and plan.force != edit.token_id:
            message = f"forces token {edit.token_id} where {plan.forced_by.name} forces {plan.force}"
            raise self.fail(member.name, "unsatisfiable", f"{message} at position {self.position}")
        plan.forced_by, plan.force = member, edit.token_id

    def _step(self, member: Member, tracker: ThinkingTracker) -> Edit | Member | None:
        """A member's edit; with the opening tag allowed where the model may open a section."""
        opening_id = tracker.opening_id
        if opening_id is None or member.scope != "answer":
            return member.step()
        size = self.context.vocabulary.size
        if len(self.tokens) == self.prompt_length:
            return _beside(member.step(), opening_id, size)
        if not _binds_the_answer(member):
            return member.step()
        begun = self.tokens[self.prompt_length :]
        try:
            if _lets_begin(member, self.prompt_length, begun):
                return _beside(member.step(), opening_id, size)
        except Unsatisfiable:  # the history is the beginning of the tag, and of no answer
            pass
        return Allow.of({opening_id}, size)

    def _end_outside_thinking(self, plan: RowPlan, member: Member) -> None:
        """Mask end tokens inside thinking, where ``member`` constrains the answer.

        An end token there would end the request without an answer.
        """
        if self._tracker is not None and self._tracker.thinking and len(self._end_ban.token_ids):
            num_masked = len(self._end_ban.token_ids)
            plan.acts.append((member.record, member.stage, self._end_ban, "masked", num_masked))
            plan.num_masked += num_masked

    def _check(self, plan: RowPlan) -> None:
        """Raise if a mask forbids the forced id, or masks leave no token."""
        if plan.forced_by is not None and plan.force is not None:
            if not plan.masks_permit(plan.force):
                message = f"forces token {plan.force}, which another processor forbids"
                raise self.fail(plan.forced_by.name, "unsatisfiable", f"{message} at position {self.position}")
        elif not plan.leaves_a_token():
            raise self.no_token_left(["masked"])

    def no_token_left(
        self, kinds: Sequence[str] = ("masked", "shaped", "biased"), *, before: Member | None = None
    ) -> ProcessorFailed:
        """Record that no token is left at the last planned position.

        The processors that made an edit of one of ``kinds`` are named in the failure.

        Args:
            kinds: Kinds of edits.
            before: The member that received the row without a token; members after it are not
                named.
        """
        acted = self._pending if before is None else list(self._acted_before(before))
        names = dict.fromkeys(record.name for record, _, _, kind, _ in acted if kind in kinds)
        return self.fail(", ".join(names) or "model", "unsatisfiable", f"no token is left at position {self.position}")

    def _acted_before(self, member: Member) -> Iterator[Act]:
        """Edits recorded for the last planned position that are applied before ``member``."""
        is_late, is_before = member.processor.stage >= Stage.MASK, True
        for act in self._pending:  # in the order law's order; but masks precede all shaping at their stage
            record, _, _, kind, _ = act
            is_before = is_before and record is not member.record
            if is_before or (is_late and kind == "masked"):
                yield act

    def fail_from(self, member: Member, error: Exception) -> ProcessorFailed:
        """Record that ``member`` raised ``error``; returns the failure to raise or report."""
        if isinstance(error, ProcessorFailed):
            return self.fail(error.processor, error.reason, error.message)
        if isinstance(error, MalformedEdit | StateLost):
            return self.fail(member.name, "raised", f"{error} at position {self.position}")
        if isinstance(error, Unsatisfiable):
            return self.fail(member.name, "unsatisfiable", f"{error} at position {self.position}")
        return self.fail(member.name, "raised", f"raised {type(error).__name__} at position {self.position}")

    def fail(self, name: str, reason: str, message: str) -> ProcessorFailed:
        """Record that processor ``name`` failed; returns the failure to raise or report."""
        self._pending = []
        for member in self.members:  # the last step of one of them did not end
            member.same_until = 0
        self.failure = ProcessorFailed(name, reason, message)  # never raised: it holds no stack frame
        return ProcessorFailed(name, reason, message)

    # Two copies of one chain: one edits in the engine's process, the other keeps the receipt in the
    # worker's process

    def last_edits(self) -> list[tuple[int, str, int]]:
        """Edits of the last planned position: member index, kind, number of masked entries."""
        indices = {id(member.record): index for index, member in enumerate(self.members)}
        return [(indices[id(record)], kind, masked) for record, _, _, kind, masked in self._pending]

    def record(self, token_id: int, edits: Sequence[tuple[int, str, int]]) -> None:
        """Take the next token with the edits of another copy's `last_edits`; runs no processor."""
        for index, kind, masked in edits:
            record = self.members[index].record
            record.add(self.position, kind, masked)
            self.receipt.attribute(self.position, token_id, record, kind)
        self.tokens.append(token_id)

    def report(self, *, attribution: bool = True) -> dict[str, Any]:
        """The receipt so far as JSON data; ``attribution`` (if kept) in the last one only."""
        return self.receipt.as_json(attribution=attribution)


def _num_equal(tokens: Sequence[int], known: list[int], start: int) -> int:
    """Length of the common prefix, at least ``start``."""
    end = min(len(tokens), len(known))
    while start < end:
        stop = min(start + 1024, end)
        if list(tokens[start:stop]) != known[start:stop]:
            return next(i for i in range(start, stop) if tokens[i] != known[i])
        start = stop
    return end


def _tracker(context: Context) -> ThinkingTracker:
    return ThinkingTracker.of(context.vocabulary, context.think_start, context.think_end)


def _scoped(members: Sequence[Member], tracker: ThinkingTracker) -> ScopedProcessors:
    return ScopedProcessors([(member.processor, member.scope) for member in members], tracker)


def _beside(edit: Edit | Member | None, opening_id: int, vocab_size: int) -> Edit | Member | None:
    """``edit``, with ``opening_id``, which continues the opening thinking tag, still allowed.

    For a forced token, the model chooses between it and the tag.
    """
    if isinstance(edit, Allow) and not is_allowed(edit.bitmask, opening_id):
        return Allow(edit.bitmask | bitmask_of([opening_id], vocab_size)[: len(edit.bitmask)])
    if isinstance(edit, Ban):
        return Ban(edit.token_ids[edit.token_ids != opening_id])
    if isinstance(edit, Force):
        return Allow.of({edit.token_id, opening_id}, vocab_size)
    return edit


def _lets_begin(member: Member, prompt_length: int, begun: Sequence[int]) -> bool:
    """Whether ``member``, which has seen ``begun``, would itself let an answer begin with it.

    Raises:
        Unsatisfiable: it would not.
    """
    processor = member.processor
    processor.rewind_lazily(prompt_length)
    try:
        for token_id in begun:
            if not _permits(member.step(), token_id):
                return False
            processor.append(token_id)
    finally:
        processor.rewind_lazily(prompt_length)
        for token_id in begun:
            processor.append(token_id)
    return True


def _permits(edit: Edit | Member | None, token_id: int) -> bool:
    if isinstance(edit, Allow):
        return is_allowed(edit.bitmask, token_id)
    if isinstance(edit, Ban):
        return not bool((edit.token_ids == token_id).any())
    return not isinstance(edit, Force) or edit.token_id == token_id


def _binds_the_answer(member: Member) -> bool:
    """Whether the member constrains the answer: it masks or forces outside the thinking section."""
    return member.scope == "answer" and member.processor.stage in (Stage.MASK, Stage.FORCE)


def _member(processor: Processor, scope: Scope, vocabulary: Vocabulary) -> Member:
    record = ProcessorRecord(processor.name, processor.version)
    if isinstance(processor, BacktrackingProcessor):
        record.rollbacks = 0
    member = Member(processor, scope, record)
    if member.edit is not None and member.is_third_party:
        # Edits of third-party processors are checked before they are applied; those of built-ins
        # are checked in tests.
        soft = processor.stage <= Stage.SOFT
        member.edit = partial(_checked_edit, member.edit, soft, vocabulary.size, vocabulary.num_tokens)
    return member


def _checked_edit(make: Callable[[], Edit | None], soft: bool, vocab_size: int, num_tokens: int) -> Edit | None:
    edit = make()
    return None if edit is None else check_edit(edit, soft=soft, vocab_size=vocab_size, num_tokens=num_tokens)


def _any_shapes(members: list[Member]) -> bool:
    return any(isinstance(member.processor, ShapingProcessor) for member in members)
