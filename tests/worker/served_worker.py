"""A worker's engine in this process, without a runtime, and a client that asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adapters.client import selection
from worker.arguments import parse_arguments
from worker.build import make_engine
from worker.runtimes.dynamo_engine import WorkerEngine


class Client:
    """The runtime's part: contexts with ids of their own, and whole answers."""

    def __init__(self, worker: WorkerEngine) -> None:
        self.worker = worker
        self.metadata: dict[str, str] = {}
        self.headers: dict[str, str] | None = None
        self.num_requests = 0

    def id(self) -> str:
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def trace_headers(self) -> dict[str, str] | None:
        return self.headers

    async def ask(
        self, prompt: list[int], *processors: Any, receipt: Any = True, order: Sequence[str] = (), **request: Any
    ) -> Answer:
        annotation = "logits_processors:" + selection(*processors, receipt=receipt, order=order)
        raw = {"token_ids": prompt, "annotations": [annotation], **request}
        return Answer([chunk async for chunk in self.worker.generate(raw, self)])


class Answer:
    def __init__(self, chunks: list[Any]) -> None:
        self.receipts = [chunk["engine_data"]["logits_processors"] for chunk in chunks]
        self.receipt = self.receipts[-1]
        self.token_ids = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
        self.finish_reason = chunks[-1]["finish_reason"]


@asynccontextmanager
async def serving(model: Path, *argv: str, dtype: str = "float32") -> AsyncIterator[Client]:
    given = ["--model-path", str(model), "--device", "cpu", "--dtype", dtype, "--numerics", "exact", *argv]
    arguments = parse_arguments(given, {})
    worker = WorkerEngine(make_engine(arguments), arguments, shut_down=lambda: None)
    await worker.start(1)
    try:
        yield Client(worker)
    finally:
        await worker.cleanup()
