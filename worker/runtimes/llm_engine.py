"""`WorkerEngine`: Dynamo's `LLMEngine`, serving one of our engines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dynamo.common.backend.engine import EngineConfig, LLMEngine
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.backend.worker import WorkerConfig
from prometheus_client import CollectorRegistry

from adapters import create_trtllm_adapters
from adapters.catalog import Selection
from adapters.vocabulary import byte_index
from worker import __version__
from worker.arguments import Arguments
from worker.build import Built, build
from worker.disaggregation.seal import Seal
from worker.disaggregation.serving import DisaggregatedServing, Part, TransferMetrics
from worker.engines import EngineInfo, ReadKv, SelfReporting, ServingEngine, TokenDelta
from worker.errors import (
    BoundaryStoreUnavailable,
    Draining,
    EngineBroken,
    GrammarsUnavailable,
    InvalidRequest,
    Overloaded,
    PoisonRequest,
    ProcessorUnavailable,
    RequestFailed,
    ServingError,
    StartupError,
)
from worker.lifecycle.drain import InFlightRequest, InFlightRequests, drain
from worker.lifecycle.faults import FaultWindow
from worker.metrics import WorkerMetrics
from worker.migration.records import BoundaryRecords, RequestRecord, UnrecordedRequest, records_of
from worker.migration.safe_chunks import SafeChunks
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.processors.smoke import SmokeTest
from worker.request_log import RequestEntry, RequestLog
from worker.requests.deadline import until
from worker.requests.receipts import RequestReceipt, Server
from worker.requests.request import GenerationRequest, RequestLimits, parse_request
from worker.requests.response import ResponseBuilder
from worker.runtimes import dynamo as runtime
from worker.sampling import SamplingParams
from worker.sampling.field_processors import for_engine

logger = logging.getLogger(__name__)

CATALOG_CONTROL = "logits_processors"

SEED_BITS = 53
"""Bits of the seeds that the worker draws: integers that every JSON library reads exactly, so that
a client can send the seed of a receipt back.
"""

SENT_S = 0.01
"""Time for the runtime to send the last chunk of an answer; then its record goes away."""

_OUTCOMES: tuple[tuple[type[ServingError], str], ...] = (
    (PoisonRequest, "poison"),
    (InvalidRequest, "refused"),
    (RequestFailed, "failed"),
    (Overloaded, "overloaded"),
    (Draining, "migrated"),
    (EngineBroken, "engine_broken"),
    (ProcessorUnavailable, "unavailable"),
    (GrammarsUnavailable, "unavailable"),
    (BoundaryStoreUnavailable, "unavailable"),
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Serving:
    """One admitted request."""

    admitted: InFlightRequest
    builder: ResponseBuilder
    deltas: AsyncGenerator[TokenDelta, None]
    selection: Selection
    entry: RequestEntry
    record: RequestRecord
    safe_chunks: SafeChunks | None = None


class _Aborted(Exception):
    """The client is gone before its request reached the engine."""


@dataclass(eq=False, slots=True)
class _Admission:
    """A request whose record is being read, or whose chain is being built.

    Attributes:
        task: Does so.
        failure: What the request ends with, once the task was cancelled for that.
    """

    task: asyncio.Task[Any]
    failure: Exception | None = None

    def end(self, failure: Exception) -> None:
        """Stop building; the request ends with ``failure``."""
        self.failure = self.failure or failure
        self.task.cancel()


class WorkerEngine(LLMEngine):
    """Serves `engine` through Dynamo's unified backend.

    Attributes:
        startup_error: Why `start` failed, for the one line that the operator sees.
        broken: Why the engine cannot serve any more, None while it can.
    """

    def __init__(
        self,
        engine: ServingEngine,
        arguments: Arguments,
        *,
        seal: Seal | None = None,
        smoke: bool = False,
        shut_down: Callable[[], None] = runtime.shut_down,
        make_chains: Callable[[Arguments, EngineInfo, CollectorRegistry], ServedChainBuilder] = make_chain_builder,
    ) -> None:
        """``seal`` signs KV transfers; prefill and decode workers need one.

        ``shut_down`` asks the runtime to shut this process down; called at most once, when the
        engine broke.

        ``make_chains`` makes the builder of chains, in a thread, once the model is loaded.
        """
        self.engine = engine
        self.arguments = arguments
        self.in_flight = InFlightRequests()
        self.metrics = WorkerMetrics(self.in_flight)
        self._boundaries: BoundaryRecords | None = records_of(arguments)
        self.disaggregation = DisaggregatedServing(
            arguments.disaggregation_mode, seal, arguments.kv_lease_s, arguments.max_local_prefills
        )
        self.startup_error: str | None = None
        self.broken: str | None = None
        self._make_chains = make_chains
        self._chains: ServedChainBuilder | None = None
        self._admissions: dict[str, _Admission] = {}
        self._smoke_wanted = smoke
        self._smoke: SmokeTest | None = None
        self._faults = FaultWindow()
        self._log: RequestLog | None = None
        self._server: Server | None = None
        self._seeds = random.Random(secrets.randbits(128))  # the system's own would let go of the interpreter each time
        self._shut_down = shut_down
        self._info: EngineInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._publisher: Any = None
        self._used_blocks: int | None = None  # as the engine itself says, where it does
        self._published_blocks = -1
        self._num_signals = 0
        self._drained = False

    @classmethod
    def of(cls, built: Built) -> tuple[WorkerEngine, WorkerConfig]:
        """The engine that was built, and the runtime's settings for it."""
        engine = cls(built.engine, built.arguments, seal=built.seal, smoke=built.smoke)
        return engine, runtime.worker_config(built.arguments)

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """The SDK's factory; ``python -m worker`` calls `of` itself."""
        return cls.of(build(argv))

    async def start(self, worker_id: int) -> EngineConfig:
        self._loop = asyncio.get_running_loop()
        try:
            if self._boundaries is not None:
                await self._boundaries.open()
                self.metrics.watch(self._boundaries)
            info = await self.engine.start()
            self._chains = await asyncio.to_thread(self._make_chains, self.arguments, info, self.metrics.registry)
            self._server = await asyncio.to_thread(Server.of, info, self.arguments)
            if self._smoke_wanted:
                eos = info.eos_token_ids[0] if info.eos_token_ids else None
                self._smoke = await asyncio.to_thread(SmokeTest, self.arguments.model_path, eos)
        except Exception as error:  # the start-up boundary: the operator gets one line, the log the traceback
            if not isinstance(error, StartupError):
                logger.exception("start-up failed")
            self.startup_error = " ".join(str(error).split()) or type(error).__name__
            raise
        gc.collect()
        gc.freeze()  # model and vocabulary stay; collections that look at them would hold up a step for milliseconds
        if self.arguments.log_requests:
            self._log = RequestLog()
        self._info = info
        self.in_flight.block_size = info.kv_block_size
        if isinstance(self.engine, SelfReporting):
            self.engine.tell_broken(self._break)
            self.engine.tell_load(self._take_load)
        self.metrics.describe_engine(info)
        if self.arguments.disaggregation_mode != "aggregated":
            TransferMetrics(self.engine, self.disaggregation, self.metrics.registry)
        return runtime.engine_config(info, self.arguments)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """One request. Everything that can refuse it does so before the first chunk."""
        entry = RequestEntry(request_id=context.id(), model=self.arguments.served_model_name)
        record: RequestRecord | None = None
        try:
            serving = await self._admit(entry, request, context.metadata or {})
            record = serving.record
            try:
                async with contextlib.aclosing(serving.deltas) as deltas:
                    async for delta in deltas:
                        await record.written()
                        entry.finish_reason = delta.finish_reason
                        chunk = self._chunk(serving, delta)
                        if delta.finish_reason is not None:  # the runtime may drop the stream without coming back
                            asyncio.get_running_loop().call_later(SENT_S, _end_record, record, delta.finish_reason)
                        if chunk is not None:
                            yield chunk
            finally:
                self._in_loop(self._release, serving)
            _end_record(record, entry.finish_reason)
        except (GeneratorExit, asyncio.CancelledError):  # the runtime drops a stream that nobody reads any more
            if entry.finish_reason is None:
                entry.finish_reason = "cancelled"
                self._in_loop(self.metrics.count_outcome, "cancelled")
            if record is not None:
                self._in_loop(_end_record, record, entry.finish_reason)
            raise
        except ServingError as error:
            entry.failed(error)
            self._record(context.id(), error)
            if record is not None:
                await _let_go(record, error)
            raise runtime.to_dynamo(error) from None
        except Exception as error:  # the request boundary: one request's unknown error stays its own
            entry.failed(error)
            logger.exception("request %s failed", context.id())
            self.metrics.count_outcome("unknown_error")
            if record is not None:
                await _let_go(record, error)
            if self._faults.record():
                self._break(f"{self._faults.limit} unknown errors within {self._faults.window_s:g} s")
            raise runtime.to_dynamo(ServingError("internal error")) from error
        finally:
            if self._log is not None:
                self._log.write(entry)

    async def _admit(self, entry: RequestEntry, raw: Mapping[str, Any], metadata: Mapping[str, str]) -> _Serving:
        info, _ = self._ready()
        entry.numerics = info.numerics
        request = parse_request(raw, RequestLimits(info.context_length, info.vocab_size, info.eos_token_ids))
        entry.is_probe, entry.num_prompt_tokens = request.is_probe, len(request.prompt_token_ids)
        admitted = self.in_flight.admit(entry.request_id, 0)  # in flight while its grammars compile, but without KV
        record: RequestRecord = UnrecordedRequest(request)
        try:
            record = await self._record_of(admitted, request)
            return await self._begin(entry, admitted, record, metadata)
        except _Aborted:
            record.linger()
            builder = ResponseBuilder(request, frozenset())
            return _Serving(admitted, builder, _cancelled(), Selection(), entry, record)
        except BaseException as error:
            self._in_loop(self.in_flight.release, admitted)
            await _let_go(record, error)
            raise

    async def _record_of(self, admitted: InFlightRequest, request: GenerationRequest) -> RequestRecord:
        """The request's record, with the request as its first worker received it."""
        if self._boundaries is None or request.is_probe:
            return UnrecordedRequest(request)
        return await self._while_in_flight(admitted, self._boundaries.begin(admitted.request_id, request))

    async def _begin(
        self, entry: RequestEntry, admitted: InFlightRequest, record: RequestRecord, metadata: Mapping[str, str]
    ) -> _Serving:
        """Give an admitted request to the engine."""
        info, chains = self._ready()
        request = record.request
        prompt, generated = request.prompt_token_ids, request.generated_token_ids
        entry.num_prompt_tokens = len(prompt)
        selection = chains.select(request, metadata)
        entry.processors = [one.name for one in selection.processors if one.name in chains.catalog]
        part = self.disaggregation.part_of(request, selection)
        seed = self._seed(request, part)
        record.write(seed)
        work = self._parameters(request, chains, selection, info, seed)
        has_chain = selection.processors or selection.order or selection.receipt
        params = await (self._while_in_flight(admitted, work) if has_chain else work)
        entry.seed = params.seed
        hidden = params.end_token_ids - request.shown_stop_token_ids
        builder = entry.builder = ResponseBuilder(request, hidden, self._receipt(request, params, selection))
        builder.num_cached_tokens = min(part.num_cached_tokens, len(prompt))
        deltas = self.engine.generate(admitted.request_id, prompt, params, part.kv, request.cache_salt, generated)
        if selection.deadline is not None:
            deltas = until(selection.deadline, deltas)
        self.disaggregation.check_local_prefills(part)
        self.in_flight.grow(admitted, len(request.token_ids))
        self.disaggregation.admit(admitted, part)
        self._publish_load()
        return _Serving(admitted, builder, deltas, selection, entry, record, self._safe_chunks(chains, request))

    def _safe_chunks(self, chains: ServedChainBuilder, request: GenerationRequest) -> SafeChunks | None:
        """Where chunks of the request may end, if it may migrate and the tokenizer is known."""
        vocabulary = chains.facts.vocabulary
        if self._boundaries is None or vocabulary.tokenizer is None:
            return None
        return SafeChunks(byte_index(vocabulary), request.stop_strings)

    def _seed(self, request: GenerationRequest, part: Part) -> int:
        """The client's seed, else the prefill worker's if it came with the KV, else a new one."""
        if request.params.seed is not None:
            return request.params.seed
        handed_over = part.kv.handle.get("seed") if isinstance(part.kv, ReadKv) else None
        return handed_over if isinstance(handed_over, int) else self._seeds.getrandbits(SEED_BITS)

    def _receipt(
        self, request: GenerationRequest, params: SamplingParams, selection: Selection
    ) -> RequestReceipt | None:
        if not selection.receipt or self._server is None:
            return None
        prompt, generated, smoke = request.prompt_token_ids, request.generated_token_ids, self._smoke is not None
        return RequestReceipt(self._server, prompt, params, selection, generated_token_ids=generated, smoke=smoke)

    async def _while_in_flight(self, admitted: InFlightRequest, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, unless `abort` or `migrate_all` end it."""
        task = asyncio.create_task(work)
        admission = self._admissions[admitted.request_id] = _Admission(task)
        try:
            await asyncio.wait([task])
            if admission.failure is not None:
                raise admission.failure
            return task.result()
        finally:
            self._in_loop(self._end_admission, admitted, admission)

    def _end_admission(self, admitted: InFlightRequest, admission: _Admission) -> None:
        admission.task.cancel()  # nobody waits for it any more, and it may not be done
        if self._admissions.get(admitted.request_id) is admission:
            del self._admissions[admitted.request_id]

    def _chunk(self, serving: _Serving, delta: TokenDelta) -> dict[str, Any] | None:
        self._count_processors(delta)
        self.disaggregation.release(serving.admitted)
        self.in_flight.grow(serving.admitted, len(delta.token_ids))
        self._publish_load()
        if serving.safe_chunks is not None:
            safe = serving.safe_chunks.take(delta)
            if safe is None:
                return None
            delta = safe
        chunk = serving.builder.chunk(delta)
        if chunk["token_ids"]:
            serving.entry.token_sent()
        if delta.kv is not None:
            tokens = serving.record.request.token_ids
            chunk["disaggregated_params"] = self.disaggregation.transfer_params(tokens, serving.selection, delta)
        if delta.finish_reason is not None:
            self.metrics.count_outcome(delta.finish_reason)
        elif not chunk["token_ids"] and "engine_data" not in chunk:
            return None
        return chunk

    def _ready(self) -> tuple[EngineInfo, ServedChainBuilder]:
        if self.broken is not None:
            raise EngineBroken(self.broken)
        if self._info is None or self._chains is None:
            raise Draining("this worker is not serving yet")
        return self._info, self._chains

    async def _parameters(
        self,
        request: GenerationRequest,
        chains: ServedChainBuilder,
        selection: Selection,
        info: EngineInfo,
        seed: int,
    ) -> SamplingParams:
        """What the engine gets: sampling controls, and the chain of the selected processors."""
        prompt, params = request.prompt_token_ids, request.params
        smoke = self._smoke.processors(len(prompt)) if self._smoke else []
        fixed = info.draws_by_seed or selection.receipt  # the seed in a receipt is that of its tokens
        budget = params.max_tokens
        if self.arguments.disaggregation_mode == "prefill":  # is asked for one token, whatever decode will be asked for
            budget = info.context_length - len(prompt)
        ends, generated = params.end_token_ids, request.generated_token_ids
        chain = await chains.build(selection, prompt, ends, seed, budget, request.cache_salt, generated)
        callables = [] if chain is None else create_trtllm_adapters([chain], end_id=params.end_id)
        return for_engine(
            params,
            seed=seed if fixed else params.seed,
            logits_processor=[*smoke, *callables] or None,
        )

    def _count_processors(self, delta: TokenDelta) -> None:
        """On the last delta of a request with processors: metrics, and circuit breakers."""
        if delta.receipt is None or self._chains is None:
            return
        self._chains.metrics.count(delta.receipt, delta.failure)
        if delta.failure is not None and delta.failure.reason != "unsatisfiable":
            self._chains.breaker.record(delta.failure.processor)
        elif delta.finish_reason in ("stop", "length"):
            self._chains.breaker.record_success(record.name for record in delta.receipt.records)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call in the event loop; the garbage collector closes dropped streams in any thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call, *arguments)
        else:
            call(*arguments)

    def _release(self, serving: _Serving) -> None:
        self.in_flight.release(serving.admitted)
        self.disaggregation.release(serving.admitted)
        self._publish_load()
        builder = serving.builder
        num_generated = builder.num_generated_tokens - builder.num_replayed_tokens
        self.metrics.count_tokens(builder.num_prompt_tokens, builder.num_cached_tokens, num_generated)

    def _record(self, request_id: str, error: ServingError) -> None:
        outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "unknown_error")
        self.metrics.count_outcome(outcome)
        if isinstance(error, InvalidRequest):
            self.metrics.count_refusal(error.field)
            # 1.4.2's frontend keeps the message from many clients. A bad KV transfer is none's
            # fault, but the workers'.
            level = logging.ERROR if error.field.startswith("prefill_result") else logging.WARNING
            logger.log(level, "request %s refused: %s", request_id, error)
        if isinstance(error, EngineBroken):
            self._break(str(error))

    def _break(self, reason: str) -> None:
        """Stop serving for good: migrate every request, and exit with a non-zero status."""
        if self.broken is None:
            self.broken = " ".join(reason.split())
            logger.error("engine broken, leaving: %s", self.broken)
            self.in_flight.close()
            self._end_admissions(EngineBroken(self.broken))
            self.engine.migrate_all()
            self._shut_down()

    def migrate_all(self) -> int:
        """End every request in flight with `Draining`, those not yet in the engine too."""
        return self._end_admissions(Draining("this worker is shutting down")) + self.engine.migrate_all()

    def _end_admissions(self, failure: Exception) -> int:
        admissions = list(self._admissions.values())
        for admission in admissions:
            admission.end(failure)
        return len(admissions)

    async def abort(self, context: Any) -> None:
        """Free everything that the request holds. Called by the runtime when the client is gone."""
        request_id = context.id()
        if request_id in self._admissions:
            self._admissions[request_id].end(_Aborted())
        self.engine.abort(request_id)
        self.disaggregation.release_id(request_id)
        if self.in_flight.release_id(request_id):
            self._publish_load()

    async def is_quiescent(self) -> bool:
        """Whether no lease is left; the runtime asks a prefill worker that is shutting down."""
        return self.engine.num_leased() == 0

    def signalled(self) -> None:
        """SIGTERM or SIGINT arrived; a second one ends the drain: what is in flight migrates."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.in_flight.stop_waiting()

    async def cleanup(self) -> None:
        """Drain, then stop the engine. Also called after a failed `start`; idempotent."""
        if self._info is not None and not self._drained:
            self._drained = True
            budget_s = 0.0 if self.broken is not None else self.arguments.drain_timeout_s
            outcome = await drain(self.in_flight, self, budget_s)
            self.metrics.count_drain(outcome)
            logger.info("drained: %d finished, %d migrated", outcome.num_finished, outcome.num_migrated)
        if self._chains is not None:
            await self._chains.close()
        await self.engine.stop()
        if self._boundaries is not None:
            await self._boundaries.close()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self.metrics.registry)

    async def kv_event_sources(self) -> list[KvEventSource]:
        """The source of KV events, if they are published: the engine reports its blocks itself."""
        if not self.arguments.publishes_kv_events or self._info is None:
            return []
        block_size = self._info.kv_block_size

        def on_ready(publisher: Any) -> None:
            self.engine.report_blocks(runtime.RouterEvents(publisher, block_size))

        return [PushSource(on_ready=on_ready, dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher
        self._publish_load()

    def _take_load(self, used: int, total: int) -> None:
        """The engine's own count of KV blocks."""
        if self._info is not None and self._info.total_kv_blocks != total:
            self._info = replace(self._info, total_kv_blocks=total)
        self._used_blocks = used
        self._publish_load()

    def _publish_load(self) -> None:
        """Publish the KV blocks in use for the router, whenever their number changes."""
        if self._publisher is None or self._info is None:
            return
        total = self._info.total_kv_blocks
        used = min(self.in_flight.num_blocks if self._used_blocks is None else self._used_blocks, total)
        if used != self._published_blocks:
            self._published_blocks = used
            snapshot = ComponentSnapshot(used, total, used / total if total else 0.0, dp_rank=0)
            self._publisher.publish(0, snapshot)

    async def health_check_payload(self) -> dict[str, Any] | None:
        """One greedy token through the real path; the prompt is any id of the vocabulary."""
        eos = self._info.eos_token_ids if self._info is not None else ()
        return build_health_check_payload(eos[0] if eos else 0)

    def supported_controls(self) -> set[str]:
        return {"info", CATALOG_CONTROL}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """``POST /engine/control/info`` or ``/logits_processors``: what this worker is, and
        which processors it has.
        """
        if control == CATALOG_CONTROL and self._chains is not None:
            return {"status": "ok", "history": self.arguments.history, **self._chains.catalog.as_json()}
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
            "history": self.arguments.history,
            "processor_errors": self.arguments.processor_errors,
            "context_length": info.context_length,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "total_kv_blocks": info.total_kv_blocks,
            "in_flight": len(self.in_flight),
            "draining": self.in_flight.closed,
            "smoke_test": self._smoke is not None,
        }


def _end_record(record: RequestRecord, finish_reason: str | None) -> None:
    """The request has ended without an error."""
    if finish_reason == "cancelled":
        record.linger()
    else:
        record.remove()


async def _let_go(record: RequestRecord, error: BaseException) -> None:
    """Do with a request's record what the error asks for that its stream ends with."""
    if isinstance(error, Draining):
        await record.pass_on()
    elif isinstance(error, EngineBroken):
        record.abandon()
    elif isinstance(error, asyncio.CancelledError):
        record.linger()
    else:
        record.remove()


async def _cancelled() -> AsyncGenerator[TokenDelta, None]:
    """What an engine says of a request that was aborted."""
    yield TokenDelta(finish_reason="cancelled")
