"""`RequestServer`: serves requests with one of our engines, whatever the runtime."""

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

from prometheus_client import CollectorRegistry

from adapters.catalog import Selection
from adapters.vocabulary import byte_index
from worker import __version__
from worker.arguments import Arguments
from worker.disaggregation.seal import Seal
from worker.disaggregation.serving import DisaggregatedServing, Part, TransferMetrics
from worker.engines import (
    EngineInfo,
    EngineRequest,
    KeepsAlive,
    Measured,
    ReadKv,
    RequestHints,
    SelfReporting,
    ServingEngine,
    Speculating,
    TokenDelta,
)
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
from worker.metrics import LoadMetrics, SpeculationMetrics, WorkerMetrics
from worker.migration.records import BoundaryRecords, RequestRecord, UnrecordedRequest, records_of
from worker.migration.safe_chunks import SafeChunks
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.processors.smoke import SmokeTest
from worker.request_log import RequestEntry, RequestLog
from worker.requests.client import client_of
from worker.requests.deadline import until
from worker.requests.receipts import RequestReceipt, Server, digest_of_model
from worker.requests.request import GenerationRequest, RequestLimits, parse_request
from worker.requests.response import ResponseBuilder
from worker.requests.stop_text import StopText, TokenBytes
from worker.sampling import SamplingParams
from worker.sampling.field_processors import for_engine
from worker.tracing import RequestTracer, to_endpoint

logger = logging.getLogger(__name__)

SEED_BITS = 53
"""Bits of the seeds that the worker draws: integers that every JSON library reads exactly, so that
a client can send the seed of a receipt back.
"""

SENT_S = 0.01
"""Time for the runtime to come back for more behind the last chunk of an answer."""

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
    stop_text: StopText | None = None
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


