"""State of one request that runs in TensorRT-LLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from adapters.chain import ProcessorFailed
from adapters.trtllm import Failure
from worker.engines import TokenDelta
from worker.engines.delta_stream import DeltaStream
from worker.engines.trtllm.deltas import Cursor
from worker.engines.trtllm.reported_chain import ReportedChain
from worker.engines.trtllm.watched_chain import WatchedChain
from worker.errors import EngineBroken, ServingError


@dataclass(slots=True, eq=False)
class RunningRequest(DeltaStream):
    """One request and its stream.

    Attributes:
        request_id: The worker's id.
        cursors: One per choice.
        chain: The request's processors, None if it has none.
        must_not_abort: Whether the KV transfer from a prefill worker is unfinished; an abort waits
            for the first token.
        number: Id for reports of processors in the engine's process; never reused.
        has_pictures: Whether the engine wrote the prompt anew, with the tokens of pictures.
        result: The engine's ``RequestOutput``.
        disaggregated_params: Parameters that the engine was given; used where a prefill's result
            has none.
        kv: Disaggregated parameters for the decode worker, sent with a prefill's only delta.
        pump: Task that turns the engine's outputs into deltas.
    """

    request_id: str
    cursors: list[Cursor]
    chain: ReportedChain | WatchedChain | None = None
    must_not_abort: bool = False
    number: str = ""
    has_pictures: bool = False
    result: Any = None
    disaggregated_params: Any = None
    kv: dict[str, Any] | None = None
    pump: asyncio.Task[None] | None = None
    _abort_wanted: bool = False
    _failure: ProcessorFailed | None = None

    def __post_init__(self) -> None:
        self.num_open = len(self.cursors)

    def fail_alone(self, message: str) -> None:
        """End the stream with an error of this request."""
        self.put(self._error(message, self._failure))

    def fail_and_abort(self, message: str) -> None:
        """End the stream with an error of this request, and abort it, KV transfer or not."""
        self.fail_alone(message)
        self.must_not_abort = False
        self.abort()

    def note_failure(self, failure: Failure) -> None:
        """Record a processor failure reported by the engine's process."""
        if self._failure is None:
            self._failure = ProcessorFailed(failure.processor, failure.reason, failure.message)
        if not self.done and (self.chain is None or not self.chain.fails_open):
            self.fail_alone(str(failure))
            self.abort()

    def abort(self) -> None:
        """Abort in the engine; on a decode worker only after the KV transfer has completed."""
        if self.must_not_abort:
            self._abort_wanted = True
        elif self.result is not None:
            self.result.abort()

    def leave(self) -> None:
        """Send nothing more; abort in the engine and stop reading, as soon as that is safe."""
        if not self.done:
            self.close()
            self.abort()
        if self.pump is not None and not self.must_not_abort:
            self.pump.cancel()

    def end(self, failure: ServingError) -> None:
        """End the stream with an exception, and abort in the engine if it lives."""
        if not self.done and not isinstance(failure, EngineBroken):
            self.abort()
        self.fail(failure)

    def advance(self, outputs: Any) -> None:
        """Take the engine's cumulative outputs."""
        if self.must_not_abort:
            self.must_not_abort = False
            if self._abort_wanted:
                self.abort()
        is_last = bool(self.result.finished)
        unsaid = is_last and len(self.cursors) > 1  # of several sequences only the last to end gets a reason
        for output, cursor in zip(outputs, self.cursors, strict=True):
            delta = cursor.advance(output, is_last=unsaid)
            if delta is not None and not self.done:
                if delta.finish_reason == "length":
                    delta.kv = self.kv
                delta.num_cached_tokens = int(getattr(self.result, "cached_tokens", 0) or 0)
                if self.has_pictures:
                    delta.num_prompt_tokens = len(self.result.prompt_token_ids)
                self._confirm(delta)
        if self.done and not is_last:
            self.abort()  # a token or a failure unknown to the engine ended it

    def _confirm(self, delta: TokenDelta) -> None:
        """Send the delta with its tokens' edits; an error instead if the chain missed a token."""
        problem = None if self.chain is None else self.chain.confirm(delta)
        if problem is not None:
            delta = self._error(str(problem), problem)
        elif self.chain is not None:
            delta.receipt = self.chain.chain.receipt
            delta.failure = None if delta.finish_reason is None else self._failure
        self.put(delta)

    def _error(self, message: str, failure: ProcessorFailed | None) -> TokenDelta:
        receipt = None if self.chain is None else self.chain.chain.receipt
        return TokenDelta(finish_reason="error", error=message, receipt=receipt, failure=failure)
