"""`WorkerClient`: a client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from worker.runtimes.nats import protocol
from worker.runtimes.nats.client.answers import Answer, Chunk
from worker.runtimes.nats.client.errors import NoWorkers, RequestError
from worker.runtimes.nats.client.inbox import Inbox
from worker.runtimes.nats.connection import ConnectionOptions, connect, disconnect
from worker.runtimes.nats.protocol import END, ERROR, KIND, LOST_S, REQUEST_ID, WINDOW, Subjects

RETRIED = frozenset({429, 503})
"""Codes of errors that another worker, or the same one a little later, may not have."""

RETRY_WAIT_S = 0.2


class WorkerClient:
    """Asks the workers of one model and version. One event loop only.

    Args:
        connection: Connection to NATS.
        subjects: Subjects of the model.
        window: Messages that a worker may send ahead of what was read.
        lost_s: Seconds of silence after which a worker is given up.
    """

    def __init__(self, connection: Client, subjects: Subjects, window: int, lost_s: float) -> None:
        self.connection = connection
        self.subjects = subjects
        self._window = window
        self._inbox = Inbox(connection, window, lost_s)

    @classmethod
    async def connect(
        cls,
        model: str,
        version: str = "1",
        options: ConnectionOptions | None = None,
        *,
        window: int = 64,
        lost_s: float = LOST_S,
    ) -> WorkerClient:
        """A client that has connected.

        Args:
            model: Served model name.
            version: Version of the model.
            options: Address of NATS and credentials; by default on this machine.
            window: Messages that a worker may send ahead of what was read.
            lost_s: Seconds of silence after which a worker is given up.

        Raises:
            StartupError: NATS is not there, or does not let us in.
        """
        clients: list[WorkerClient] = []

        async def reconnected() -> None:
            for client in clients:
                await client._inbox.resume()

        async def closed() -> None:
            for client in clients:
                client._inbox.fail()

        given = options or ConnectionOptions()
        connection = await connect(given, "worker client", reconnected=reconnected, closed=closed)
        client = cls(connection, Subjects(model, version), window, lost_s)
        clients.append(client)
        try:
            await client._inbox.open()
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave; answers under way are cancelled."""
        self._inbox.close()
        for receiver in tuple(self._inbox.receivers.values()):
            await self.cancel(receiver.request_id)
        await disconnect(self.connection)

    async def info(self) -> dict[str, Any]:
        """Description of one of the workers, by itself.

        Raises:
            NoWorkers: there is none.
        """
        try:
            reply = await self.connection.request(self.subjects.info, timeout=LOST_S)
        except (TimeoutError, NatsError):
            raise NoWorkers(self.subjects.info) from None
        return protocol.decoded(reply.data)

    async def generate(self, *, retries: int = 2, **request: Any) -> Answer:
        """The whole answer to a request; see `stream`.

        Raises:
            RequestError: it was refused, or failed.
        """
        answer = Answer()
        async for chunk in self.stream(retries=retries, **request):
            answer.add(chunk)
        return answer

    async def stream(
        self, *, request_id: str | None = None, retries: int = 2, **request: Any
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of an answer, as they come. Closing the stream cancels the request.

        Args:
            request_id: Id for `cancel`, random if it is not given.
            retries: Times that the request is sent again if it fails, for a reason that another
                worker may not have, before the first chunk.
            request: The fields of docs/nats.md: ``messages``, ``prompt`` or ``token_ids``, and
                the rest.

        Raises:
            RequestError: it was refused, or failed.
        """
        begun = False
        while True:
            try:
                async with contextlib.aclosing(self._stream_once(request_id, request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except RequestError as error:
                if begun or retries < 1 or error.code not in RETRIED:
                    raise
                retries -= 1
                await asyncio.sleep(RETRY_WAIT_S)

    async def cancel(self, request_id: str) -> None:
        """End a request, whichever worker has it: its answer finishes as ``cancelled``."""
        await self.connection.publish(self.subjects.cancel(request_id))

    async def _stream_once(self, request_id: str | None, request: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        attempt = self.connection._nuid.next().decode()
        request_id = request_id or attempt
        if not protocol.TOKEN.fullmatch(request_id):
            raise RequestError(400, "InvalidRequest", f"must match {protocol.TOKEN.pattern}", "request_id")
        with self._inbox.receiver(attempt, request_id, self.subjects.generate) as receiver:
            try:
                await self._send(attempt, request_id, request)
                while not receiver.has_ended:
                    message = await receiver.read()
                    if receiver.is_acknowledgement_due:  # of an error, too: the id is free again
                        await self._inbox.acknowledge(receiver.acknowledge, receiver.num_read)
                    chunk = _chunk(message)
                    if chunk is not None:
                        yield chunk
            finally:
                if not receiver.has_ended:
                    await self._inbox.tell_gone(receiver.acknowledge)

    async def _send(self, attempt: str, request_id: str, request: Mapping[str, Any]) -> None:
        headers = {REQUEST_ID: request_id, WINDOW: str(self._window)}
        reply = self._inbox.subject(attempt)
        try:
            await self.connection.publish(self.subjects.generate, protocol.encoded(request), reply, headers)
        except MaxPayloadError:
            limit = self.connection.max_payload
            raise RequestError(413, "InvalidRequest", f"the request is larger than NATS takes, {limit} bytes") from None


def _chunk(message: Msg) -> Chunk | None:
    kind = (message.headers or {}).get(KIND)
    if kind == ERROR:
        error = protocol.decoded(message.data)["error"]
        raise RequestError(error["code"], error["type"], error["message"], error.get("field"))
    return None if kind == END else protocol.decoded(message.data)
