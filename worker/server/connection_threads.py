"""Connections of a small HTTP server, each with a thread: so many at a time, however many clients
come and say nothing.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, TypeVar

MOST_WAITING = 64
"""Connections that may wait for their requests. Each takes a thread and a descriptor of a process
that also serves a model.
"""

ACCEPT_PAUSE_S = 0.1
"""Seconds until the next attempt to accept a connection for which the system had no room: it stays
in the queue, which counts as readable.
"""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


S = TypeVar("S", bound="ConnectionThreads")


class ConnectionThreads(ThreadingMixIn, HTTPServer):
    """Answers each connection in a thread. Where too many wait, the one that has waited for longest
    is closed: a client that sends its request at once is always answered.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that the system accepts before this does

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._waiting: dict[socket.socket, None] = {}  # the one that has waited for longest first
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Raises `OSError` if there is none, or no room for it."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _NO_ROOM:
                time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer a connection."""
        self.waits(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        self.is_busy(request)
        super().shutdown_request(request)

    def waits(self, connection: socket.socket) -> None:
        """A connection waits for a request."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None
            if len(self._waiting) > MOST_WAITING:
                longest = next(iter(self._waiting))
                del self._waiting[longest]
                with contextlib.suppress(OSError):  # its thread, which reads the end, closes it
                    longest.shutdown(socket.SHUT_RDWR)

    def is_busy(self, connection: socket.socket) -> None:
        """A connection has a request that is to be answered, whoever comes meanwhile."""
        with self._lock:
            self._waiting.pop(connection, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone, or sends nothing."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def listening(server: type[S], host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> S:
    """A server that listens, on an address of either family. Raises `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made: S = type("_Server", (server,), {"address_family": family})((str(address[0]), port), handler)
    return made
