"""The front door, which all connections of clients share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any, Protocol

from adapters.catalog import Catalog
from worker.frontdoor import playground
from worker.frontdoor.answering import Asker
from worker.frontdoor.batches import BatchService
from worker.frontdoor.bodies import Bodies
from worker.frontdoor.client_names import Naming
from worker.frontdoor.clients import Hosts, Keys, label_of
from worker.frontdoor.cors import Cors
from worker.frontdoor.error_forms import ErrorForm
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.http import Document
from worker.frontdoor.options import Options
from worker.frontdoor.request_reader import Head
from worker.frontdoor.requests import names_of, parsed, rewritten_fields
from worker.frontdoor.rewriting import Rewriting
from worker.frontdoor.routes import CATALOGUE, MESSAGES, OPENAPI, Route, Routes, openapi
from worker.frontdoor.summaries import Source, Summary, health, metrics
from worker.frontdoor.texts import Texts
from worker.frontdoor.tool_reading import needs_chunks
from worker.frontdoor.translated import has_several_prompts, is_translated
from worker.frontdoor.uploads import Uploads
from worker.frontdoor.upstreams import Upstreams

logger = logging.getLogger(__name__)

REASONS_AT_ONCE = 4
"""Failed requests that are computed once more at a time, to learn why: a worker that dies leaves
many behind.
"""

COMING_S = 1.0
"""Seconds for which a connection that waits for a request makes no room for another one: its
request may be on its way.
"""

LAST_S = 1.0
"""Seconds that answers get to end with an error, after the time that they had to finish."""


class OpenConnection(Protocol):
    """A client's connection."""

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""

    def abort_if_idle(self) -> bool:
        """Close at once unless a request is being read or answered, or the client still reads the
        answer; whether it closes.
        """

    def abort(self) -> None:
        """Close at once."""