class RequestServer:
    """Serves requests with `engine`; a runtime brings them and takes their chunks away.

    Attributes:
        startup_error: Why `load` failed, for the one line that the operator sees.
        broken: Why the engine cannot serve any more, None while it can.
        tracer: Makes spans of requests, None without ``--otlp-endpoint``.
    """

    def __init__(
        self,
        engine: ServingEngine,
        arguments: Arguments,
        *,
        seal: Seal | None = None,
        smoke: bool = False,
        shut_down: Callable[[], None],
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
        self.tracer: RequestTracer | None = None
        self._server: Server | None = None
        self._seeds = random.Random(secrets.randbits(128))  # the system's own would let go of the interpreter each time
        self._shut_down = shut_down
        self._info: EngineInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._used_blocks: int | None = None  # as the engine itself says, where it does
        self._num_signals = 0
        self._keepalive: asyncio.Task[None] | None = None
        self._drained = False

    async def load(self) -> EngineInfo:
        """Load the model and everything around it. Raises what `startup_error` says in one line."""
        self._loop = asyncio.get_running_loop()
        try:
            if self._boundaries is not None:
                await self._boundaries.open()
                self.metrics.watch(self._boundaries)
            digest = digest_of_model(self.arguments)
            info = await self.engine.start()
            if self._boundaries is not None:
                self._boundaries.computes(info)
            self._chains = await asyncio.to_thread(self._make_chains, self.arguments, info, self.metrics.registry)
            self._server = await asyncio.to_thread(Server.of, info, self.arguments, digest)
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
        if self.arguments.otlp_endpoint is not None:
            self.tracer = to_endpoint(self.arguments.otlp_endpoint, self.arguments.served_model_name)
        self._info = info
        self.in_flight.block_size = info.kv_block_size
        if self.arguments.keepalive_s and self.arguments.disaggregation_mode != "prefill":
            # a prefill worker's first chunk is its last
            self._keepalive = asyncio.create_task(self._keep_alive())
        if isinstance(self.engine, SelfReporting):
            self.engine.tell_broken(self._break)
            self.engine.tell_load(self._take_load)
        self.metrics.describe_engine(info)
        if isinstance(self.engine, Measured):
            LoadMetrics(self.engine, info, self.metrics.registry)
        if isinstance(self.engine, Speculating):
            SpeculationMetrics(self.engine, self.metrics.registry)
        if self.arguments.disaggregation_mode != "aggregated":
            TransferMetrics(self.engine, self.disaggregation, self.metrics.registry)
        return info

    async def serve(
        self,
        request_id: str,
        request: Mapping[str, Any],
        metadata: Mapping[str, str],
        choice: int = 0,
        trace: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Serve one request. Everything that can refuse it does so before the first chunk.

        Args:
            request_id: Not in use by another request.
            request: As `worker.requests.fields` has it.
            metadata: Of the runtime, where processors may be selected too.
            choice: Which of several answers to one prompt this is, behind the one that the request
                selects; each is a request of its own.
            trace: Headers of the W3C trace context that its spans, and the engine's, belong to.

        Raises:
            ServingError: it was refused, or failed; see `worker.errors`.
        """
        entry = RequestEntry(request_id=request_id, model=self.arguments.served_model_name)
        record: RequestRecord | None = None
        try:
            serving = await self._admit(entry, request, metadata, choice, trace or {})
            record = serving.record
            try:
                async with contextlib.aclosing(serving.deltas) as deltas:
                    async for delta in deltas:
                        await record.written()
                        stop_text = serving.stop_text
                        if stop_text is not None:
                            stop_text.end(delta)
                        entry.finish_reason = delta.finish_reason
                        chunk = self._chunk(serving, delta)
                        if delta.finish_reason is not None:  # the runtime may drop the stream without coming back
                            asyncio.get_running_loop().call_later(SENT_S, _end_record, record, delta.finish_reason)
                        if chunk is not None:
                            yield chunk
                        if stop_text is not None and stop_text.found:
                            break
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
            self._record(request_id, error)
            if record is not None:
                await _let_go(record, error)
            raise
        except Exception as error:  # the request boundary: one request's unknown error stays its own
            entry.failed(error)
            logger.exception("request %s failed", request_id)
            self.metrics.count_outcome("unknown_error")
            if record is not None:
                await _let_go(record, error)
            if self._faults.record():
                self._break(f"{self._faults.limit} unknown errors within {self._faults.window_s:g} s")
            raise ServingError("internal error") from error
        finally:
            if self._log is not None:
                self._log.write(entry)
            if self.tracer is not None:
                self.tracer.ended(entry, trace)

    async def _admit(
        self,
        entry: RequestEntry,
        raw: Mapping[str, Any],
        metadata: Mapping[str, str],
        choice: int,
        trace: Mapping[str, str],
    ) -> _Serving:
        info, _ = self._ready()
        entry.numerics = info.numerics
        request = parse_request(raw, RequestLimits(info.context_length, info.vocab_size, info.eos_token_ids))
        entry.is_probe, entry.num_prompt_tokens = request.is_probe, len(request.prompt_token_ids)
        admitted = self.in_flight.admit(entry.request_id, 0)  # in flight while its grammars compile, but without KV
        record: RequestRecord = UnrecordedRequest(request)
        try:
            record = await self._record_of(admitted, request)
            return await self._begin(entry, admitted, record, metadata, choice, trace)
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
        self,
        entry: RequestEntry,
        admitted: InFlightRequest,
        record: RequestRecord,
        metadata: Mapping[str, str],
        choice: int,
        trace: Mapping[str, str],
    ) -> _Serving:
        """Give an admitted request to the engine."""
        info, chains = self._ready()
        request = record.request
        prompt, generated = request.prompt_token_ids, request.generated_token_ids
        entry.num_prompt_tokens = len(prompt)
        selection = chains.select(request, metadata)
        choice += selection.choice
        entry.processors = [one.name for one in selection.processors if one.name in chains.catalog]
        part = self.disaggregation.part_of(request, selection)
        seed = self._seed(request, part)
        record.write(seed)
        hints = RequestHints(trace, request.priority, client_of(metadata))
        asked = EngineRequest(
            admitted.request_id,
            prompt,
            request.params,
            generated_token_ids=generated,
            choice=choice,
            kv=part.kv,
            cache_salt=request.cache_salt,
            hints=hints,
        )
        work = self._with_chain(asked, chains, selection, info, seed)
        has_chain = selection.processors or selection.order or selection.receipt
        asked = await (self._while_in_flight(admitted, work) if has_chain else work)
        params = entry.params = asked.params
        entry.seed = params.seed
        hidden = params.end_token_ids - request.shown_stop_token_ids
        receipt = self._receipt(request, params, selection, choice)
        builder = entry.builder = ResponseBuilder(request, hidden, receipt)
        builder.num_cached_tokens = min(part.num_cached_tokens, len(prompt))
        deltas = self.engine.generate(asked)
        if selection.deadline is not None:
            deltas = until(selection.deadline, deltas)
        self.disaggregation.check_local_prefills(part)
        self.in_flight.grow(admitted, len(request.token_ids))
        self.disaggregation.admit(admitted, part)
        self._publish_load()
        serving = _Serving(admitted, builder, deltas, selection, entry, record)
        vocabulary = chains.vocabulary
        return serving if vocabulary.tokenizer is None else self._with_text(serving, byte_index(vocabulary))

    def _with_text(self, serving: _Serving, token_bytes: TokenBytes) -> _Serving:
        """A request whose tokens are text: where it ends, and where its chunks may."""
        request = serving.record.request
        stops, stop_text, safe_chunks = [stop for stop in request.stop_strings if stop], None, None
        if stops and self.arguments.disaggregation_mode != "prefill":
            num_ignored = request.params.min_tokens or 0
            stop_text = StopText(token_bytes, stops, num_ignored, len(request.generated_token_ids))
        if self._boundaries is not None:
            safe_chunks = SafeChunks(token_bytes, stops)
        return replace(serving, stop_text=stop_text, safe_chunks=safe_chunks)

    def _seed(self, request: GenerationRequest, part: Part) -> int:
        """The client's seed, else the prefill worker's if it came with the KV, else a new one."""
        if request.params.seed is not None:
            return request.params.seed
        handed_over = part.kv.handle.get("seed") if isinstance(part.kv, ReadKv) else None
        return handed_over if isinstance(handed_over, int) else self._seeds.getrandbits(SEED_BITS)

    def _receipt(
        self, request: GenerationRequest, params: SamplingParams, selection: Selection, choice: int
    ) -> RequestReceipt | None:
        if not selection.receipt or self._server is None:
            return None
        prompt, generated, smoke = request.prompt_token_ids, request.generated_token_ids, self._smoke is not None
        return RequestReceipt(
            self._server, prompt, params, selection, generated_token_ids=generated, smoke=smoke, choice=choice
        )

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
            del task, admission  # they hold the exception, whose traceback has this frame: the request would stay

    def _end_admission(self, admitted: InFlightRequest, admission: _Admission) -> None:
        admission.task.cancel()  # nobody waits for it any more, and it may not be done
        if self._admissions.get(admitted.request_id) is admission:
            del self._admissions[admitted.request_id]

    def _chunk(self, serving: _Serving, delta: TokenDelta) -> dict[str, Any] | None:
        if delta.is_empty:
            return {"token_ids": [], "index": delta.index} if self.arguments.keepalive_s else None
        if self._chains is not None:
            self._chains.count(delta)
        entry = serving.entry
        entry.queue_times, entry.failure = delta.queue_times, delta.failure
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
            is_first, passed_s = entry.first_token_s is None, entry.tokens_sent()
            if not entry.is_probe:
                self.metrics.observe_tokens(len(chunk["token_ids"]), passed_s, is_first=is_first)
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

    async def _with_chain(
        self, asked: EngineRequest, chains: ServedChainBuilder, selection: Selection, info: EngineInfo, seed: int
    ) -> EngineRequest:
        """The request with its chain, and with the fields that are left to the engine."""
        prompt, params = list(asked.prompt_token_ids), asked.params
        smoke = self._smoke.processors(len(prompt)) if self._smoke else []
        fixed = info.draws_by_seed or selection.receipt  # the seed in a receipt is that of its tokens
        budget = params.max_tokens
        if self.arguments.disaggregation_mode == "prefill":  # is asked for one token, whatever decode will be asked for
            budget = info.context_length - len(prompt)
        own = for_engine(params, seed=seed if fixed else params.seed, logits_processor=smoke or None)
        return await chains.prepare(replace(asked, params=own), selection, seed, budget)

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
        builder, entry = serving.builder, serving.entry
        num_generated = builder.num_generated_tokens - builder.num_replayed_tokens
        self.metrics.count_tokens(builder.num_prompt_tokens, builder.num_cached_tokens, num_generated)
        if not entry.is_probe:
            tokens = builder.num_prompt_tokens, builder.num_generated_tokens
            self.metrics.observe_request(entry.began_s, entry.clock(), entry.queue_times, *tokens)

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

    async def _keep_alive(self) -> None:
        while isinstance(self.engine, KeepsAlive):
            await asyncio.sleep(self.arguments.keepalive_s)
            self.engine.keep_alive()

    def migrate_all(self) -> int:
        """End every request in flight with `Draining`, those not yet in the engine too."""
        return self._end_admissions(Draining("this worker is shutting down")) + self.engine.migrate_all()

    def _end_admissions(self, failure: Exception) -> int:
        admissions = list(self._admissions.values())
        for admission in admissions:
            admission.end(failure)
        return len(admissions)

    def end_request(self, request_id: str) -> None:
        """Free everything that a request holds, because its client is gone. Ignores unknown ids."""
        if request_id in self._admissions:
            self._admissions[request_id].end(_Aborted())
        self.engine.abort(request_id)
        self.disaggregation.release_id(request_id)
        if self.in_flight.release_id(request_id):
            self._publish_load()

    def fail(self, reason: str) -> None:
        """Stop serving for good, because of something around the engine."""
        self._break(reason)

    def signalled(self) -> None:
        """SIGTERM or SIGINT arrived; a second one ends the drain: what is in flight migrates."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.in_flight.stop_waiting()

    @property
    def is_leaving(self) -> bool:
        """Whether the worker shuts down, or is about to."""
        return self._num_signals > 0 or self.in_flight.closed

    async def close(self) -> None:
        """Drain, then stop the engine. Also called after a failed `load`; idempotent."""
        if self._info is not None and not self._drained:
            self._drained = True
            budget_s = 0.0 if self.broken is not None else self.arguments.drain_timeout_s
            outcome = await drain(self.in_flight, self, budget_s)
            self.metrics.count_drain(outcome)
            logger.info("drained: %d finished, %d migrated", outcome.num_finished, outcome.num_migrated)
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._chains is not None:
            await self._chains.close()
        await self.engine.stop()
        if self._boundaries is not None:
            await self._boundaries.close()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def _take_load(self, used: int, total: int) -> None:
        """The engine's own count of KV blocks."""
        if self._info is not None and self._info.total_kv_blocks != total:
            self._info = replace(self._info, total_kv_blocks=total)
        self._used_blocks = used
        self._publish_load()

    def _publish_load(self) -> None:
        """The number of KV blocks in use may have changed."""

    @property
    def num_used_blocks(self) -> int:
        """KV blocks in use, as the engine says itself, or of the requests in flight."""
        return self.in_flight.num_blocks if self._used_blocks is None else self._used_blocks

    @property
    def info(self) -> EngineInfo:
        """Of the loaded engine."""
        assert self._info is not None, "load comes first"
        return self._info

    @property
    def chains(self) -> ServedChainBuilder:
        """Builds the chains of the loaded model."""
        assert self._chains is not None, "load comes first"
        return self._chains

    def description(self) -> dict[str, Any]:
        """What this worker is and how it is set, for operators."""
        info = self.info
        return {
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
