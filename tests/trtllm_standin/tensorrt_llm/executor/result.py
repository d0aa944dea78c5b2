"""What a request gives back. One object per request, which grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, List, Literal, Optional

from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.standin_switches import SWITCHES

FINISH_REASONS = ("stop", "length", "timeout", "cancelled")


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: Optional[int] = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: Optional[List[int]] = field(default_factory=list)
    cumulative_logprob: Optional[float] = None
    logprobs: Optional[TokenLogprobs | List[float]] = field(default_factory=list)
    prompt_logprobs: Optional[TokenLogprobs] = field(default_factory=list)
    finish_reason: Optional[Literal["stop", "length", "timeout", "cancelled"]] = None
    stop_reason: Optional[int | str] = None
    generation_logits: Optional[Any] = None
    additional_context_outputs: Optional[Any] = None
    additional_generation_outputs: Optional[Any] = None
    disaggregated_params: Optional[Any] = None
    request_perf_metrics: Optional[Any] = None
    _last_token_ids_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids or ())

    @property
    def text_diff(self) -> str:
        return self.text

    @property
    def token_ids_diff(self) -> list[int]:
        return (self.token_ids or [])[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        return (self.logprobs or [])[self._last_token_ids_len :]


class RequestOutput:
    """Awaitable, and iterable in a running loop; each iteration yields this same object."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        n: int,
        abort: Callable[[int], None],
        disaggregated_params: Any = None,
    ) -> None:
        self.request_id = request_id
        self.prompt: str | None = None
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(i) for i in range(n)]
        self.finished = False
        self.context_logits: Any = None
        self.disaggregated_params = disaggregated_params
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[str, float] = {}
        self.is_measured = False
        self._began_s = time.monotonic()
        self._abort = abort
        self._aborted = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._queue: asyncio.Queue[Any] | None = asyncio.Queue() if self._loop is not None else None

    def push(self, response: Any) -> None:
        """From any thread."""
        assert self._loop is not None
        assert self._queue is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def abort(self) -> None:
        self._aborted = True
        self._abort(self.request_id)

    def aborted(self) -> bool:
        return self._aborted

    def clear_logprob_params(self) -> None:
        return None

    def record_stats(self, output: CompletionOutput, stats: dict[str, float] | None = None) -> None:
        return None

    def result(self, timeout: float | None = None) -> RequestOutput:
        raise RuntimeError("the stand-in has no synchronous result")

    async def aresult(self) -> RequestOutput:
        while not self.finished:
            await self._step()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._step()
        return self

    def __hash__(self) -> int:
        return hash(self.request_id)

    async def _step(self) -> None:
        assert self._queue is not None, "no event loop when the request was made"
        response = await self._queue.get()
        if isinstance(response, BaseException):
            raise response
        if "error" in response:
            self.finished = True
            raise RequestError(response["error"])
        self.finished = response["last"]
        self.cached_tokens = max(self.cached_tokens, response.get("cached", 0))
        if self.finished and self.is_measured:
            self.metrics_dict = {"e2e": time.monotonic() - self._began_s}
        self.disaggregated_params = response["disaggregated_params"] or self.disaggregated_params
        self.decoding_iter += 1
        self._take(self.outputs[response["index"]], response)

    def _take(self, output: CompletionOutput, response: dict[str, Any]) -> None:
        output.disaggregated_params = self.disaggregated_params if SWITCHES.passes_on else None
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids = output.token_ids + response["token_ids"]
        reason = response["finish_reason"]
        if response["logprobs"] is not None:
            self._take_logprobs(output, response["logprobs"], reason)
        if reason == "cancelled":
            output.finish_reason = reason
        if self.finished:  # of several sequences only the last one to end is told why
            if reason not in FINISH_REASONS and not (reason == "not_finished" and self._is_context_only()):
                raise ValueError(f"Unknown finish reason: {reason}")
            output.finish_reason, output.stop_reason = reason, response["stop_reason"]
            if response["cut"]:
                del output.token_ids[len(output.token_ids) - response["cut"] :]
                del output.logprobs[len(output.token_ids) :]

    def _take_logprobs(self, output: CompletionOutput, new: list[Any], reason: str | None) -> None:
        for entries in new:
            row = {token: Logprob(logprob, rank) for token, logprob, rank in entries}
            output.logprobs = [*output.logprobs, row]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + next(iter(row.values())).logprob
        if reason != "cancelled":
            del output.logprobs[output.length :]
            assert len(output.logprobs) == output.length

    def _is_context_only(self) -> bool:
        return self.disaggregated_params is not None and self.disaggregated_params.request_type == "context_only"


TokenLogprobs = list[dict[int, Logprob]]
