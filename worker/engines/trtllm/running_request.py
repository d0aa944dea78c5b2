"""State of one request that runs in TensorRT-LLM."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from adapters.chain import Mode, ProcessorChain, ProcessorFailed
from adapters.trtllm import Failure, Step
from worker.engines import TokenDelta, TokenLogprob
from worker.engines.trtllm.deltas import Cursor, entries_of
from worker.errors import ServingError


@dataclass(slots=True, eq=False)
class RunningRequest:
    """State of one request; used in one event loop only.

    Attributes:
        request_id: The worker's id.
        cursors: One per choice.
        chain: The worker's copy of its processors, which keeps the receipt; None if it has none.
        chain_logprobs: Log probabilities come from the chain's steps.
        fails_open: A failing processor does not end the request.
        step_budget_s: Budget of a third-party processor for one step, enforced here; None if the
            chain enforces it.
        num_given: Tokens that it begins with: the prompt, and the answer so far of a migrated one.
        handed_over: Number of tokens that a prefill worker sampled with its own copy of the chain.
        handed_logprobs: Their log probabilities.
        must_not_abort: The KV transfer from a prefill worker is unfinished; an abort waits for the
            first token.
        is_silent: No delta has come since the last `keep_alive`.
        number: Id for reports of processors in the engine's process; never reused.
        result: The engine's ``RequestOutput``.
        disaggregated_params: Given to the engine; used where a prefill's result has none.
        passed_on: Disaggregated parameters for the decode worker, sent with a prefill's only delta.
    """

    request_id: str
    cursors: list[Cursor]
    chain: ProcessorChain | None = None
    chain_logprobs: bool = False
    fails_open: bool = False
    step_budget_s: float | None = None
    num_given: int = 0
    handed_over: int = 0
    handed_logprobs: list[TokenLogprob] | None = None
    must_not_abort: bool = False
    is_silent: bool = False
    number: str = ""
    result: Any = None
    disaggregated_params: Any = None
    passed_on: dict[str, Any] | None = None
    pump: asyncio.Task[None] | None = None
    done: bool = False
    _abort_wanted: bool = False
    _failure: Failure | None = None
    _steps: dict[int, Step] = field(default_factory=dict)
    _queue: asyncio.Queue[TokenDelta | ServingError] = field(default_factory=asyncio.Queue)

    async def take(self) -> TokenDelta:
        """The next delta. Raises what `fail` was given."""
        item = await self._queue.get()
        if isinstance(item, ServingError):
            raise item
        return item

    @property
    def is_exhausted(self) -> bool:
        """Whether the last delta has been taken."""
        return self.done and self._queue.empty()

    def note_mode(self, mode: Mode) -> None:
        """Say in the receipt where the prompt was computed, unless the request was migrated."""
        if self.chain is not None and self.chain.receipt.mode != "migrated":
            self.chain.receipt.mode = mode

    def fail(self, error: ServingError) -> None:
        """End the stream with an exception."""
        if not self.done:
            self.done = True
            self._queue.put_nowait(error)

    def keep_alive(self) -> None:
        """Give the consumer an empty delta if none has come since the last call."""
        if self.is_silent and not self.done and self._queue.empty():
            self._queue.put_nowait(TokenDelta())
        self.is_silent = True

    def fail_alone(self, message: str) -> None:
        """End the stream with an error of this request."""
        self._put(self._error(message, self._processor_failure()))

    def abort(self) -> None:
        """Abort in the engine, as soon as that is safe."""
        if self.must_not_abort:
            self._abort_wanted = True
        elif self.result is not None:
            self.result.abort()

    def abandon(self, message: str) -> None:
        """End the stream with an error of this request, and abort it: nobody reads its result."""
        self.fail_alone(message)
        self.must_not_abort = False
        self.abort()

    def noted(self, failure: Failure) -> None:
        """Record a processor failure reported by the engine's process."""
        if self._failure is None:
            self._failure = failure
        if not self.fails_open and not self.done:
            self.fail_alone(str(failure))
            self.abort()

    def first_logprobs(self) -> tuple[tuple[int, float, int], ...] | None:
        """Log probabilities of the first token, as reported by the chain."""
        step = None if self.chain is None else self._steps.get(self.chain.position)
        return None if step is None else step.logprobs

    def noted_step(self, step: Step) -> None:
        """Record the chain's report for a position; of several calls the last counts."""
        self._steps[step.position] = step

    def advance(self, outputs: Any) -> None:
        """Take the engine's cumulative outputs."""
        if self.must_not_abort:
            self.must_not_abort = False
            if self._abort_wanted:
                self.abort()
        is_last = bool(self.result.finished)
        unsaid = is_last and len(self.cursors) > 1  # of several only the last one to end gets a reason
        for output, cursor in zip(outputs, self.cursors, strict=True):
            delta = cursor.advance(output, is_last=unsaid)
            if delta is not None and not self.done:
                if delta.finish_reason == "length":
                    delta.kv = self.passed_on
                delta.num_cached_tokens = int(getattr(self.result, "cached_tokens", 0) or 0)
                self._put(self._confirmed(delta))
        if self.done and not is_last:
            self.abort()  # ended here, by a token or a failure unknown to the engine

    def _put(self, delta: TokenDelta) -> None:
        if self.done:
            return
        self.is_silent = False
        self.done = delta.finish_reason == "error" or all(cursor.finished for cursor in self.cursors)
        self._queue.put_nowait(delta)

    def _confirmed(self, delta: TokenDelta) -> TokenDelta:
        """The delta with the edits made to its tokens; an error if the chain missed a token."""
        chain = self.chain
        if chain is None:
            return delta
        logprobs: list[list[TokenLogprob]] = []
        hidden = delta.finish_reason == "stop" and delta.token_ids[-1:] != [delta.stop_reason]
        ended_by = [delta.stop_reason] if hidden and delta.stop_reason is not None else []
        for token_id in [*delta.token_ids, *ended_by]:
            problem = self._record(chain, token_id, logprobs)
            if problem is not None:
                return self._error(str(problem), problem)
        if self.chain_logprobs:
            delta.logprobs = logprobs[: len(delta.token_ids)]
        if chain.wants_receipt:
            ends = delta.finish_reason is not None
            delta.engine_data = {"logits_processors": chain.receipt.as_json(attribution=ends)}
        if delta.finish_reason is not None:
            delta.receipt, delta.failure = chain.receipt, self._processor_failure()
        return delta

    def _record(
        self, chain: ProcessorChain, token_id: int, logprobs: list[list[TokenLogprob]]
    ) -> ProcessorFailed | None:
        position = chain.position
        if position - self.num_given < self.handed_over:
            chain.replay_token(token_id)
            logprobs.append(self.handed_logprobs or [])
            return None
        step = self._steps.pop(position, None)
        if step is None and not self.fails_open:
            message = f"were not called for position {position}: the engine went on without them"
            return chain.fail(", ".join(dict.fromkeys(member.name for member in chain.members)), "skipped", message)
        step = step or Step(position)
        over = self._over_budget(chain, step)
        chain.record(token_id, step.edits)
        logprobs.append(entries_of(step.logprobs or ()))
        return over

    def _over_budget(self, chain: ProcessorChain, step: Step) -> ProcessorFailed | None:
        budget = math.inf if self.step_budget_s is None else self.step_budget_s
        for member, seconds in zip(chain.members, step.seconds):  # noqa: B905  # empty if a step has failed
            took, member.record.seconds = seconds - member.record.seconds, seconds
            failure = chain.failures.over_budget(member, took, budget)
            if failure is not None:
                return failure
        return None

    def _processor_failure(self) -> ProcessorFailed | None:
        found = self._failure
        return None if found is None else ProcessorFailed(found.processor, found.reason, found.message)

    def _error(self, message: str, failure: ProcessorFailed | None) -> TokenDelta:
        receipt = None if self.chain is None else self.chain.receipt
        return TokenDelta(finish_reason="error", error=message, receipt=receipt, failure=failure)
