"""`WorkerEngine`: Dynamo's `LLMEngine`, serving one of our engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot

from worker import __version__
from worker.arguments import Arguments
from worker.drain import Flight, Gate, drain
from worker.engines import Engine, EngineInfo, TokenDelta
from worker.errors import (
    Draining,
    EngineBroken,
    InvalidRequest,
    Overloaded,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
    StartupError,
)
from worker.faults import FaultWindow
from worker.lowering import lower
from worker.metrics import WorkerMetrics
from worker.request import RequestLimits, parse_request
from worker.response import ResponseBuilder
from worker.runtimes import dynamo as runtime
from worker.smoke import SmokeTest

logger = logging.getLogger(__name__)

_OUTCOMES: tuple[tuple[type[ServingError], str], ...] = (
    (InvalidRequest, "refused"),
    (RequestFailed, "failed"),
    (Overloaded, "overloaded"),
    (ProcessorUnavailable, "unavailable"),
    (Draining, "handed_off"),
    (EngineBroken, "engine_broken"),
)


@dataclass(frozen=True, slots=True)
class _Serving:
    """One admitted request."""

    flight: Flight
    builder: ResponseBuilder
    deltas: AsyncGenerator[TokenDelta, None]


class WorkerEngine(LLMEngine):
    """Serves `engine` through Dynamo's unified backend.

    Attributes:
        startup_error: Why `start` failed, for the one line that the operator sees.
        broken: Why the engine cannot serve any more, None while it can.
    """

    def __init__(
        self,
        engine: Engine,
        arguments: Arguments,
        *,
        smoke: bool = False,
        leave: Callable[[], None] = runtime.leave,
    ) -> None:
        """``leave`` asks the runtime to shut this process down; it is called at most once, when the engine broke."""
        self.engine = engine
        self.arguments = arguments
        self.gate = Gate()
        self.metrics = WorkerMetrics(self.gate)
        self.startup_error: str | None = None
        self.broken: str | None = None
        self._smoke_wanted = smoke
        self._smoke: SmokeTest | None = None
        self._faults = FaultWindow()
        self._leave = leave
        self._info: EngineInfo | None = None
        self._publisher: Any = None
        self._published_blocks = -1
        self._num_signals = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """The SDK's factory; ``python -m worker`` builds the engine itself (`worker.__main__`)."""
        from worker.__main__ import build

        return build(argv)

    async def start(self, worker_id: int) -> EngineConfig:
        try:
            info = await self.engine.start()
            if self._smoke_wanted:
                eos = info.eos_token_ids[0] if info.eos_token_ids else None
                self._smoke = await asyncio.to_thread(SmokeTest, self.arguments.model_path, eos)
        except Exception as error:  # the start-up boundary: the operator gets one line, the log the traceback
            if not isinstance(error, StartupError):
                logger.exception("start-up failed")
            self.startup_error = " ".join(str(error).split()) or type(error).__name__
            raise
        self._info = info
        self.gate.block_size = info.kv_block_size
        self.metrics.describe_engine(info)
        return runtime.engine_config(info, self.arguments)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """One request. Everything that can refuse it does so before the first chunk."""
        try:
            serving = self._admit(context.id(), request)
            try:
                async with contextlib.aclosing(serving.deltas) as deltas:
                    async for delta in deltas:
                        chunk = self._chunk(serving, delta)
                        if chunk is not None:
                            yield chunk
            finally:
                self._leave_gate(serving)
        except ServingError as error:
            self._record(error)
            raise runtime.to_dynamo(error) from None
        except Exception as error:  # the request boundary: one request's unknown error stays its own
            logger.exception("request %s failed", context.id())
            self.metrics.count_outcome("unknown_error")
            if self._faults.record():
                self._break(f"{self._faults.limit} unknown errors within {self._faults.window_s:g} s")
            raise runtime.to_dynamo(ServingError("internal error")) from error

    def _admit(self, request_id: str, raw: Mapping[str, Any]) -> _Serving:
        info = self._ready_info()
        request = parse_request(raw, RequestLimits(info.context_length, info.vocab_size))
        prompt = request.prompt_token_ids
        params = lower(request, info.eos_token_ids, self._smoke.processors(len(prompt)) if self._smoke else ())
        builder = ResponseBuilder(request, params.end_token_ids - request.shown_stop_token_ids)
        deltas = self.engine.generate(request_id, prompt, params)
        flight = self.gate.enter(request_id, len(prompt))  # last: nothing after it may raise
        self._publish_load()
        return _Serving(flight, builder, deltas)

    def _chunk(self, serving: _Serving, delta: TokenDelta) -> dict[str, Any] | None:
        chunk = serving.builder.chunk(delta)
        self.gate.grow(serving.flight, len(delta.token_ids))
        self._publish_load()
        if delta.finish_reason is not None:
            self.metrics.count_outcome(delta.finish_reason)
        elif not chunk["token_ids"] and "engine_data" not in chunk:
            return None
        return chunk

    def _ready_info(self) -> EngineInfo:
        if self.broken is not None:
            raise EngineBroken(self.broken)
        if self._info is None:
            raise Draining("this worker is not serving yet")
        return self._info

    def _leave_gate(self, serving: _Serving) -> None:
        self.gate.leave(serving.flight)
        self._publish_load()
        builder = serving.builder
        self.metrics.count_tokens(builder.num_prompt_tokens, builder.num_cached_tokens, builder.num_generated_tokens)

    def _record(self, error: ServingError) -> None:
        outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "unknown_error")
        self.metrics.count_outcome(outcome)
        if isinstance(error, InvalidRequest):
            self.metrics.count_refusal(error.field)
        if isinstance(error, EngineBroken):
            self._break(str(error))

    def _break(self, reason: str) -> None:
        """Stop serving for good: hand everything off and let the process leave with a non-zero status."""
        if self.broken is None:
            self.broken = " ".join(reason.split())
            logger.error("engine broken, leaving: %s", self.broken)
            self.gate.close()
            self.engine.hand_off()
            self._leave()

    async def abort(self, context: Any) -> None:
        """Free everything that the request holds. Called by the runtime when the client is gone."""
        request_id = context.id()
        self.engine.abort(request_id)
        if self.gate.evict(request_id):
            self._publish_load()

    def signalled(self) -> None:
        """A signal to leave arrived. The second one ends the drain at once: what is in flight is handed off."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.gate.hurry()

    async def cleanup(self) -> None:
        """Drain, then stop the engine. Also called after a failed `start`; idempotent."""
        if not self.gate.closed and self._info is not None:
            outcome = await drain(self.gate, self.engine, self.arguments.drain_timeout_s)
            self.metrics.count_drain(outcome)
            logger.info("drained: %d finished, %d handed off", outcome.num_finished, outcome.num_handed_off)
        await self.engine.stop()

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self.metrics.registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher
        self._publish_load()

    def _publish_load(self) -> None:
        """Tell the router how many KV blocks the requests in flight need, whenever that number changes."""
        if self._publisher is None or self._info is None:
            return
        total = self._info.total_kv_blocks
        used = min(self.gate.num_blocks, total)
        if used != self._published_blocks:
            self._published_blocks = used
            snapshot = ComponentSnapshot(used, total, used / total if total else 0.0, dp_rank=0)
            self._publisher.publish(0, snapshot)

    async def health_check_payload(self) -> dict[str, Any] | None:
        """One greedy token through the real path; any id of the vocabulary will do as the prompt."""
        eos = self._info.eos_token_ids if self._info is not None else ()
        return build_health_check_payload(eos[0] if eos else 0)

    def supported_controls(self) -> set[str]:
        return {"info"}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """``POST /engine/control/info``: what this worker is and how it is doing."""
        if control != "info" or self._info is None:
            return await super().engine_control(control, body)
        info = self._info
        return {
            "status": "ok",
            "worker_version": __version__,
            "engine": info.name,
            "engine_version": info.version,
            "model": self.arguments.served_model_name,
            "dtype": self.arguments.dtype,
            "context_length": info.context_length,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "total_kv_blocks": info.total_kv_blocks,
            "in_flight": len(self.gate),
            "draining": self.gate.closed,
            "smoke_test": self._smoke is not None,
        }
