"""`WorkerEngine`: Dynamo's `LLMEngine`, serving one of our engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.backend.worker import WorkerConfig

from worker.arguments import Arguments
from worker.build import Built, build
from worker.disaggregation.seal import Seal
from worker.engines import DataParallel, ServingEngine
from worker.engines.forward_pass import ReportsForwardPasses
from worker.errors import ServingError
from worker.processors.builder import make_chain_builder
from worker.requests.refusals import refusal_chunk
from worker.requests.response import STOP_STRING, STOP_TOKEN
from worker.runtimes import dynamo as runtime
from worker.runtimes.dynamo_adapters import AdapterEndpoints, AdapterModels, endpoints_wanted
from worker.runtimes.dynamo_rl import RlEndpoint, has_rl_workers
from worker.runtimes.file_discovery import FileEntries, entries_of, keep_registered
from worker.server import RequestServer
from worker.server.description import describe
from worker.server.preparation import MakeChains

CATALOG_CONTROL = "logits_processors"


class WorkerEngine(LLMEngine):
    """Serves one of our engines through Dynamo's unified backend.

    Attributes:
        server: Serves the requests.
    """

    def __init__(
        self,
        engine: ServingEngine,
        arguments: Arguments,
        *,
        seal: Seal | None = None,
        smoke: bool = False,
        shut_down: Callable[[], None] = runtime.shut_down,
        make_chains: MakeChains = make_chain_builder,
    ) -> None:
        """The arguments are those of `RequestServer`; by default SIGTERM shuts the runtime down."""
        self.server = RequestServer(
            engine, arguments, seal=seal, smoke=smoke, shut_down=shut_down, make_chains=make_chains
        )
        self._registration: asyncio.Task[None] | None = None
        self._passes: runtime.PlannerReports | None = None
        self._adapters: AdapterModels | None = None
        self._adapter_endpoints: AdapterEndpoints | None = None
        self._entries: FileEntries | None = None
        self._rl: RlEndpoint | None = None

    @classmethod
    def of(cls, built: Built) -> tuple[WorkerEngine, WorkerConfig]:
        """The engine that was built, and the runtime's settings for it."""
        chains = partial(make_chain_builder, ahead=built.grammars)
        engine = cls(built.engine, built.arguments, seal=built.seal, smoke=built.smoke, make_chains=chains)
        return engine, runtime.worker_config(built.arguments)

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """The SDK's factory; ``python -m worker`` calls `of` itself."""
        return cls.of(build(argv))

    async def start(self, worker_id: int) -> EngineConfig:
        info, arguments = await self.server.load(), self.server.arguments
        self._entries = entries = entries_of(arguments.discovery_backend, os.environ, worker_id)
        if entries is not None:
            self._registration = asyncio.create_task(keep_registered(entries, lambda: self.server.is_leaving))
        return runtime.engine_config(info, arguments)

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Called by the runtime before it registers the model."""
        server = self.server
        if server.engine_port is not None and has_rl_workers():
            self._rl = RlEndpoint(server.arguments, server.engine_port)
        assert server.adapters is not None
        self._adapters = AdapterModels(endpoint, server.info, server.arguments, self._forget, self._remember)
        self._adapters.begin()
        server.adapters.publish, server.adapters.withdraw = self._adapters.publish, self._adapters.withdraw
        if endpoints_wanted(os.environ):
            self._adapter_endpoints = AdapterEndpoints(server.arguments, server.adapters)
        if server.arguments.publish_forward_pass_metrics and isinstance(server.engine, ReportsForwardPasses):
            self._passes = runtime.PlannerReports(endpoint, server.info.num_dp_ranks)
            server.engine.report_forward_passes(self._passes.publish)

    def _forget(self, adapter: str) -> None:
        if self._entries is not None:
            self._entries.forget(adapter)

    def _remember(self, adapter: str) -> None:
        if self._entries is not None:
            self._entries.remember(adapter)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """One request. Everything that can refuse it does so before the first chunk."""
        try:
            trace = runtime.trace_headers(context)
            serving = self.server.serve(context.id(), request, context.metadata or {}, trace=trace)
            async with contextlib.aclosing(serving) as chunks:
                async for chunk in chunks:
                    for key in (STOP_STRING, STOP_TOKEN):  # not in Dynamo's protocol
                        chunk.pop(key, None)
                    if chunk.get("finish_reason") == "abort":  # nor is this; engine_data says it
                        chunk["finish_reason"] = "cancelled"
                    yield chunk
        except ServingError as error:
            refusal = refusal_chunk(request, error)
            if refusal is None:
                raise runtime.to_dynamo(error) from error.__cause__
            yield refusal

    async def abort(self, context: Any) -> None:
        """Called by the runtime when the client is gone."""
        self.server.end_request(context.id())

    async def is_quiescent(self) -> bool:
        """Whether no lease is left; the runtime asks a prefill worker that is shutting down."""
        return self.server.engine.num_leased() == 0

    async def cleanup(self) -> None:
        """Drain, then stop the engine. Also called after a failed `start`; idempotent."""
        if self._registration is not None:
            self._registration.cancel()
        if self._adapters is not None:
            self._adapters.close()
        if self._adapter_endpoints is not None:
            await self._adapter_endpoints.close()
        if self._passes is not None:
            self._passes.close()
        if self._rl is not None:
            await self._rl.close()
        await self.server.close()

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self.server.metrics.registry)

    async def kv_event_sources(self) -> list[KvEventSource]:
        """A source of KV events for each data parallel rank, if they are published: the engine
        reports its blocks itself.
        """
        server = self.server
        if not server.arguments.publishes_kv_events or server.preparation is None:
            return []
        block_size, num_ranks = server.info.kv_block_size, server.info.num_dp_ranks
        sinks: dict[int, runtime.RouterEvents] = {}

        def on_ready(publisher: Any, dp_rank: int) -> None:
            sinks[dp_rank] = runtime.RouterEvents(publisher, block_size)
            if len(sinks) < num_ranks:
                return
            if isinstance(server.engine, DataParallel):
                server.engine.report_blocks_of_ranks([sinks[each] for each in range(num_ranks)])
            else:
                server.engine.report_blocks(sinks[0])

        return [PushSource(partial(on_ready, dp_rank=dp_rank), dp_rank) for dp_rank in range(num_ranks)]

    def component_metrics_dp_ranks(self) -> list[int]:
        server = self.server
        return list(range(1 if server.preparation is None else server.info.num_dp_ranks))

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Publish the KV blocks in use for the router, whenever their number changes."""
        load, published = self.server.kv_load, dict[int, int]()

        def publish() -> None:
            for dp_rank in self.component_metrics_dp_ranks():
                used, total = load.used_by(dp_rank), load.rank_total
                if published.get(dp_rank) != used:
                    published[dp_rank] = used
                    share = used / total if total else 0.0
                    publisher.publish(dp_rank, ComponentSnapshot(used, total, share, dp_rank=dp_rank))

        load.on_change = publish
        publish()

    async def health_check_payload(self) -> dict[str, Any] | None:
        """One greedy token through the real path; the prompt is any id of the vocabulary."""
        eos = () if self.server.preparation is None else self.server.info.eos_token_ids
        return build_health_check_payload(eos[0] if eos else 0)

    def supported_controls(self) -> set[str]:
        return {"info", CATALOG_CONTROL}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """``POST /engine/control/info`` or ``/logits_processors``: what this worker is, and
        which processors it has.
        """
        server = self.server
        if control not in self.supported_controls() or server.preparation is None:
            return await super().engine_control(control, body)
        if control == "info":
            return {"status": "ok", **describe(server)}
        return {"status": "ok", "history": server.arguments.history, **server.chains.catalog.as_json()}
