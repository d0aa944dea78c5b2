"""Side channel: failures and steps reported by processors in another process to the worker.

TensorRT-LLM's executor is another process and holds a pickled copy of every callable, so neither a
failure nor a receipt can be returned. They are sent as JSON messages over a local Unix socket
(sequenced packets: in order, whole). Sending never raises. It waits at most `SEND_TIMEOUT_S` for a
slow worker; then the message is dropped and counted, and decoding continues: the worker notices the
missing step and fails that request alone.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from adapters.trtllm.adapter import Failure, Step

logger = logging.getLogger(__name__)

MAX_MESSAGE = 65536
"""Largest message, bytes."""

SEND_TIMEOUT_S = 5.0
"""Longest wait for buffer space, of all messages together until the worker reads again. Every
request of the batch waits with it, and none of their tokens would reach a client meanwhile: on a
busy machine a worker may not read for a second.
"""

ACCEPT_PAUSE_S = 0.1
"""Seconds until the next attempt to accept a connection, once no descriptor was left for one."""


class Sender:
    """This process's connections to side channels by path, opened at the first message."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._deaf: set[str] = set()  # paths that were waited for in vain, and have taken nothing since
        self._lock = threading.Lock()

    def send(self, path: str, data: bytes) -> bool:
        """Send a message; returns whether it was accepted."""
        with self._lock:
            try:
                return self._send(path, data)
            except OSError:  # no listener (any more)
                gone = self._sockets.pop(path, None)
                self._deaf.discard(path)
                if gone is not None:
                    gone.close()
                return False

    def _send(self, path: str, data: bytes) -> bool:
        connection = self._sockets.get(path)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)
            try:
                connection.connect(path)
            except OSError:
                connection.close()
                raise
            self._sockets[path] = connection
        try:
            connection.send(data)
        except BlockingIOError:
            timeout_s = 0.0 if path in self._deaf else SEND_TIMEOUT_S
            if not select.select([], [connection], [], timeout_s)[1]:
                self._deaf.add(path)
                return False
            connection.send(data)
        self._deaf.discard(path)
        return True

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            while self._sockets:
                self._sockets.popitem()[1].close()


_SENDER = Sender()
atexit.register(_SENDER.close)


class Reporter:
    """Sends one request's failures and steps to the worker; pickles as a socket path and an id.

    Args:
        path: Socket of a `SideChannel`.
        request_id: The worker's id of the request; the engine's own id differs.

    Attributes:
        num_dropped: Messages that could not be sent.
    """

    def __init__(self, path: str, request_id: str) -> None:
        self.path = path
        self.request_id = request_id
        self.num_dropped = 0

    def __call__(self, failure: Failure) -> None:
        self._send({**asdict(failure), "request_id": self.request_id})

    def step(self, step: Step) -> None:
        """Report the edits of one position."""
        self._send({**asdict(step), "request_id": self.request_id})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE or not _SENDER.send(self.path, data):
            self.num_dropped += 1


class SideChannel:
    """The worker's end: calls back in the event loop per message, in order for each sender.

    The socket lives in a directory of its own that only this user can enter. Messages that are
    neither a failure nor a step are counted and ignored.

    Args:
        on_failure: Takes a `Failure` under the worker's id of the request.
        on_step: Takes the worker's id of the request and a `Step`.

    Attributes:
        num_refused: Messages that were not well-formed.
    """

    def __init__(self, on_failure: Callable[[Failure], None], on_step: Callable[[str, Step], None]) -> None:
        self.num_refused = 0
        self._on_failure = on_failure
        self._on_step = on_step
        self._directory: str | None = None
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rests = False  # until the next attempt to accept a connection

    def open(self) -> None:
        """Bind the socket and listen in the running event loop."""
        self._directory = _short_directory()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._loop = asyncio.get_running_loop()
        self._listen()

    def _listen(self) -> None:
        """Accept connections as they come, unless it has been closed."""
        self._rests = False
        if self._listener is not None and self._loop is not None:
            self._loop.add_reader(self._listener, self.poll)

    @property
    def path(self) -> str:
        """Path of the socket."""
        assert self._directory is not None
        return os.path.join(self._directory, "reports")

    def reporter(self, request_id: str) -> Reporter:
        """A picklable target for the reports of one request."""
        return Reporter(self.path, request_id)

    def poll(self) -> None:
        """Handle all messages sent so far, without waiting."""
        self._accept()
        for connection in tuple(self._connections):
            self._receive(connection)

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        for each in (self._listener, *self._connections):
            if each is not None and self._loop is not None:
                self._loop.remove_reader(each)
                each.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._listener = self._directory = None
        self._connections = []

    def _accept(self) -> None:
        while self._listener is not None and self._loop is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left: it waits, and the listener counts as readable
                if not self._rests:
                    self._rests = True
                    logger.warning("the side channel cannot accept a connection: %s", error.strerror or error)
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(ACCEPT_PAUSE_S, self._listen)
                return
            connection.setblocking(False)
            self._connections.append(connection)
            self._loop.add_reader(connection, self._receive, connection)

    def _receive(self, connection: socket.socket) -> None:
        while True:
            try:
                data = connection.recv(MAX_MESSAGE + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
            self._take(data)

    def _drop(self, connection: socket.socket) -> None:
        assert self._loop is not None
        if connection in self._connections:
            self._connections.remove(connection)
            self._loop.remove_reader(connection)
            connection.close()

    def _take(self, data: bytes) -> None:
        message = _parse(data)
        if isinstance(message, Failure):
            self._on_failure(message)
        elif message is not None:
            self._on_step(*message)
        else:
            self.num_refused += 1
            logger.warning("the side channel refused a message of %d bytes", len(data))


def _short_directory() -> str:
    """A new private directory with a path short enough for a Unix socket (107 bytes)."""
    for root in (tempfile.gettempdir(), "/dev/shm", "/tmp"):
        if len(os.fsencode(root)) < 80 and os.access(root, os.W_OK):
            return tempfile.mkdtemp(prefix="dlw-", dir=root)
    raise OSError("no writable directory with a path short enough for a Unix socket")


_FAILURE = {field.name for field in fields(Failure)}
_STEP = {"request_id"} | {field.name for field in fields(Step)}


def _parse(data: bytes) -> Failure | tuple[str, Step] | None:
    try:
        message = json.loads(data)
    except ValueError:
        return None
    if not isinstance(message, dict) or type(message.get("position")) is not int:
        return None
    if set(message) == _FAILURE and all(isinstance(message[name], str) for name in _FAILURE - {"position"}):
        return Failure(**message)
    return _parse_step(message) if set(message) == _STEP and isinstance(message["request_id"], str) else None


def _parse_step(message: dict[str, Any]) -> tuple[str, Step] | None:
    try:
        edits = tuple((int(index), str(kind), int(masked)) for index, kind, masked in message["edits"])
        seconds = tuple(float(each) for each in message["seconds"])
        logprobs = message["logprobs"]
        if logprobs is not None:
            logprobs = tuple((int(token), float(value), int(rank)) for token, value, rank in logprobs)
    except (TypeError, ValueError):
        return None
    return message["request_id"], Step(message["position"], edits, seconds, logprobs)
