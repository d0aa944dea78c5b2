"""``--engine-port``: HTTP for operators and trainers that change the weights or the LoRA adapters
of a worker that serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from adapters.strict_json import read_object
from worker.arguments import Arguments, KnownKeys, keys_in
from worker.engines import ServingEngine
from worker.errors import InvalidRequest, StartupError, one_line
from worker.server.adapters import ServedAdapters
from worker.server.connection_threads import ConnectionThreads, listening
from worker.server.engine_routes import Asked, EngineRoutes, Route, new_memory
from worker.server.interruptible import InPreparation
from worker.server.sglang_routes import REFUSED, SglangRoutes

logger = logging.getLogger(__name__)

PREFIX = "/engine/"

VLLM_PREFIX, OF_VLLM = "/v1/", ("load_lora_adapter", "unload_lora_adapter")
"""Prefix with which vLLM has these routes."""

SILENCE_S = 60.0
"""Seconds without a byte after which a sender is given up."""

LINGER_S = 2.0
"""Seconds for which the rest of a body that was refused is read."""

_MAX_CHUNK_HEAD = 1024
_MOST_DIGITS = 20
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_ONCE = ("Content-Length", "Transfer-Encoding")
"""Headers of which a proxy and this port may take different ones, where there are two."""


class Refused(Exception):
    """A request that no route is asked.

    Args:
        status: HTTP status.
        message: Reason.
        is_read: Whether its body has been read, so that the connection can go on.
    """

    def __init__(self, status: int, message: str, *, is_read: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_read = is_read


class EnginePort:
    """Serves `EngineRoutes` over HTTP, in threads of its own; the routes run in the event loop.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        keys: Keys of which every request carries one.
        routes: The routes.

    Attributes:
        port: Port that it listens on.
        of_sglang: SGLang's names of them.
        threads: The server, with a thread for each connection.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int, keys: Sequence[str], routes: EngineRoutes) -> None:
        self.routes = routes
        self.of_sglang = SglangRoutes(routes)
        self._loop = asyncio.get_running_loop()
        self._keys = KnownKeys(key.encode() for key in keys)
        self.threads = listening(ConnectionThreads, host, port, type("_Handler", (_Handler,), {"port": self}))
        self.port: int = self.threads.server_address[1]
        threading.Thread(target=self.threads.serve_forever, name="engine-port", daemon=True).start()

    async def close(self) -> None:
        """Answer no more."""
        await asyncio.to_thread(self.threads.shutdown)
        self.threads.server_close()

    def is_key(self, authorization: str) -> bool:
        """Whether a header carries a key; in the same time for every wrong one."""
        scheme, _, given = authorization.partition(" ")
        is_known = given.strip(" \t").encode("latin-1", "replace") in self._keys  # as http.server decodes headers
        return is_known and scheme.lower() == "bearer"

    def ask(self, name: str, asked: Asked, route: Route) -> tuple[int, Mapping[str, Any]]:
        """Answer of a route, from any thread."""
        return asyncio.run_coroutine_threadsafe(self.routes.answer(name, asked, route), self._loop).result()

    def route_at(self, path: str) -> tuple[str, Route]:
        """The name of a path's route, and the route. Raises `Refused`."""
        prefix, slash, name = path.rpartition("/")
        routes, of_sglang = self.routes.by_name, self.of_sglang.by_path
        if path in of_sglang:
            return name, of_sglang[path]
        if prefix + slash not in (PREFIX, VLLM_PREFIX) or name not in (routes if prefix + slash == PREFIX else OF_VLLM):
            reason = f"{path} is not here: {REFUSED[path]}" if path in REFUSED else "there is no such route"
            own = ", ".join(PREFIX + each for each in sorted(routes))
            raise Refused(404, f"{reason}; there are {own}, {', '.join(sorted(of_sglang))}")
        return name, routes[name]


class _Lines:
    """Lines of a head, and whether the empty one behind them has come."""

    def __init__(self, file: BufferedIOBase) -> None:
        self.has_ended = False
        self._file = file

    def readline(self, size: int = -1) -> bytes:
        """The next line."""
        line = self._file.readline(size)
        self.has_ended = line in (b"\r\n", b"\n")
        return line


