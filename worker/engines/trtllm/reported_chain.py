"""The worker's copy of a request's chain, which follows the copy in the engine's process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from adapters.chain import Mode, ProcessorChain, ProcessorFailed
from adapters.trtllm import Step
from worker.engines import TokenDelta, TokenLogprob
from worker.engines.trtllm.deltas import entries_of


@dataclass(slots=True, eq=False)
class ReportedChain:
    """A chain whose edits are made, and reported step by step, in the engine's process.

    Attributes:
        chain: The worker's copy, which keeps the receipt.
        num_given: Tokens that the request begins with: the prompt, and the answer so far of a
            migrated one.
        has_logprobs: Whether log probabilities come from the chain's steps.
        fails_open: Whether the request continues without a processor that failed.
        step_budget_s: Budget of a third-party processor for one step, enforced here; None if the
            chain enforces it.
        handed_over: Number of tokens that a prefill worker sampled with its own copy of the chain.
        handed_logprobs: Log probabilities of those tokens.
    """

    chain: ProcessorChain
    num_given: int
    has_logprobs: bool = False
    fails_open: bool = False
    step_budget_s: float | None = None
    handed_over: int = 0
    handed_logprobs: list[TokenLogprob] | None = None
    _steps: dict[int, Step] = field(default_factory=dict)

    def note_mode(self, mode: Mode) -> None:
        """Say in the receipt where the prompt was computed, unless the request was migrated."""
        if self.chain.receipt.mode != "migrated":
            self.chain.receipt.mode = mode

    def note_step(self, step: Step) -> None:
        """Record the report for a position; of several calls the last counts.

        Every rank reports, and those of the others come after the token, too: they are not kept.
        """
        if step.position >= self.chain.position:
            self._steps[step.position] = step

    def first_logprobs(self) -> tuple[tuple[int, float, int], ...] | None:
        """Log probabilities of the next token as reported, None if it was not or they lack."""
        step = self._steps.get(self.chain.position)
        return None if step is None else step.logprobs

    def confirm(self, delta: TokenDelta) -> ProcessorFailed | None:
        """Advance by the delta's tokens, and add the edits made to them.

        Returns:
            The failure, where the chain missed a token or took too long; the delta is void then.
        """
        logprobs: list[list[TokenLogprob]] = []
        for token_id in delta.sampled_ids:
            problem = self._record(token_id, logprobs)
            if problem is not None:
                return problem
        if self.has_logprobs:
            count = len(delta.token_ids)
            delta.logprobs, delta.end_logprobs = logprobs[:count], next(iter(logprobs[count:]), None)
        if self.chain.wants_receipt:
            ends = delta.finish_reason is not None
            delta.engine_data = {"logits_processors": self.chain.receipt.as_json(attribution=ends)}
        return None

    def _record(self, token_id: int, logprobs: list[list[TokenLogprob]]) -> ProcessorFailed | None:
        chain = self.chain
        position = chain.position
        if position - self.num_given < self.handed_over:
            chain.replay_token(token_id)
            logprobs.append(self.handed_logprobs or [])
            return None if self.handed_logprobs or not self.has_logprobs else self._unscored(position)
        step = self._steps.pop(position, None)
        if step is None and not self.fails_open:
            message = f"were not called for position {position}: the engine went on without them"
            return chain.fail(self._names(), "skipped", message)
        step = step or Step(position)
        if self.has_logprobs and not step.logprobs:
            return self._unscored(position)
        over = self._over_budget(step)
        chain.record(token_id, step.edits)
        logprobs.append(entries_of(step.logprobs or ()))
        return over

    def _unscored(self, position: int) -> ProcessorFailed:
        message = f"reported no log probabilities of position {position}"
        return self.chain.fail(self._names(), "skipped", message)

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(member.name for member in self.chain.members))

    def _over_budget(self, step: Step) -> ProcessorFailed | None:
        budget = math.inf if self.step_budget_s is None else self.step_budget_s
        for member, took in zip(self.chain.members, step.seconds):  # noqa: B905  # empty if a step has failed
            member.record.seconds += took
            failure = self.chain.failures.over_budget(member, took, budget)
            if failure is not None:
                return failure
        return None
