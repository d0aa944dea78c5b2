"""Workers of the NATS runtime in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from running_workers import taking_requests

from worker.arguments import parse_arguments
from worker.build import Built, make_engine
from worker.runtimes.nats.client import WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions
from worker.runtimes.nats.runtime import NatsWorker

EXACT = ("--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--kv-blocks", "512")


def make_worker(model: Path, url: str, name: str, *argv: str) -> NatsWorker:
    """A worker that serves ``model`` as ``name``, not started."""
    given = ["--runtime", "nats", "--nats-url", url, "--model-path", str(model), "--served-model-name", name]
    arguments = parse_arguments([*given, *EXACT, *argv], {"WORKER_MAX_NUM_SEQS": "16", "WORKER_DRAIN_TIMEOUT_S": "60"})
    return NatsWorker(Built(make_engine(arguments), arguments, None, smoke=False))


@asynccontextmanager
async def running(model: Path, url: str, name: str, *argv: str) -> AsyncIterator[NatsWorker]:
    """A worker that takes requests."""
    async with taking_requests(make_worker(model, url, name, *argv)) as worker:
        yield worker


async def connected(url: str, name: str, **options: Any) -> WorkerClient:
    """A client of the workers that serve ``name``."""
    return await WorkerClient.connect(name, "1", ConnectionOptions(url=url), **options)
