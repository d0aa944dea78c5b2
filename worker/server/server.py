"""`RequestServer`: serves requests with one of our engines, whatever the runtime."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from worker.arguments import Arguments
from worker.disaggregation.seal import Seal
from worker.disaggregation.serving import DisaggregatedServing, TransferMetrics
from worker.engines import (
    Collecting,
    EngineInfo,
    KeepsAlive,
    KeepsReceipts,
    KvPart,
    Measured,
    ReadKv,
    ReleasesKv,
    ReportsLoad,
    RequestHints,
    SelfReporting,
    ServingEngine,
    StopsLoading,
    TokenDelta,
)
from worker.engines.weights import ChangesWeights
from worker.errors import Draining, EngineBroken, ServingError, StartupError, one_line
from worker.lifecycle.drain import InFlightRequests, drain
from worker.lifecycle.faults import FaultWindow
from worker.metrics import LoadMetrics, WorkerMetrics
from worker.migration.records import BoundaryRecords, records_of
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.requests.client import client_of
from worker.requests.deadline import until
from worker.requests.receipts import digest_of_model
from worker.requests.refusals import ONLY_CHECKED, asks
from worker.server.adapters import ServedAdapters
from worker.server.engine_port import EnginePort, open_engine_port
from worker.server.interruptible import Aborted, InPreparation, call_in
from worker.server.kv_load import KvLoad
from worker.server.preparation import MakeChains, Preparation
from worker.server.reports import RequestReports
from worker.server.served_request import ServedRequest

logger = logging.getLogger(__name__)


class RequestServer:
    """Serves requests with `engine`; a runtime brings them and sends their chunks.

    Attributes:
        startup_error: Reason why `load` failed, for the one line that the operator sees.
        broken: Reason why the engine cannot serve any more, None while it can.
        preparation: Prepares requests for the loaded model, None before `load`.
        in_flight: Requests in flight.
        kv_load: KV blocks in use.
        metrics: Metrics of the worker.
        reports: Reports of requests to operators.
        disaggregation: Role of the worker in disaggregated serving.
        smoke: Whether every answer is ``Hello world!``.
        adapters: LoRA adapters of the worker, None before `load`.
        engine_port: The port of ``--engine-port``, None without, and before `load`.
    """

    def __init__(
        self,
        engine: ServingEngine,
        arguments: Arguments,
        *,
        seal: Seal | None = None,
        smoke: bool = False,
        shut_down: Callable[[], None],
        make_chains: MakeChains = make_chain_builder,
    ) -> None:
        """``seal`` signs KV transfers; prefill and decode workers need one.

        ``shut_down`` asks the runtime to shut this process down; called at most once, when the
        engine broke.

        ``make_chains`` makes the builder of chains, in a thread, once the model is loaded.
        """
        self.engine = engine
        self._changes_weights = engine if isinstance(engine, ChangesWeights) else None  # slow to ask of each request
        self._keeps_receipts = engine if isinstance(engine, KeepsReceipts) else None
        self.arguments = arguments
        self.in_flight = InFlightRequests()
        self.kv_load = KvLoad(self.in_flight)
        self.metrics = WorkerMetrics(self.in_flight)
        self.reports = RequestReports(arguments.served_model_name, self.metrics)
        self.disaggregation = DisaggregatedServing(
            arguments.disaggregation_mode, seal, arguments.kv_lease_s, arguments.max_local_prefills
        )
        self.startup_error: str | None = None
        self.broken: str | None = None
        self._boundaries: BoundaryRecords | None = records_of(arguments)
        self._make_chains = make_chains
        self.smoke = smoke
        self._shut_down = shut_down
        self.preparation: Preparation | None = None
        self.adapters: ServedAdapters | None = None
        self.engine_port: EnginePort | None = None
        self._preparing = InPreparation()
        self._faults = FaultWindow()
        self._num_signals = 0
        self._keepalive: asyncio.Task[None] | None = None
        self._is_drained = False

    async def load(self) -> EngineInfo:
        """Load the model and everything around it. Raises what `startup_error` says in one line."""
        registry, make_chains, smoke = self.metrics.registry, self._make_chains, self.smoke
        try:
            if self._boundaries is not None:
                await self._boundaries.open()
                self.metrics.watch(self._boundaries)
            if self._num_signals:  # before there was anything that could be stopped
                raise StartupError("told to stop before the model was loaded")
            digest = digest_of_model(self.arguments)
            info = await self.engine.start()
            preparation = await Preparation.load(
                info, self.arguments, digest, registry, make_chains=make_chains, smoke=smoke
            )
        except Exception as error:  # the start-up boundary: the operator gets one line, the log the traceback
            if not isinstance(error, StartupError):
                logger.exception("start-up failed")
            self.startup_error = one_line(error)
            raise
        gc.collect()
        gc.freeze()  # model and vocabulary stay; collections that look at them would hold up a step for milliseconds
        self.reports.open(self.arguments)
        if self._boundaries is not None:
            self._boundaries.computes(info, self._updated_weights, preparation.model_digest)
        self.preparation = preparation
        self.kv_load.start(info)
        if self.arguments.keepalive_s and self.arguments.disaggregation_mode != "prefill":
            # a prefill worker's first chunk is its last
            self._keepalive = asyncio.create_task(_keep_alive(self.engine, self.arguments.keepalive_s))
        if isinstance(self.engine, SelfReporting):
            self.engine.tell_broken(self.fail)
        if isinstance(self.engine, ReportsLoad):
            self.engine.tell_load(self.kv_load.report)
        _publish_engine(self.engine, info, self.disaggregation, self.metrics)
        self.adapters = ServedAdapters(self.engine, info, self.arguments.served_model_name)
        self._open_engine_port(self.adapters)
        return info

    def _updated_weights(self) -> str:
        weights = None if self._changes_weights is None else self._changes_weights.weights
        return "" if weights is None else weights.weight_version.updated_digest

    def _open_engine_port(self, adapters: ServedAdapters) -> None:
        try:
            self.engine_port = open_engine_port(self.arguments, self.engine, adapters, self._preparing)
        except StartupError as error:
            self.startup_error = one_line(error)
            raise
        if self.engine_port is not None:
            self.metrics.watch_weights(self.engine, self.engine_port.routes.counts)

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
            request_id: Id that no other request in flight has.
            request: The request, with the fields of `worker.requests.fields`.
            metadata: The runtime's metadata, where processors may be selected too.
            choice: Index of this answer among several to one prompt, behind the one that the
                request selects; each is a request of its own.
            trace: Headers of the W3C trace context that its spans, and the engine's, belong to.

        Raises:
            ServingError: it was refused, or failed; see `worker.errors`.
        """
        served = ServedRequest(request_id, self.in_flight, self.disaggregation, self.reports)
        shows_empty = bool(self.arguments.keepalive_s)
        try:
            async with contextlib.aclosing(await self._begin(served, request, metadata, choice, trace or {})) as deltas:
                if asks(request, ONLY_CHECKED):
                    yield served.checked()
                    served.end()
                    return
                async for delta in deltas:
                    for part in await served.take(delta, self.chains, self._keeps_receipts):
                        chunk = served.chunk(part, shows_empty=shows_empty)
                        if chunk is not None:
                            yield chunk
                    if served.is_complete:
                        break
            served.end()
        except (GeneratorExit, asyncio.CancelledError):  # the runtime drops a stream whose client is gone
            served.drop()
            raise
        except Exception as error:  # the request boundary: one request's unknown error stays its own
            await served.fail(error)
            reason = _reason_to_fail(error, self._faults)
            if reason is not None:
                self.fail(reason)
            if isinstance(error, ServingError):
                raise
            raise ServingError("internal error") from error
        finally:
            self.reports.ended(served.entry, trace)

    async def _begin(
        self,
        served: ServedRequest,
        raw: Mapping[str, Any],
        metadata: Mapping[str, str],
        choice: int,
        trace: Mapping[str, str],
    ) -> AsyncGenerator[TokenDelta, None]:
        """Parse, admit and prepare a request, and give it to the engine: its deltas."""
        if self.broken is not None:
            raise EngineBroken(self.broken)
        preparation = self.preparation
        if preparation is None:
            raise Draining("this worker is not serving yet")
        chains, request_id = preparation.chains, served.entry.request_id
        served.entry.numerics = preparation.info.numerics
        parsed, selection = preparation.parse(raw, metadata, self._updated_weights())
        served.entry.processors = [one.name for one in selection.processors if one.name in chains.catalog]
        served.admit(parsed)
        kv: KvPart | None = None
        # the answer, and its end, are the decode worker's
        deadline = None if self.disaggregation.only_prefills else selection.deadline
        loop = asyncio.get_running_loop()
        try:
            with self._preparing.holding(request_id, served.preparing), served.preparing.until(deadline):
                request = await served.read_record(self._boundaries)
                if not asks(raw, ONLY_CHECKED):  # for which no prompt is computed anywhere
                    kv = self.disaggregation.kv_of(request, selection)
                hints = RequestHints(trace, request.priority, client_of(metadata), request.dp_rank, request.session_id)
                choice += selection.choice
                engine_request = preparation.without_chain(request_id, request, selection, choice, kv, hints)
                assert served.record is not None
                served.record.write(engine_request.seed)
                if chains.has_work(selection):
                    engine_request = await served.preparing.run(preparation.with_chain(engine_request, selection))
        except BaseException as error:  # a cancellation, too: the engine gets no request that could end the lease
            if isinstance(kv, ReadKv):
                self._end_lease(loop, kv, len(request.token_ids))
            if isinstance(error, Aborted):
                return served.aborted(error.finish_reason)
            raise
        receipt, is_migratable = preparation.receipt(engine_request, selection), self._boundaries is not None
        served.begin(engine_request, selection, receipt, chains, is_migratable=is_migratable)
        deltas = self.engine.generate(engine_request)
        if deadline is None:
            return deltas
        if isinstance(kv, ReadKv) and deadline <= time.time():  # nobody begins with the deltas
            self._end_lease(loop, kv, len(request.token_ids))
        return until(deadline, deltas)

    def _end_lease(self, loop: asyncio.AbstractEventLoop, kv: ReadKv, num_tokens: int) -> None:
        """Let the prefill worker have the KV back of a request that does not get to the engine."""
        if isinstance(self.engine, ReleasesKv):
            call_in(loop, self.engine.release_kv, kv, num_tokens)

    def end_request(self, request_id: str) -> None:
        """Free everything that a request holds, because its client is gone. Ignores unknown ids."""
        self._preparing.interrupt(request_id, Aborted())
        self.engine.abort(request_id)
        self.disaggregation.release_id(request_id)
        self.in_flight.release_id(request_id)

    def migrate_all(self) -> int:
        """End every request in flight with `Draining`, those not yet in the engine too."""
        return self._preparing.interrupt_all(Draining("this worker is shutting down")) + self.engine.migrate_all()

    def fail(self, reason: str) -> None:
        """Stop serving for good: migrate every request, and exit with a non-zero status."""
        if self.broken is None:
            self.broken = " ".join(reason.split())
            logger.error("engine broken, leaving: %s", self.broken)
            self.in_flight.close()
            self._preparing.interrupt_all(EngineBroken(self.broken))
            self.engine.migrate_all()
            self._shut_down()

    def signalled(self) -> None:
        """SIGTERM or SIGINT arrived: a load that can be ended ends. A second one ends the drain:
        what is in flight migrates.
        """
        self._num_signals += 1
        if self.preparation is None and isinstance(self.engine, StopsLoading):
            self.engine.stop_loading()
        if self._num_signals > 1:
            self.in_flight.stop_waiting()

    @property
    def is_leaving(self) -> bool:
        """Whether the worker shuts down, or is about to."""
        return self._num_signals > 0 or self.in_flight.closed

    async def close(self) -> None:
        """Drain, then stop the engine. Also called after a failed `load`; idempotent."""
        if self.preparation is not None and not self._is_drained:
            self._is_drained = True
            budget_s = 0.0 if self.broken is not None else self.arguments.drain_timeout_s
            outcome = await drain(self.in_flight, self, budget_s)
            self.metrics.count_drain(outcome)
            logger.info("drained: %d finished, %d migrated", outcome.num_finished, outcome.num_migrated)
        if self.engine_port is not None:
            await self.engine_port.close()
            self.engine_port = None
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self.preparation is not None:
            await self.preparation.chains.close()
        await self.engine.stop()
        if self._boundaries is not None:
            await self._boundaries.close()
        await self.reports.close()

    @property
    def info(self) -> EngineInfo:
        """Description of the loaded engine."""
        assert self.preparation is not None, "load comes first"
        return self.preparation.info

    @property
    def chains(self) -> ServedChainBuilder:
        """Builder of the loaded model's chains."""
        assert self.preparation is not None, "load comes first"
        return self.preparation.chains


def _reason_to_fail(error: Exception, faults: FaultWindow) -> str | None:
    """The reason to stop serving, if an error says it is one, or is one unknown error too many."""
    if isinstance(error, EngineBroken):
        return str(error)
    if not isinstance(error, ServingError) and faults.record():
        return f"{faults.limit} unknown errors within {faults.window_s:g} s"
    return None


def _publish_engine(
    engine: ServingEngine, info: EngineInfo, disaggregation: DisaggregatedServing, metrics: WorkerMetrics
) -> None:
    metrics.describe_engine(info)
    if isinstance(engine, Measured):
        LoadMetrics(engine, info, metrics.registry)
    if isinstance(engine, Collecting):
        metrics.registry.register(engine)
    if disaggregation.role != "aggregated":
        TransferMetrics(engine, disaggregation, metrics.registry)


async def _keep_alive(engine: ServingEngine, interval_s: float) -> None:
    while isinstance(engine, KeepsAlive):
        await asyncio.sleep(interval_s)
        engine.keep_alive()
