"""Runs a worker on NATS: connect, load, register, serve, drain."""

from __future__ import annotations

import logging

from nats.aio.client import Client
from nats.errors import Error as NatsError

from worker.build import Built
from worker.errors import StartupError
from worker.migration.nats_store import INBOX
from worker.runtimes.direct.probes import ProbeServer, open_probes
from worker.runtimes.direct.process import DirectWorker
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.nats.batch.consumer import BatchConsumer
from worker.runtimes.nats.connection import ConnectionOptions, connect, disconnect
from worker.runtimes.nats.service import NatsService

logger = logging.getLogger(__name__)


class NatsWorker(DirectWorker):
    """One worker process on NATS, from connecting to leaving.

    Args:
        built: The engine and its options.
    """

    def __init__(self, built: Built) -> None:
        super().__init__(built)
        self._service: NatsService | None = None
        self._batches: BatchConsumer | None = None
        self._client: Client | None = None
        self._probes: ProbeServer | None = None

    async def run(self) -> None:
        """Serve until `shut_down`.

        Raises:
            StartupError: the server does not let us in, or the model cannot be loaded.
        """
        client = self._client = await connect(
            ConnectionOptions.of(self.arguments, INBOX),
            f"worker {self.arguments.served_model_name}",
            closed=self._connection_closed,
        )
        try:
            self._open_probes(client)
            await self.server.load()
            messages = DirectServer(self.server, self.arguments)
            self._service = NatsService(messages, self.arguments)
            await self._service.start(client)
            if self.arguments.batch:
                self._batches = BatchConsumer(messages, self.arguments)
                await self._start_batches(client)
            self.ready.set()
            await self._leave.wait()
        finally:
            await self._close(client)

    async def _close(self, client: Client) -> None:
        """Leave: no more requests, then the drain, then what is still on its way."""
        if self._service is not None:
            await self._service.stop_accepting()
        if self._batches is not None:
            await self._batches.stop()
        await self.server.close()
        if self._service is not None:
            await self._service.settle()
        self._leave.set()
        await disconnect(client)
        if self._probes is not None:
            await self._probes.close()

    async def _start_batches(self, client: Client) -> None:
        assert self._batches is not None
        try:
            await self._batches.start(client)
        except NatsError as error:
            raise StartupError(f"--batch: NATS does not offer JetStream: {error}") from None

    def _open_probes(self, client: Client) -> None:
        """Metrics and health, before the model is loaded: a start is slow, and has metrics too."""

        def ready() -> str | None:
            if self._leave.is_set():
                return "draining"
            if not client.is_connected:
                return self._live() or "the NATS server is away"
            return self._live() or (None if self._batches is None else self._batches.problem)

        self._probes = open_probes(self.arguments, self.server.metrics.registry, self._live, ready)

    async def _connection_closed(self) -> None:
        if not self._leave.is_set():  # the server does not let us in any more
            self.server.fail("the NATS server has closed the connection for good")
