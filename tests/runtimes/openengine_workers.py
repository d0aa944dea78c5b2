"""Workers of the OpenEngine runtime in the test's own event loop, and a client of theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.rpc import status_pb2
from running_workers import taking_requests

from worker.arguments import Arguments, parse_arguments
from worker.build import Built, make_engine
from worker.engines import ServingEngine
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.runtime import OpenEngineWorker

DEFAULTS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--numerics": "exact",
    "--kv-blocks": "512",
    "--grpc-port": "0",
    "--max-num-seqs": "16",
    "--drain-timeout-s": "60",
}
PROMPT = "Hello world"

Metadata = Sequence[tuple[str, str]]


class OpenEngineClient:
    """A client of one worker.

    Args:
        channel: Channel to it.
        metadata: Metadata of every call.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self.channel = channel
        self.metadata = metadata

    def call(self, name: str, request: Any, metadata: Metadata = (), timeout: float | None = None) -> Any:
        """The call ``Service.Method``: to be awaited, or a stream."""
        service_name, method_name = name.split(".")
        method = wire.DESCRIPTOR.services_by_name[service_name].methods_by_name[method_name]
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        ask = make(
            f"/openengine.v1.{service_name}/{method_name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(wire, method.output_type.name).FromString,
        )
        return ask(request, metadata=(*self.metadata, *metadata), timeout=timeout)

    def generate(self, metadata: Metadata = (), timeout: float | None = None, **fields: Any) -> Any:
        """The stream of a request's events."""
        return self.call("Inference.Generate", generate_request(**fields), metadata, timeout)

    async def answer(self, metadata: Metadata = (), **fields: Any) -> GeneratedAnswer:
        """All events of a request."""
        return GeneratedAnswer([event async for event in self.generate(metadata, **fields)])

    async def refusal(self, metadata: Metadata = (), **fields: Any) -> grpc.aio.AioRpcError:
        """The status of a request that is refused before its first event."""
        events = []
        try:
            async for event in self.generate(metadata, **fields):
                events.append(event)
        except grpc.aio.AioRpcError as error:
            assert not events
            return error
        raise AssertionError(f"answered: {events}")


def generate_request(**fields: Any) -> wire.GenerateRequest:
    """A request for a few greedy tokens; ``extra`` is a dictionary."""
    extra = fields.pop("extra", None)
    if "token_ids" not in fields:
        fields.setdefault("prompt", PROMPT)
    fields.setdefault("stopping", {"max_tokens": 4})
    request = wire.GenerateRequest(**fields)
    if extra is not None:
        request.extra.update(extra)
    return request


class GeneratedAnswer:
    """The events of a request, by kind."""

    def __init__(self, events: list[wire.GenerateResponse]) -> None:
        self.events = events
        self.kinds = [event.WhichOneof("event") for event in events]
        self.tokens = [event.token for event in events if event.HasField("token")]
        self.finished = [event.finished for event in events if event.HasField("finished")]
        self.prompts = [event.prompt for event in events if event.HasField("prompt")]
        self.errors = [event.error for event in events if event.HasField("error")]
        self.usage = events[-1].usage

    def text(self, index: int = 0) -> str:
        return "".join(output.text for output in self.tokens if output.output_index == index)

    def infos(self, index: int = 0) -> list[wire.TokenInfo]:
        return [info for output in self.tokens if output.output_index == index for info in output.tokens]

    def ids(self, index: int = 0) -> list[int]:
        return [info.token_id for info in self.infos(index)]


def engine_error_of(error: grpc.aio.AioRpcError) -> wire.EngineError:
    """The `EngineError` in the details of a status."""
    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    found = wire.EngineError()
    assert status.details[0].Unpack(found)
    return found


def make_worker(
    model: Path, *argv: str, engine: Callable[[Arguments], ServingEngine] = make_engine
) -> OpenEngineWorker:
    """A worker that serves ``model`` as ``tiny``, not started; ``engine`` makes its engine."""
    given = ["--runtime", "openengine", "--model-path", str(model), "--served-model-name", "tiny", *argv]
    for flag, value in DEFAULTS.items():
        given += [] if flag in argv else [flag, value]
    arguments = parse_arguments(given, {})
    return OpenEngineWorker(Built(engine(arguments), arguments, None, smoke=False))


@asynccontextmanager
async def running(model: Path, *argv: str) -> AsyncIterator[OpenEngineWorker]:
    """A worker that takes requests."""
    async with taking_requests(make_worker(model, *argv)) as worker:
        yield worker


@asynccontextmanager
async def serving(model: Path, *argv: str) -> AsyncIterator[OpenEngineClient]:
    """A client of a worker that takes requests."""
    async with running(model, *argv) as worker, connected(worker.port) as client:
        yield client


@asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[OpenEngineClient]:
    """A client of the worker at a port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", **options) as channel:
        yield OpenEngineClient(channel)
