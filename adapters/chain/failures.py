"""Failures of a chain: which processor ended its request at which position, and why."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from adapters.chain.members import Member
from adapters.chain.plan import PlannedEdits, RowPlan
from adapters.contract import MalformedEdit, StateLost, Unsatisfiable
from adapters.interrupts import is_interrupt


class ProcessorFailed(Exception):
    """A processor of this chain failed: its request ends with an error, batch-mates are unaffected.

    Args:
        processor: Name of the processor.
        reason: ``raised``, ``nan``, ``infinite``, ``empty``, ``unsatisfiable``, ``budget``, or
            ``skipped`` where a library sampled a token without it.
        message: One sentence for the caller.
    """

    def __init__(self, processor: str, reason: str, message: str) -> None:
        super().__init__(f"logits processor {processor}: {message}")
        self.processor = processor
        self.reason = reason
        self.message = message

    def without_frames(self) -> ProcessorFailed:
        """This failure, to be kept: without the stack frames of it and of its causes.

        Those hold the request, its chain and its grammars, which would outlive it. An error may be
        among its own causes (``raise error from error``).
        """
        found: dict[int, BaseException] = {}
        left: list[BaseException | None] = [self]
        while left:
            error = left.pop()
            if error is not None and id(error) not in found:
                found[id(error)] = error
                error.__traceback__ = None
                left += error.__cause__, error.__context__
        return self


class Failures:
    """Failures of one chain, each recorded before it is raised or reported.

    Args:
        tokens: Prompt and generated tokens of the chain, for the position.
        members: Members of the chain.
        planned: Edits that the chain has planned last.
        step_budget_s: CPU time of its thread that a third-party processor may take for one step,
            seconds.

    Attributes:
        newest: The newest failure, None while there is none; never raised, so that it holds no
            stack frame.
    """

    def __init__(
        self, tokens: Sequence[int], members: Sequence[Member], planned: PlannedEdits, step_budget_s: float
    ) -> None:
        self._tokens, self._members, self._planned = tokens, members, planned
        self.step_budget_s = step_budget_s
        self.newest: ProcessorFailed | None = None

    def fail(self, name: str, reason: str, message: str) -> ProcessorFailed:
        """Record that processor ``name`` failed; returns the failure to raise or report."""
        self._planned.acts = []
        for member in self._members:  # the last step of one of them did not end
            member.same_until = 0
        self.newest = ProcessorFailed(name, reason, message)
        return ProcessorFailed(name, reason, message)

    def raised(self, member: Member, error: BaseException) -> ProcessorFailed:
        """Record that ``member`` raised ``error``; returns the failure to raise or report.

        Code of third parties may also exit, or panic in Rust, which ends its request alone. Only an
        interrupt is not the processor's, and is raised.
        """
        if is_interrupt(error):
            raise error
        if isinstance(error, ProcessorFailed):
            return self.fail(error.processor, error.reason, error.message)
        where = f"at position {len(self._tokens)}"
        problem = f"raised {type(error).__name__}"
        if isinstance(error, Unsatisfiable | MalformedEdit | StateLost):
            with suppress(Exception):  # of a third party's own kind of them
                problem = str(error)
        reason = "unsatisfiable" if isinstance(error, Unsatisfiable) else "raised"
        return self.fail(member.name, reason, f"{problem} {where}")

    def no_token_left(
        self, kinds: Sequence[str] = ("masked", "shaped", "biased"), *, before: Member | None = None
    ) -> ProcessorFailed:
        """Record that no token is left at the position planned last.

        The processors that made an edit of one of ``kinds`` are named in the failure.

        Args:
            kinds: Kinds of edits.
            before: The member that received the row without a token; members after it are not
                named.
        """
        names = ", ".join(self._planned.names(kinds, before)) or "model"
        return self.fail(names, "unsatisfiable", f"no token is left at position {len(self._tokens)}")

    def unusable(self, reason: str, problem: str) -> ProcessorFailed:
        """Record that the row planned last cannot be sampled after its edits.

        All that edited it are named; of a row that is not finite, third parties alone if there is
        one: built-ins leave a finite row finite.

        Args:
            reason: ``nan``, ``infinite`` or ``empty``.
            problem: The same in words.
        """
        names = self._planned.names(("masked", "shaped", "biased"))
        if reason != "empty":
            third_parties = {member.name for member in self._members if member.is_third_party}
            names = [name for name in names if name in third_parties] or names
        return self.fail(", ".join(names) or "model", reason, f"{problem} at position {len(self._tokens)}")

    def check(self, plan: RowPlan) -> None:
        """Raise `ProcessorFailed` if a mask forbids the forced id, or masks leave no token."""
        if plan.forced_by is not None and plan.force is not None:
            if not plan.masks_permit(plan.force):
                problem = Unsatisfiable(f"forces token {plan.force}, which another processor forbids")
                raise self.raised(plan.forced_by, problem)
        elif not plan.leaves_a_token():
            raise self.no_token_left(["masked"])

    def charge(self, member: Member, seconds: float, times: int = 1) -> None:
        """Record CPU time of one step, and enforce the budget of a third-party processor.

        Args:
            member: The member that took the step.
            seconds: CPU time of the step.
            times: Number of steps that it stands for in the record.

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