class FrontDoor:
    """State that all connections of clients share.

    Args:
        options: Limits and timeouts.
        catalog: The processors that requests may name.
        upstreams: The frontends.
        keys: API keys, of which each request must bring one; empty: none is needed.
        engine_key: Key for the workers' engine ports.

    Attributes:
        connections: Connections of clients.
        reasons: Turns of failed requests that are computed once more, to learn why.
    """

    def __init__(
        self,
        options: Options,
        catalog: Catalog,
        upstreams: Upstreams,
        keys: Collection[str] = (),
        engine_key: str = "",
    ) -> None:
        self.options = options
        self.engine_key = engine_key
        self.upstreams = upstreams
        self._catalog = catalog
        self._keys = Keys(keys)
        self._client_header = (options.client_header or "").lower().encode()
        self._hosts = Hosts(options.host, options.allowed_hosts, bool(keys))
        page = playground.documents() if options.playground else {}
        self.routes = Routes(list(page), has_controls=bool(options.engine_url))
        own = {CATALOGUE: catalog.as_json(), OPENAPI: openapi(self.routes, catalog)}
        self.documents = {
            **{path: Document(b"application/json", json.dumps(each).encode()) for path, each in own.items()},
            **page,
        }
        self.texts = Texts(options.model_path)
        self.calls = options.calls
        self.cors = Cors(options.cors_origins)
        self.connections: set[OpenConnection] = set()
        self._waiting: dict[OpenConnection, float] = {}  # for a request, since when; in this order
        self.bodies = Bodies(self.max_body, options.body_rate_kib_s * 1024, options.body_timeout_s, time.monotonic)
        self.rewriting = Rewriting()
        self.batches: BatchService | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self.reasons = asyncio.Semaphore(REASONS_AT_ONCE)

    @property
    def needs_keys(self) -> bool:
        """Whether requests need API keys."""
        return bool(self._keys)

    @property
    def max_body(self) -> int:
        """Bytes of the largest body."""
        return self.options.body_limit_mib * 2**20

    def uploads_for(self, route: Route, head: Head) -> Uploads | None:
        """Room for the body of a request for ``route``, None unless it is an upload.

        Raises:
            Refused: 404, no uploads are taken.
        """
        return self.batch_service().uploads if route.takes_uploads and head.method == b"POST" else None

    def batch_service(self) -> BatchService:
        """The files and batches. Raises `Refused` (404) where there are none."""
        if self.batches is None:
            problem = "files and batches are off; the front door's option --batch-dir names a directory for them"
            raise Refused(404, problem, code="unsupported_endpoint")
        return self.batches

    def error_form(self, path: str) -> ErrorForm:
        """Form of the errors of a path; what is below `MESSAGES` and not served is Anthropic's."""
        route = self.routes.at(path)
        if route is None:
            return "anthropic" if path.startswith(f"{MESSAGES}/") else "openai"
        return route.errors

    def admit(self, head: Head, path: str, peer: bytes) -> tuple[Route, bytes]:
        """The route of a request, and the label of its client.

        Args:
            head: Head of the request.
            path: Target without the query.
            peer: The client's address.

        Raises:
            Refused: 401 without a valid key where one is needed, 403 for a foreign host, 404 and
                405 for what is not served.
        """
        self._hosts.check(head)
        method, route = head.method.decode(), self.routes.at(path)
        if route is not None and self.cors.is_preflight(head):  # a browser sends it without the page's key
            return route, b""
        peer = head.headers.get(self._client_header, peer)
        key = b""
        if self._keys and (route is None or route.needs_key or method not in route.methods):
            key = self._keys.check(head.values(b"authorization"), head.values(b"x-api-key"))
        return self.routes.check(route, method, path), label_of(key, peer)

    def rewrite(self, path: str, body: bytes, head: Head) -> tuple[bytes, ...] | dict[str, Any]:
        """The bodies to send on for a chat or completion, or the fields of one that a handler of
        `TRANSLATORS` answers. Raises `Refused`.
        """
        fields = parsed(body)
        if is_translated(path, fields) or (self.options.engines and has_several_prompts(path, fields)):
            return fields
        if path == CHAT and needs_chunks(fields, self.calls, parses=self.options.frontend_misreads):
            return fields
        return self.rewrite_fields(path, fields, head, body)

    def names_of(self, path: str, fields: dict[str, Any], head: Head) -> Naming:
        """Names of a client's fields for the paths in errors of the worker; see `names_of`."""
        return names_of(path, fields, head.headers, self.calls, carries_guides=self.options.carries_guides)

    def rewrite_fields(
        self, path: str, fields: dict[str, Any], head: Head, body: bytes | None = None
    ) -> tuple[bytes, ...]:
        """The bodies to send on for parsed fields, which are changed; see `rewritten_fields`."""
        return rewritten_fields(
            path,
            fields,
            head.headers,
            self._catalog,
            self.calls,
            body,
            carries_guides=self.options.carries_guides,
            max_bytes=self.max_body,
        )

    def summary(self, client: Asker, path: str, written: Callable[[int, Document], bytes]) -> Summary:
        """The answer to ``/health`` or ``/metrics``, made of those of servers."""
        workers = self.options.worker_metrics if path == "/metrics" else ()
        frontend = Source(self.upstreams.in_turn(), path, "The frontend")
        sources = [frontend, *(Source([each], path, str(each)) for each in workers)]
        make = health if path == "/health" else metrics(sources)
        return Summary(client, self.upstreams, sources, make, written)

    def added(self, connection: OpenConnection) -> None:
        """A connection was opened."""
        self.connections.add(connection)
        self.waits(connection)
        self.idle.clear()

    def waits(self, connection: OpenConnection) -> None:
        """A connection waits for its next request, of which nothing has come."""
        self._waiting[connection] = time.monotonic()

    def waits_no_more(self, connection: OpenConnection) -> None:
        """A connection's next request has begun to come, or none is read any more."""
        self._waiting.pop(connection, None)

    def has_room(self) -> bool:
        """Whether a connection that was opened may stay, in place of the one that has waited for
        longest for a request, if there are too many.
        """
        if len(self.connections) <= self.options.max_connections:
            return True
        latest_s = time.monotonic() - COMING_S
        oldest = takewhile(lambda connection: self._waiting[connection] < latest_s, self._waiting)
        return any(connection.abort_if_idle() for connection in oldest)

    def removed(self, connection: OpenConnection) -> None:
        """A connection was closed."""
        self.connections.discard(connection)
        self.waits_no_more(connection)
        if not self.connections:
            self.idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Let the answers under way finish, for so long, and close the rest."""
        self.draining = True
        self.upstreams.close()  # the frontends may be about to end, too
        for connection in list(self.connections):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle.wait()
        except TimeoutError:
            logger.warning("%d connections closed before their answers ended", len(self.connections))
            if self.upstreams.end(Refused(503, "the server shuts down", kind="server_error")):
                with contextlib.suppress(TimeoutError):  # for as long as it takes to say so
                    async with asyncio.timeout(LAST_S):
                        await self.idle.wait()
        for connection in list(self.connections):
            connection.abort()
        self.upstreams.close()
        self.rewriting.close()
