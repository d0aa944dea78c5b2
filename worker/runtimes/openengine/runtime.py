"""Runs a worker behind OpenEngine: listen, load, serve, drain."""

from __future__ import annotations

import logging
import socket

from worker.build import Built
from worker.runtimes.direct.probes import open_probes
from worker.runtimes.direct.process import DirectWorker
from worker.runtimes.direct.server import DirectServer
from worker.runtimes.openengine.control import Control
from worker.runtimes.openengine.endpoint import Endpoint
from worker.runtimes.openengine.inference import Inference
from worker.runtimes.openengine.kv_events import KvEvents

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
"""Seconds for streams to send their last events once the drain is over."""


class OpenEngineWorker(DirectWorker):
    """One worker process behind OpenEngine, from listening to leaving.

    Args:
        built: The engine and its options.

    Attributes:
        port: Port that it listens on, 0 before.
    """

    def __init__(self, built: Built) -> None:
        super().__init__(built)
        self.port = 0

    async def run(self) -> None:
        """Serve until `shut_down`. While the model is loaded, calls about its state are answered.

        Raises:
            StartupError: the port is taken, a file of TLS or of tokens cannot be read, or the model
                cannot be loaded.
        """
        arguments, server = self.arguments, self.server
        inference = Inference(server)
        control = Control(server, inference)
        endpoint = Endpoint({"Inference": inference, "Control": control}, arguments)
        self.port = endpoint.port
        await endpoint.start()
        probes = None
        try:
            probes = open_probes(arguments, server.metrics.registry, self._live, self._ready)
            info = await server.load()
            inference.direct = DirectServer(server, arguments)
            if arguments.publishes_kv_events and info.reports_blocks:
                address = (_reachable(arguments.grpc_host), endpoint.port)
                events = KvEvents(info.kv_block_size)
                server.engine.report_blocks(events)
                control.publish(events, address)
            await endpoint.tell(is_serving=True)
            logger.info("serving %s at %s:%d", arguments.served_model_name, arguments.grpc_host, endpoint.port)
            self.ready.set()
            await self._leave.wait()
        finally:
            await endpoint.tell(is_serving=False)
            await server.close()
            await endpoint.stop(FLUSH_S)
            if probes is not None:
                await probes.close()

    def _ready(self) -> str | None:
        return "draining" if self._leave.is_set() else self._live()


def _reachable(host: str) -> str:
    """A name of this machine for clients: never an address that stands for all of them."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
