"""Front doors before workers behind OpenEngine in the test's event loop, and scripted workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from worker.arguments import parse_arguments
from worker.frontdoor.client_connection import protocol_factory
from worker.frontdoor.openengine.frontend import EngineFrontend
from worker.frontdoor.openengine.opening import open_engines
from worker.frontdoor.options import parse_options
from worker.frontdoor.process import make_front_door
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.endpoint import Endpoint
from worker.runtimes.openengine.identity import ENGINE_NAME, SCHEMA_REVISION

WAIT_S = 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
Generate = Callable[[wire.GenerateRequest, Any], Awaitable[None]]


@asynccontextmanager
async def door(
    model: Path, *urls: str, arguments: tuple[str, ...] = (), num_ready: int | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a front door whose workers are ready."""
    given = ["--port", "0", "--upstream", ",".join(urls), "--model-path", str(model), *arguments]
    options = parse_options(given, {})
    engines = await asyncio.to_thread(open_engines, options)
    engines.start()
    front = make_front_door(options, engines)
    server = await asyncio.get_running_loop().create_server(protocol_factory(front), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        await ready(engines, len(urls) if num_ready is None else num_ready)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False) as client:
            yield client
    finally:
        server.close()
        await front.drain(0.1)
        await engines.stop()


async def ready(engines: EngineFrontend, number: int) -> None:
    """Wait until as many workers are ready."""
    async with asyncio.timeout(WAIT_S):
        while sum(each.is_ready for each in engines._engines.workers) < number:
            await asyncio.sleep(0.02)


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> AsyncGenerator[Any, None]:
    """The data of the events of a streamed answer."""
    async with client.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as answer:
        if answer.status_code != 200:
            yield json.loads(await answer.aread())
            return
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


async def ask(client: httpx.AsyncClient, path: str = CHAT, **body: Any) -> Any:
    """The whole answer."""
    answer = await client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(client: httpx.AsyncClient, path: str = CHAT, **body: Any) -> tuple[int, Any]:
    """Status and error."""
    answer = await client.post(path, json={"model": "tiny", "messages": HELLO, **body})
    return answer.status_code, answer.json()["error"]


class ScriptedWorker:
    """A worker whose answers a test writes.

    Args:
        generate: Answers a request.
        told: Fields of `ServerInfo` and of its ``extra`` that are not those of a worker of ours.
        load: Requests that it says it has.

    Attributes:
        requests: The requests, in order.
        instance: Id of its process.
    """

    def __init__(self, generate: Generate | None = None, load: int = 0, **told: Any) -> None:
        self.requests: list[wire.GenerateRequest] = []
        self.instance = "i"
        self._generate = generate or two_tokens
        self._load = load
        self._told = {
            "engine_name": ENGINE_NAME,
            "numerics": "exact",
            "kv_dtype": "float32",
            "model_digest": "",
            "tokens_digest": "",
            **told,
        }

    async def generate(self, request: wire.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        await self._generate(request, context)

    async def health(self, request: Any, context: Any) -> wire.HealthResponse:
        return wire.HealthResponse(state=wire.HEALTH_STATE_READY)

    async def get_load(self, request: Any, context: Any) -> wire.LoadInfo:
        return wire.LoadInfo(instance_id=self.instance, running_requests=self._load)

    async def get_server_info(self, request: Any, context: Any) -> wire.ServerInfo:
        extra = ParseDict(
            {name: self._told[name] for name in ("numerics", "kv_dtype", "model_digest", "tokens_digest")}, Struct()
        )
        name = self._told["engine_name"]
        return wire.ServerInfo(
            engine_name=name, instance_id=self.instance, schema_revision=SCHEMA_REVISION, extra=extra
        )

    async def get_model_info(self, request: Any, context: Any) -> wire.ModelInfo:
        return wire.ModelInfo(served_model_name="tiny", max_context_length=2048)

    def __getattr__(self, name: str) -> Any:
        """The calls that a front door has no use for."""
        if name.startswith("_"):
            raise AttributeError(name)

        async def refuse(request: Any, context: Any) -> None:
            raise AssertionError(f"{name} is not expected")

        return refuse

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its address, while it serves."""
        flags = ["--runtime", "openengine", "--model-path", "/m", "--grpc-port", "0"]
        endpoint = Endpoint({"Inference": self, "Control": self}, parse_arguments(flags, {}))
        await endpoint.start()
        try:
            yield f"grpc://127.0.0.1:{endpoint.port}"
        finally:
            await endpoint.stop(0)


def token(*ids: int) -> wire.GenerateResponse:
    """The event of new tokens."""
    return wire.GenerateResponse(token=wire.TokenOutput(tokens=[wire.TokenInfo(token_id=each) for each in ids]))


def finish(reason: Any = wire.FINISH_REASON_LENGTH) -> wire.GenerateResponse:
    """The last event of an answer of two tokens."""
    usage = wire.Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    return wire.GenerateResponse(finished=wire.GenerationFinished(reason=reason), usage=usage)


async def two_tokens(request: wire.GenerateRequest, context: Any) -> None:
    """Answer with two tokens."""
    await context.write(token(40, 41))
    await context.write(finish())
