"""A trainer's side of ``--engine-port``, and a worker that has one."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ports import free_port
from safetensors.torch import load_file, save
from served_worker import serving

from worker.runtimes.dynamo_engine import WorkerEngine

KEY = "the trainer's key"
LONG = 1500
"""Tokens of an answer that is under way for longer than a busy machine takes to ask a route."""

BYTES = {"Content-Type": "application/octet-stream"}


@dataclass
class Generated:
    """Chunks of one answer."""

    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk["token_ids"]]

    @property
    def versions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.chunks[-1]["engine_data"]["weight_versions"]
        return found


class Trainer:
    """Asks a worker's routes, and the worker itself."""

    def __init__(self, worker: WorkerEngine, port: int) -> None:
        self.worker, self.port = worker, port
        self.num_asked = 0

    def send(
        self,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        method: str = "POST",
        key: str | None = KEY,
        **headers: str,
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer; for any thread but the worker's."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            given["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, body, given, encode_chunked=not isinstance(body, bytes))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    async def ask(self, path: str, body: bytes | Iterable[bytes] = b"", **options: Any) -> tuple[int, dict[str, Any]]:
        """`send`, in a thread."""
        return await asyncio.to_thread(self.send, path, body, **options)

    async def tell(self, name: str, **fields: Any) -> dict[str, Any]:
        """The answer of a route, which must be ok."""
        status, answer = await self.ask(f"/engine/{name}", json.dumps(fields).encode())
        assert (status, answer["status"]) == (200, "ok"), answer
        return answer

    async def give(self, tensors: dict[str, Any], **query: str) -> tuple[int, dict[str, Any]]:
        """Status and answer of an update in the body."""
        asked = "&".join(f"{name}={value}" for name, value in query.items())
        return await self.ask(f"/engine/update_weights?{asked}", save(tensors), **BYTES_OPTIONS)

    async def generate(
        self, count: int, generated: Generated | None = None, seed: int = 1, behind: Sequence[int] = (), **fields: Any
    ) -> Generated:
        """A sampled answer of `count` tokens, which grows meanwhile, to a prompt that ends with the
        tokens `behind`.
        """
        self.num_asked += 1
        generated = generated or Generated()
        raw = {
            "token_ids": [*range(20, 50), *behind],
            "sampling_options": {"seed": seed, "temperature": 1.0},
            "stop_conditions": {"max_tokens": count, "ignore_eos": True},
            **fields,
        }
        async for chunk in self.worker.generate(raw, Context(f"generated-{self.num_asked}")):
            generated.chunks.append(chunk)
        return generated


BYTES_OPTIONS = {name.replace("-", "_"): value for name, value in BYTES.items()}


@dataclass
class Context:
    """A runtime's context."""

    name: str
    metadata: dict[str, str] = field(default_factory=dict)

    def id(self) -> str:
        return self.name

    def trace_headers(self) -> None:
        return None


@asynccontextmanager
async def trained(model: Path, keys: Path, *argv: str) -> AsyncIterator[Trainer]:
    """A worker whose weights a trainer changes."""
    keys.write_text(f"# of tests\n{KEY}\nanother\nclé à molette à\n", encoding="utf-8")
    port = free_port()
    async with serving(model, "--engine-port", str(port), "--engine-key-file", str(keys), *argv) as client:
        yield Trainer(client.worker, port)


def tensors_of(path: Path) -> dict[str, Any]:
    """Tensors of a checkpoint of one file."""
    return load_file(path / "model.safetensors")
