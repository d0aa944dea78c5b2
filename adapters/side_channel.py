"""The side channel: what processors in another process tell the worker.

TensorRT-LLM's executor is another process and holds a pickled copy of every callable, so a failure cannot be
returned. It is sent as one JSON datagram over a local Unix socket. Sending never blocks and never raises: a
datagram that cannot be sent is dropped and counted, and decoding goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields

from adapters.trtllm import Failure

logger = logging.getLogger(__name__)

MAX_DATAGRAM = 8192
"""Largest message, bytes."""


class FailureReporter:
    """Sends the failures of one request to the worker; pickles as a socket path and an id.

    Args:
        path: Unix datagram socket of a `FailureChannel`.
        request_id: The worker's id of the request; the engine's own id differs.

    Attributes:
        num_dropped: Messages that could not be sent.
    """

    def __init__(self, path: str, request_id: str) -> None:
        self.path = path
        self.request_id = request_id
        self.num_dropped = 0

    def __call__(self, failure: Failure) -> None:
        message = {**asdict(failure), "request_id": self.request_id}
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(json.dumps(message).encode()[:MAX_DATAGRAM], self.path)
        except OSError:
            self.num_dropped += 1


class FailureChannel:
    """The worker's end: calls ``on_failure(failure)`` in the event loop for every message.

    The socket lives in a directory of its own that only this user can enter. Messages that are not a failure
    are counted and ignored.

    Attributes:
        num_refused: Datagrams that were not a well-formed failure.
    """

    def __init__(self, on_failure: Callable[[Failure], None]) -> None:
        self.num_refused = 0
        self._on_failure = on_failure
        self._directory: str | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Bind the socket and listen in the running event loop."""
        self._directory = tempfile.mkdtemp(prefix="dlw-")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)

    @property
    def path(self) -> str:
        """Path of the socket."""
        assert self._directory is not None
        return os.path.join(self._directory, "failures")

    def reporter(self, request_id: str) -> FailureReporter:
        """A picklable report target for one request."""
        return FailureReporter(self.path, request_id)

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._socket = self._directory = None

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                data = self._socket.recv(MAX_DATAGRAM + 1)
            except BlockingIOError:
                return
            failure = _parse(data)
            if failure is None:
                self.num_refused += 1
                logger.warning("the side channel refused a message of %d bytes", len(data))
            else:
                self._on_failure(failure)


def _parse(data: bytes) -> Failure | None:
    try:
        message = json.loads(data)
    except ValueError:
        return None
    names = {f.name for f in fields(Failure)}
    if not isinstance(message, dict) or set(message) != names or not isinstance(message["position"], int):
        return None
    texts = names - {"position"}
    return Failure(**message) if all(isinstance(message[name], str) for name in texts) else None
