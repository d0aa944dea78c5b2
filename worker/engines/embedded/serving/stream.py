"""One request's output in the event loop: outputs of steps go in, deltas come out."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engines import FinishReason, TokenDelta
from worker.engines.delta_stream import DeltaStream
from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.serving.step_thread import Abort, StepThread
from worker.errors import ServingError


@dataclass(slots=True, eq=False)
class Stream(DeltaStream):
    """One request's deltas; what its consumer has not taken is one delta.

    Attributes:
        request: The step thread's; only what never changes, counts and times of it are read here.
        thread: Computes the request's steps.
    """

    request: Request
    thread: StepThread

    async def __anext__(self) -> TokenDelta:
        """Wait for the next delta. Raises what `fail` was given, once."""
        delta = await DeltaStream.__anext__(self)  # super() needs its arguments in a class with slots
        delta.num_preemptions = self.request.num_preemptions
        delta.queue_times = self.request.queue_times
        return delta

    @property
    def request_id(self) -> str:
        """The worker's id."""
        return self.request.id

    @property
    def num_pending(self) -> int:
        """Tokens that the consumer has not taken."""
        return 0 if self.untaken is None else len(self.untaken.token_ids)

    def push(self, output: Output) -> None:
        """Add one output to the pending delta; what comes after the last one is dropped."""
        if self.done:
            return
        delta = self.untaken or TokenDelta()
        if self.request.chain is not None:
            delta.receipt = self.request.chain.receipt
        if output.token_id is not None:
            delta.token_ids.append(output.token_id)
            if output.logprobs is not None:
                delta.logprobs = delta.logprobs or []
                delta.logprobs.append(output.logprobs)
        if output.weights is not None:
            delta.weights.append(output.weights)
        if output.num_cached_tokens:
            delta.num_cached_tokens = output.num_cached_tokens
        if output.engine_data is not None:
            delta.engine_data = output.engine_data
        if output.finish_reason is not None:
            delta.finish_reason = output.finish_reason
            delta.stop_reason = output.stop_reason
            delta.error = output.error
            delta.kv = output.kv
            delta.end_logprobs = output.end_logprobs
            delta.failure = None if output.chain is None else output.chain.failure
        self.put(delta)

    def abort(self, reason: FinishReason = "cancelled") -> None:
        """Free the request's slot and KV before the next step; the stream ends for this reason."""
        self.thread.tell(Abort(self.request.id, reason))

    def leave(self) -> None:
        """Free the request's slot and KV before the next step."""
        self.abort()

    def end(self, failure: ServingError) -> None:
        """End the stream with an exception, and free the request's slot and KV."""
        self.fail(failure)
        self.abort()
