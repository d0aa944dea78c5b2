"""The routes of ``--engine-port`` in the list of Dynamo's frontend, ``/v1/rl/workers``.

The frontend asks an endpoint called ``rl``, beside the one that generates, for ``routes``; trainers
then ask ``system_url/engine/<route>``, which is ``--engine-port`` here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dynamo.runtime import DistributedRuntime

from worker.arguments import Arguments
from worker.server.engine_port import EnginePort

ENDPOINT = "rl"
_SYSTEM_PORT = "DYN_SYSTEM_PORT"


def has_rl_workers() -> bool:
    """Whether the installed ai-dynamo has such a list: 1.4.2 has none."""
    return importlib.util.find_spec("dynamo.common.rl") is not None


class OwnEndpoints:
    """Endpoints beside the one that generates, on a runtime of their own: the SDK gives none.

    Args:
        arguments: The worker's options.
        handlers: Handlers by the last parts of the endpoints' names.
    """

    def __init__(self, arguments: Arguments, handlers: Mapping[str, Callable[..., AsyncIterator[Any]]]) -> None:
        loop = asyncio.get_running_loop()
        with _without_system_port():  # which the worker's own runtime serves
            self._runtime = DistributedRuntime(loop, arguments.discovery_backend, arguments.request_plane)
        path = f"{arguments.namespace}.{arguments.component}"
        self._endpoints = [self._runtime.endpoint(f"{path}.{name}") for name in handlers]
        self._serving = [
            asyncio.ensure_future(endpoint.serve_endpoint(handler))
            for endpoint, handler in zip(self._endpoints, handlers.values(), strict=True)
        ]

    async def close(self) -> None:
        """Leave discovery."""
        for endpoint, serving in zip(self._endpoints, self._serving, strict=True):
            with contextlib.suppress(Exception):  # whatever the runtime raises, the worker leaves
                await endpoint.unregister_endpoint_instance()
            serving.cancel()


class RlEndpoint:
    """The endpoint ``rl`` of one worker.

    Args:
        arguments: Options of the worker.
        port: Port of its routes.
    """

    def __init__(self, arguments: Arguments, port: EnginePort) -> None:
        from dynamo.common.rl import RLRouteRegistry

        self._url = f"http://{reachable(arguments.engine_host)}:{port.port}"
        self._registry = RLRouteRegistry(self)
        self._registry.add_routes(dict.fromkeys(port.routes.by_name, port.routes.tell))
        self._endpoints = OwnEndpoints(arguments, {ENDPOINT: self._answer})

    def system_status_server_url(self) -> str:
        """URL of the routes, for the registry."""
        return self._url

    async def close(self) -> None:
        """Leave the frontend's list."""
        await self._endpoints.close()

    async def _answer(self, request: Any = None) -> AsyncIterator[Any]:
        async for answer in self._registry.dispatch_stream(request):
            yield answer


def reachable(host: str) -> str:
    """The host of a URL at which others reach a port that listens on an address."""
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"[{host}]" if ":" in host else host


@contextmanager
def _without_system_port() -> Iterator[None]:
    """Hides the port of Dynamo's system server from a second runtime in this process."""
    port = os.environ.pop(_SYSTEM_PORT, None)
    try:
        yield
    finally:
        if port is not None:
            os.environ[_SYSTEM_PORT] = port
