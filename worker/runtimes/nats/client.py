"""Clients of the NATS runtime: `WorkerClient` for asyncio, `BlockingWorkerClient` for the rest.

They need nats-py alone: neither torch nor Dynamo.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from worker.runtimes.nats import protocol
from worker.runtimes.nats.connection import ConnectionOptions, connect, disconnect
from worker.runtimes.nats.protocol import (
    END,
    ERROR,
    GONE,
    HEARTBEAT,
    KIND,
    LOST_S,
    REQUEST_ID,
    RESUME,
    SEQUENCE,
    WINDOW,
    Subjects,
)

T = TypeVar("T")
Chunk = dict[str, Any]

RETRIED = frozenset({429, 503})
"""Codes of errors that another worker, or the same one a little later, may not have."""

RETRY_WAIT_S = 0.2


class RequestError(Exception):
    """A worker has refused a request, or failed to answer it.

    Args:
        code: As HTTP has them.
        kind: Class of the worker's error.
        message: What was wrong.
        field: Field of the request that was refused, if one was.
    """

    def __init__(self, code: int, kind: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind
        self.field = field


class NoWorkers(RequestError):
    """Nobody serves this model and version."""

    def __init__(self, subject: str) -> None:
        super().__init__(503, "NoWorkers", f"no worker listens at {subject}")


class WorkerLost(RequestError):
    """Nothing was heard of the worker for seconds: it died, or the network did."""

    def __init__(self, silent_s: float) -> None:
        super().__init__(503, "WorkerLost", f"nothing was heard of the worker for {silent_s:.1f} s")


@dataclass(slots=True)
class ChoiceAnswer:
    """One complete answer.

    Attributes:
        text: Empty if none was asked for.
        token_ids: What was generated.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        log_probs: Of each token, if they were asked for.
        engine_data: The receipt, if one was asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    log_probs: list[float] = field(default_factory=list)
    engine_data: dict[str, Any] | None = None


@dataclass(slots=True)
class Answer:
    """Everything that a request brought.

    Attributes:
        choices: By index.
        usage: Tokens of the prompt, and of all choices.
    """

    choices: list[ChoiceAnswer] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=lambda: {"prompt_tokens": 0, "completion_tokens": 0})

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        while len(self.choices) <= chunk["index"]:
            self.choices.append(ChoiceAnswer())
        choice = self.choices[chunk["index"]]
        choice.text += chunk.get("text", "")
        choice.token_ids += chunk["token_ids"]
        choice.log_probs += chunk.get("log_probs", ())
        choice.engine_data = chunk.get("engine_data", choice.engine_data)
        choice.finish_reason = chunk.get("finish_reason", choice.finish_reason)
        if "completion_usage" in chunk:
            self.usage["prompt_tokens"] = chunk["completion_usage"]["prompt_tokens"]
            self.usage["completion_tokens"] += chunk["completion_usage"]["completion_tokens"]