class _Handler(BaseHTTPRequestHandler):
    port: EnginePort
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S

    def parse_request(self) -> bool:
        """Whether a whole head has come: of a sender that dies in the middle nothing is done."""
        rfile = self.rfile
        self.rfile = lines = _Lines(rfile)  # type: ignore[assignment]
        try:
            is_read = super().parse_request()
        finally:
            self.rfile = rfile
        self.close_connection = self.close_connection or not lines.has_ended
        return is_read and lines.has_ended

    def do_GET(self) -> None:
        """Answer a request that changes nothing."""
        self._serve()

    def do_POST(self) -> None:
        """Answer any request."""
        self._serve()

    do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = do_PUT = do_POST  # noqa: N815  # http.server's names
    """Methods that no route has."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the engine logs what changes."""

    def _serve(self) -> None:
        try:
            status, answer = self.port.ask(*self._asked())
        except Refused as refused:
            self.close_connection = self.close_connection or not refused.is_read
            status, answer = refused.status, {"status": "error", "message": str(refused)}
        except (EOFError, TimeoutError, ConnectionError):  # the sender is gone
            self.close_connection = True
            return
        self._send(status, answer)
        self.port.threads.waits(self.connection)
        if self.close_connection:
            self._drop_body()

    def _drop_body(self) -> None:
        """Read what is still sent, for a while: a client that cannot send sees no answer."""
        until_s = time.monotonic() + LINGER_S
        self.connection.settimeout(LINGER_S)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < until_s and self.rfile.read1(2**20):
                pass

    def _asked(self) -> tuple[str, Asked, Route]:
        """The name of the route, what it is asked, and the route. Raises `Refused`."""
        if not self.port.is_key(self.headers.get("Authorization", "")):
            raise Refused(401, "Authorization: must be Bearer and a key of --engine-key-file")
        self.port.threads.is_busy(self.connection)
        for name in _ONCE:
            if len(self.headers.get_all(name, ())) > 1:
                raise Refused(400, f"{name}: must be given once")
        try:
            url, routes = urlsplit(self.path), self.port.routes
        except ValueError as error:
            raise Refused(400, f"the request's target is none: {error}") from None
        name, route = self.port.route_at(url.path)
        is_read = url.path in self.port.of_sglang.reads or (url.path == PREFIX + name and name in routes.READS)
        if self.command != "POST" and not (self.command == "GET" and is_read):
            raise Refused(405, f"{url.path} must be asked by POST{' or GET' if is_read else ''}")
        query = parse_qsl(url.query, keep_blank_values=True)
        if len(dict(query)) < len(query):
            raise Refused(400, "query: a field is there twice")
        kind = self.headers.get_content_type()
        is_json = kind != "application/octet-stream"
        body = self._body(name, routes.max_bytes(name, is_json=is_json))
        if name == "update_weights" and not is_json:
            return name, Asked(dict(query), body), route
        fields = self._json(body)
        if both := sorted(fields.keys() & dict(query).keys()):
            raise Refused(400, f"{both[0]}: is in the query and in the body", is_read=True)
        return name, Asked(dict(query) | fields), route

    def _json(self, body: memoryview) -> dict[str, Any]:
        if not len(body):
            return {}
        try:
            return read_object(bytes(body))
        except ValueError as error:
            raise Refused(400, f"body: must be a JSON object: {one_line(error)}", is_read=True) from None

    def _body(self, name: str, most: int) -> memoryview:
        """The whole body.

        Raises:
            Refused: it is too large, or has no end.
            EOFError, TimeoutError: the sender has left in the middle.
        """
        is_chunked = self.headers.get("Transfer-Encoding", "").strip().lower() == "chunked"
        length = self.headers.get("Content-Length")
        if (is_chunked and length is not None) or (not is_chunked and "Transfer-Encoding" in self.headers):
            raise Refused(400, "Transfer-Encoding: must be chunked, and without a Content-Length")
        if length is not None and not (length.isascii() and length.isdecimal() and len(length) <= _MOST_DIGITS):
            raise Refused(400, "Content-Length: must be a number of bytes")
        try:
            return self._chunks(most) if is_chunked else self._read(int(length or 0), most)
        except InvalidRequest as error:
            raise Refused(413, str(error)) from None
        except (EOFError, TimeoutError, ConnectionError):
            if name == "update_weights":
                self.port.routes.counts["interrupted"] += 1
                logger.warning("weights: the sender of an update has left in the middle; nothing has changed")
            raise

    def _read(self, size: int, most: int) -> memoryview:
        if size > most:
            raise Refused(413, f"body: must have {most} bytes at most, got {size}")
        content = new_memory(size) if size else memoryview(bytearray())
        self._fill(content)
        return content

    def _chunks(self, most: int) -> memoryview:
        content, size = new_memory(most), 0
        while True:
            head = self.rfile.readline(_MAX_CHUNK_HEAD)
            if not head:
                raise EOFError
            written = head.partition(b";")[0].strip()
            if not head.endswith(b"\n") or not _CHUNK_SIZE.fullmatch(written):  # int() takes more, such as 0x10
                raise Refused(400, "body: a chunk without its size")
            count = int(written, 16)
            if size + count > most:
                raise Refused(413, f"body: must have {most} bytes at most")
            if not count:
                break
            self._fill(content[size : size + count])
            size += count
            if self.rfile.readline(3).strip():
                raise Refused(400, "body: a chunk beyond its size")
        while (line := self.rfile.readline(_MAX_CHUNK_HEAD)).strip():
            pass
        if not line.endswith(b"\n"):
            raise EOFError
        return content[:size]

    def _fill(self, content: memoryview) -> None:
        read = 0
        while read < len(content):
            more = self.rfile.readinto(content[read:])
            if not more:
                raise EOFError
            read += more

    def _send(self, status: int, answer: Mapping[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def open_engine_port(
    arguments: Arguments, engine: ServingEngine, adapters: ServedAdapters, preparing: InPreparation
) -> EnginePort | None:
    """The port of ``--engine-port``, None without one.

    Raises:
        StartupError: the port is taken, the address is not this machine's, or there are no keys.
    """
    if not arguments.engine_port:
        return None
    keys = keys_in(arguments.engine_key_file, "--engine-key-file")
    try:
        routes = EngineRoutes(engine, arguments, adapters, preparing)
        return EnginePort(arguments.engine_host, arguments.engine_port, keys, routes)
    except OSError as error:
        raise StartupError(f"--engine-port {arguments.engine_port}: {error.strerror or error}") from None
