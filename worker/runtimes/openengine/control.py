"""``openengine.v1.Control``: what the worker is, its state and load, and the end of requests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence

from grpc.aio import ServicerContext

from worker.engines.weights import NotSupported
from worker.errors import Draining, InvalidRequest, ServingError
from worker.lifecycle.whole import WholeChanges
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.description import RANK, load_info, model_info, server_info
from worker.runtimes.openengine.errors import UnknownRequest, UnknownSession, Unsupported, engine_error
from worker.runtimes.openengine.health import health
from worker.runtimes.openengine.inference import Inference
from worker.runtimes.openengine.kv_events import KEPT_BATCHES, KvEvents
from worker.runtimes.openengine.request import check_model
from worker.server import RequestServer
from worker.server.adapters import ServedAdapters


class Control:
    """Serves the calls about the worker itself. One event loop only.

    Args:
        server: Server of requests, which may not be loaded yet.
        inference: Has the requests in flight.

    Attributes:
        instance_id: Id of this process.
    """

    def __init__(self, server: RequestServer, inference: Inference) -> None:
        self.instance_id = uuid.uuid4().hex
        self._server = server
        self._inference = inference
        self._events: KvEvents | None = None
        self._address = ("", 0)
        self._loras: dict[str, wire.LoraAdapter] = {}  # by name, those loaded over this protocol
        self._changes = WholeChanges()

    def publish(self, events: KvEvents, address: tuple[str, int]) -> None:
        """Offer KV events; ``address`` is the host and port that clients reach this worker at."""
        self._events, self._address = events, address

    async def get_server_info(self, request: wire.GetServerInfoRequest, context: ServicerContext) -> wire.ServerInfo:
        self._check_loaded()
        return server_info(self._server, self.instance_id)

    async def get_model_info(self, request: wire.GetModelInfoRequest, context: ServicerContext) -> wire.ModelInfo:
        self._check_loaded()
        check_model(request.model, self._inference.names)
        return model_info(self._server)

    async def get_load(self, request: wire.GetLoadRequest, context: ServicerContext) -> wire.LoadInfo:
        self._check_loaded()
        return load_info(self._server, self.instance_id, per_rank=request.include_per_rank)

    async def health(self, request: wire.HealthRequest, context: ServicerContext) -> wire.HealthResponse:
        check_model(request.model, self._inference.names)
        return await health(self._server, request)

    async def abort(self, request: wire.AbortRequest, context: ServicerContext) -> wire.AbortResponse:
        kind = request.WhichOneof("target")
        if kind is None:
            raise InvalidRequest("target", "must be request_id, kv_session or all_requests, got none")
        if kind == "kv_session":
            raise UnknownSession("kv_session", "this worker has no KV sessions")
        if kind == "all_requests":
            number = self._inference.abort_all()
            status = wire.ABORT_STATUS_ABORTED if number else wire.ABORT_STATUS_ALREADY_FINISHED
            return wire.AbortResponse(status=status, message=f"{number} requests were in flight")
        if not self._inference.abort(request.request_id):
            raise UnknownRequest("request_id", "no request in flight has this id")
        return wire.AbortResponse(status=wire.ABORT_STATUS_ABORTED)

    async def load_lora(self, request: wire.LoadLoraRequest, context: ServicerContext) -> wire.LoadLoraResponse:
        adapters, wanted = self._adapters(), request.adapter
        if wanted.lora_name in adapters.digests:
            return wire.LoadLoraResponse(adapter=self._lora(wanted.lora_name), already_loaded=True)

        async def loaded() -> None:
            await adapters.load(wanted.lora_name, wanted.source_path)
            self._loras[wanted.lora_name] = wanted

        try:
            await self._changes.made(loaded())
        except NotSupported as error:
            raise Unsupported("adapter", str(error)) from None
        except InvalidRequest:
            if wanted.lora_name not in adapters.digests:
                raise
            return wire.LoadLoraResponse(adapter=self._lora(wanted.lora_name), already_loaded=True)  # meanwhile
        return wire.LoadLoraResponse(adapter=wanted)

    async def unload_lora(self, request: wire.UnloadLoraRequest, context: ServicerContext) -> wire.UnloadLoraResponse:
        adapters, name = self._adapters(), request.lora_name

        async def unloaded() -> wire.LoraAdapter:
            await adapters.unload(name)
            return self._loras.pop(name, None) or wire.LoraAdapter(lora_name=name)

        try:
            adapter = await self._changes.made(unloaded())
        except NotSupported as error:
            raise Unsupported("lora_name", str(error)) from None
        return wire.UnloadLoraResponse(adapter=adapter)

    async def list_loras(self, request: wire.ListLorasRequest, context: ServicerContext) -> wire.ListLorasResponse:
        return wire.ListLorasResponse(adapters=[self._lora(name) for name in self._adapters().digests])

    def _adapters(self) -> ServedAdapters:
        self._check_loaded()
        assert self._server.adapters is not None
        if not self._server.adapters.are_served:
            raise Unsupported("lora", "this worker serves no LoRA adapters")
        return self._server.adapters

    def _lora(self, name: str) -> wire.LoraAdapter:
        """An adapter with the id that it was loaded with; those of the command line have none."""
        return self._loras.get(name) or wire.LoraAdapter(lora_name=name)

    async def get_kv_event_sources(
        self, request: wire.GetKvEventSourcesRequest, context: ServicerContext
    ) -> wire.GetKvEventSourcesResponse:
        self._check_loaded()
        if self._events is None or not _has_rank(request.data_parallel_ranks):
            return wire.GetKvEventSourcesResponse()
        host, port = self._address
        source = wire.KvEventSource(
            transport="grpc",
            endpoint_addr=wire.KvEndpoint(host=host, port=port, protocol="grpc"),
            data_parallel_rank=RANK,
            encoding="protobuf",
            buffer_steps=KEPT_BATCHES,
        )
        return wire.GetKvEventSourcesResponse(sources=[source])

    async def subscribe_kv_events(self, request: wire.SubscribeKvEventsRequest, context: ServicerContext) -> None:
        """Send KV events until the client goes; one that is too slow ends with an error."""
        self._check_loaded()
        if self._events is None:
            raise Unsupported("SubscribeKvEvents", "this worker publishes no KV events")
        if not _has_rank(request.data_parallel_ranks):
            raise InvalidRequest("data_parallel_ranks", f"must have {RANK}, this worker's only rank")
        if request.include_snapshot and request.start_sequence_number:
            raise InvalidRequest("start_sequence_number", "must not be given with include_snapshot")
        await context.send_initial_metadata(())  # says that events come from now on
        has_begun = False
        batches = self._events.subscribe(request.start_sequence_number, snapshot=request.include_snapshot)
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    has_begun = True
                    await context.write(wire.SubscribeKvEventsResponse(batch=batch))
        except ServingError as error:
            if not has_begun:
                raise
            await context.write(wire.SubscribeKvEventsResponse(error=engine_error(error)))

    def _check_loaded(self) -> None:
        if self._server.preparation is None:
            raise Draining("this worker is not serving yet")


def _has_rank(ranks: Sequence[int]) -> bool:
    return not ranks or RANK in ranks