class _Receiver:
    """The client's end of one answer: what came, in order, and what is to be acknowledged."""

    def __init__(self, request_id: str, window: int) -> None:
        self.request_id = request_id
        self.acknowledge: str | None = None
        self.heard_s = time.monotonic()
        self.expected = 0
        self.has_ended = False
        self._window = window
        self._queue: asyncio.Queue[Msg | RequestError] = asyncio.Queue()
        self._num_read = 0

    def take(self, message: Msg) -> bool:
        """Take a message; whether one before it is missing, so that the worker must resend."""
        headers = message.headers or {}
        self.heard_s = time.monotonic()
        if message.reply:
            self.acknowledge = message.reply
        if headers.get("Status") == "503":
            self.fail(NoWorkers(""))
            return False
        number = int(headers.get(SEQUENCE, "-1"))
        if headers.get(KIND) == HEARTBEAT:
            return number > self.expected
        if number == self.expected:
            self.expected += 1
            self._queue.put_nowait(message)
        return number > self.expected

    def fail(self, error: RequestError) -> None:
        """The answer ends with an error."""
        self._queue.put_nowait(error)

    async def read(self) -> Msg:
        """The next message. Raises `RequestError`."""
        found = await self._queue.get()
        if isinstance(found, RequestError):
            raise found
        self._num_read += 1
        return found

    @property
    def is_acknowledgement_due(self) -> bool:
        """Whether the worker should hear how far this client has read."""
        return self.has_ended or self._num_read % max(1, self._window // 4) == 0

    @property
    def num_read(self) -> int:
        """Messages that were read."""
        return self._num_read


class WorkerClient:
    """Asks the workers of one model and version. One event loop only.

    Args:
        connection: To NATS.
        subjects: Of the model.
        window: Messages that a worker may send ahead of what was read.
        lost_s: Seconds of silence after which a worker is given up.
    """

    def __init__(self, connection: Client, subjects: Subjects, window: int, lost_s: float) -> None:
        self.connection = connection
        self.subjects = subjects
        self._window = window
        self._lost_s = lost_s
        self._inbox = connection.new_inbox()
        self._receivers: dict[str, _Receiver] = {}
        self._watch: asyncio.Task[None] | None = None

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
            version: Of the model.
            options: Where NATS is; by default on this machine.
            window: Messages that a worker may send ahead of what was read.
            lost_s: Seconds of silence after which a worker is given up.

        Raises:
            StartupError: NATS is not there, or does not let us in.
        """
        clients: list[WorkerClient] = []

        async def reconnected() -> None:
            for client in clients:
                await client._resume()

        connection = await connect(options or ConnectionOptions(), "worker client", reconnected=reconnected)
        client = cls(connection, Subjects(model, version), window, lost_s)
        clients.append(client)
        await connection.subscribe(f"{client._inbox}.*", cb=client._take)
        client._watch = asyncio.create_task(client._look_after())
        return client

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave; answers under way are cancelled."""
        if self._watch is not None:
            self._watch.cancel()
        for receiver in self._receivers.values():
            await self.cancel(receiver.request_id)
        await disconnect(self.connection)

    async def info(self) -> dict[str, Any]:
        """What one of the workers says of itself.

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
            request_id: For `cancel`; made up if it is not given.
            retries: How often the request is sent again if it fails, for a reason that another
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
        receiver = self._receivers[attempt] = _Receiver(request_id, self._window)
        try:
            await self._send(attempt, request_id, request)
            while not receiver.has_ended:
                chunk = self._chunk(await receiver.read(), receiver)
                if receiver.is_acknowledgement_due:
                    await self._acknowledge(receiver.acknowledge, receiver.num_read)
                if chunk is not None:
                    yield chunk
        finally:
            del self._receivers[attempt]
            if not receiver.has_ended and not self.connection.is_closed:
                await self._tell_gone(receiver.acknowledge)

    async def _send(self, attempt: str, request_id: str, request: Mapping[str, Any]) -> None:
        headers = {REQUEST_ID: request_id, WINDOW: str(self._window)}
        reply = f"{self._inbox}.{attempt}"
        try:
            await self.connection.publish(self.subjects.generate, protocol.encoded(request), reply, headers)
        except MaxPayloadError:
            limit = self.connection.max_payload
            raise RequestError(413, "InvalidRequest", f"the request is larger than NATS takes, {limit} bytes") from None

    def _chunk(self, message: Msg, receiver: _Receiver) -> Chunk | None:
        kind = (message.headers or {}).get(KIND)
        if kind == ERROR:
            receiver.has_ended = True
            error = protocol.decoded(message.data)["error"]
            raise RequestError(error["code"], error["type"], error["message"], error.get("field"))
        if kind == END:
            receiver.has_ended = True
            return None
        return protocol.decoded(message.data)

    async def _acknowledge(self, subject: str | None, number: int, kind: str = "") -> None:
        if subject is not None:
            headers = {SEQUENCE: str(number)}
            await self.connection.publish(subject, headers={**headers, KIND: kind} if kind else headers)

    async def _tell_gone(self, subject: str | None) -> None:
        """Nobody waits for the answer that is acknowledged at ``subject`` any more."""
        await self._acknowledge(subject, 0, GONE)

    async def _take(self, message: Msg) -> None:
        receiver = self._receivers.get(message.subject.rpartition(".")[2])
        if receiver is None:
            await self._tell_gone(message.reply or None)
        elif receiver.take(message):
            await self._acknowledge(receiver.acknowledge, receiver.expected, RESUME)

    async def _resume(self) -> None:
        """The connection is back: ask for what was sent meanwhile."""
        for receiver in self._receivers.values():
            receiver.heard_s = time.monotonic()
            await self._acknowledge(receiver.acknowledge, receiver.expected, RESUME)

    async def _look_after(self) -> None:
        """Give workers up that are not heard of any more."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(self._lost_s / 10)
            before_s, looked_s = looked_s, time.monotonic()
            was_away = not self.connection.is_connected or looked_s - before_s > self._lost_s / 2
            for receiver in self._receivers.values():
                if was_away:  # nothing could be heard: the connection was lost, or this event loop stood still
                    receiver.heard_s = looked_s
                elif looked_s - receiver.heard_s > self._lost_s * 0.9:
                    receiver.fail(WorkerLost(looked_s - receiver.heard_s))


class BlockingWorkerClient:
    """`WorkerClient` for code without an event loop; it has one in a thread of its own.

    Args:
        model: Served model name.
        version: Of the model.
        options: Where NATS is; by default on this machine.
        window: Messages that a worker may send ahead of what was read.
        lost_s: Seconds of silence after which a worker is given up.

    Raises:
        StartupError: NATS is not there, or does not let us in.
    """

    def __init__(
        self,
        model: str,
        version: str = "1",
        options: ConnectionOptions | None = None,
        *,
        window: int = 64,
        lost_s: float = LOST_S,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(WorkerClient.connect(model, version, options, window=window, lost_s=lost_s))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> BlockingWorkerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave; answers under way are cancelled."""
        self._run(self._client.close())
        self._stop()

    def info(self) -> dict[str, Any]:
        """As `WorkerClient.info`."""
        return self._run(self._client.info())

    def generate(self, *, retries: int = 2, **request: Any) -> Answer:
        """As `WorkerClient.generate`."""
        return self._run(self._client.generate(retries=retries, **request))

    def stream(self, **request: Any) -> Iterator[Chunk]:
        """As `WorkerClient.stream`."""
        chunks = self._client.stream(**request)
        try:
            while (chunk := self._run(_next(chunks))) is not None:
                yield chunk
        finally:
            self._run(chunks.aclose())

    def cancel(self, request_id: str) -> None:
        """As `WorkerClient.cancel`."""
        self._run(self._client.cancel(request_id))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)
