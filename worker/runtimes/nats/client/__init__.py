"""Clients of the NATS runtime: `WorkerClient` for asyncio, `BlockingWorkerClient` for the rest.

They need nats-py alone: neither torch nor Dynamo.
"""

from worker.runtimes.nats.client.answers import Answer, ChoiceAnswer, Chunk
from worker.runtimes.nats.client.blocking import BlockingWorkerClient
from worker.runtimes.nats.client.errors import ConnectionClosed, NoWorkers, RequestError, WorkerLost
from worker.runtimes.nats.client.worker_client import WorkerClient

__all__ = [
    "Answer",
    "BlockingWorkerClient",
    "ChoiceAnswer",
    "Chunk",
    "ConnectionClosed",
    "NoWorkers",
    "RequestError",
    "WorkerClient",
    "WorkerLost",
]
