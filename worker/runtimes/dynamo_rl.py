"""The routes of ``--engine-port`` in the list of Dynamo's frontend, ``/v1/rl/workers``.

The frontend asks an endpoint called ``rl``, beside the one that generates, for ``routes``; trainers
then ask ``system_url/engine/<route>``, which is ``--engine-port`` here. The SDK of 1.6.1 gives a
backend no runtime, so that this endpoint has one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from worker.arguments import Arguments
from worker.server.engine_port import EnginePort

ENDPOINT = "rl"
_SYSTEM_PORT = "DYN_SYSTEM_PORT"


def has_rl_workers() -> bool:
    """Whether the installed ai-dynamo has such a list: 1.4.2 has none."""
    return importlib.util.find_spec("dynamo.common.rl") is not None


class RlEndpoint:
    """The endpoint ``rl`` of one worker.

    Args:
        arguments: Options of the worker.
        port: Port of its routes.
    """

    def __init__(self, arguments: Arguments, port: EnginePort) -> None:
        from dynamo.common.rl import RLRouteRegistry
        from dynamo.runtime import DistributedRuntime

        self._url = f"http://{reachable(arguments.engine_host)}:{port.port}"
        self._registry = RLRouteRegistry(self)
        self._registry.add_routes(dict.fromkeys(port.routes.by_name, port.routes.tell))
        loop = asyncio.get_running_loop()
        with without_system_port():  # which the worker's own runtime serves
            self._runtime = DistributedRuntime(loop, arguments.discovery_backend, arguments.request_plane)
        self._endpoint = self._runtime.endpoint(f"{arguments.namespace}.{arguments.component}.{ENDPOINT}")
        self._serving = asyncio.ensure_future(self._endpoint.serve_endpoint(self._answer))

    def system_status_server_url(self) -> str:
        """URL of the routes, for the registry."""
        return self._url

    async def close(self) -> None:
        """Leave the frontend's list."""
        with contextlib.suppress(Exception):  # whatever the runtime raises, the worker leaves
            await self._endpoint.unregister_endpoint_instance()
        self._serving.cancel()

    async def _answer(self, request: Any = None) -> AsyncIterator[Any]:
        async for answer in self._registry.dispatch_stream(request):
            yield answer


def reachable(host: str) -> str:
    """The host of a URL at which others reach a port that listens on an address."""
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"[{host}]" if ":" in host else host


@contextmanager
def without_system_port() -> Iterator[None]:
    """Hides the port of Dynamo's system server from a second runtime in this process."""
    port = os.environ.pop(_SYSTEM_PORT, None)
    try:
        yield
    finally:
        if port is not None:
            os.environ[_SYSTEM_PORT] = port
