"""Metrics and health of a worker, over HTTP for Prometheus and Kubernetes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from worker.arguments import Arguments
from worker.errors import StartupError
from worker.server.connection_threads import ConnectionThreads, listening

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

Problem = Callable[[], str | None]

ANSWER_S = 2.0
"""Seconds for the event loop to answer a probe: below the timeout of the probes in `k8s/`."""


class _Server(ConnectionThreads, WSGIServer):
    """Answers each probe in a thread."""


class _Handler(WSGIRequestHandler):
    timeout = 30  # seconds that a client may take to send its request

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""


class ProbeServer:
    """Serves ``/metrics``, ``/live`` and ``/health`` in threads of its own.

    ``/live`` and ``/health`` are answered by the event loop of the worker, 200 or 503 with the
    reason, and 503 if it does not answer: a worker whose loop stands still is not alive.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        registry: The metrics.
        live: Reason to restart the worker, None without; called in the event loop.
        ready: Reason to send it no requests, None without; called in the event loop.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, live: Problem, ready: Problem) -> None:
        self._loop = asyncio.get_running_loop()
        self._problems = {"/live": live, "/health": ready}
        self._metrics = make_wsgi_app(registry)
        self._server = listening(_Server, host, port, _Handler)
        self._server.set_app(self._answer)
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    async def close(self) -> None:
        """Answer no more."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        if path in self._problems:
            problem = self._ask(self._problems[path])
            status = "200 OK" if problem is None else "503 Service Unavailable"
        else:
            problem, status = "there are /metrics, /live and /health", "404 Not Found"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{problem or 'ok'}\n".encode()]

    def _ask(self, problem: Problem) -> str | None:
        """Result of ``problem``, called in the event loop."""

        async def ask() -> str | None:
            return problem()

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            return asked.result(ANSWER_S)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            return f"the event loop has not answered for {ANSWER_S:g} s"


def open_probes(arguments: Arguments, registry: CollectorRegistry, live: Problem, ready: Problem) -> ProbeServer | None:
    """The server that ``--metrics-port`` asks for, None if it asks for none; see `ProbeServer`.

    Raises:
        StartupError: the port is taken, or the address is not this machine's.
    """
    if not arguments.metrics_port:
        return None
    try:
        return ProbeServer(arguments.metrics_host, arguments.metrics_port, registry, live, ready)
    except OSError as error:
        raise StartupError(f"--metrics-port {arguments.metrics_port}: {error.strerror or error}") from None
