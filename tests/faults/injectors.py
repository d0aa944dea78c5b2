"""Faults as objects: what happens to a cluster under load, and what bad clients do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from cluster import Cluster
from e2e_stack import MODEL, Worker, http
from load_client import LoadClient, body_of, prompt_of


class Fault(Protocol):
    """Something that goes wrong. Its requests have records of the load client's, where they are
    requests that must be answered.
    """

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        """Let it happen, and wait until it is over."""


@dataclass(frozen=True)
class Kill:
    """``kill -9`` of a worker.

    Attributes:
        replaced: Whether another one is started, once discovery has forgotten the dead one.
    """

    replaced: bool = True

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        victim = chance.choice(cluster.at_risk)
        victim.signal(signal.SIGKILL)
        await asyncio.to_thread(victim.wait)
        if self.replaced:  # not before: a frontend of 1.4.2 that hears of a new worker tries the dead one again
            await asyncio.to_thread(cluster.forget_dead)
            await cluster.start_one()


@dataclass(frozen=True)
class Stop:
    """SIGSTOP of a worker, SIGCONT some time later.

    Attributes:
        seconds: How long it hangs.
    """

    seconds: float

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        victim = chance.choice(cluster.at_risk)
        victim.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            victim.signal(signal.SIGCONT)


@dataclass
class Drain:
    """SIGTERM of a worker.

    Attributes:
        replaced: Whether another one is started first.
        second_after_s: When a second SIGTERM follows, None for never.
        statuses: Exit statuses of the workers that left.
        seconds: How long each took to leave.
    """

    replaced: bool = True
    second_after_s: float | None = None
    statuses: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        await self.leave(cluster, chance.choice(cluster.at_risk))

    async def leave(self, cluster: Cluster, worker: Worker) -> None:
        """Replace one worker."""
        if self.replaced:
            await cluster.start_one()
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        if self.second_after_s is not None:
            await asyncio.sleep(self.second_after_s)
            worker.signal(signal.SIGTERM)
        self.statuses.append(await asyncio.to_thread(worker.wait))
        self.seconds.append(time.monotonic() - began)


@dataclass
class RollingRestart:
    """Every worker is replaced, one after the other.

    Attributes:
        drain: How each of them leaves.
    """

    drain: Drain = field(default_factory=Drain)

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        for worker in cluster.at_risk:
            await self.drain.leave(cluster, worker)


@dataclass(frozen=True)
class StoreDown:
    """The boundary store goes away, and comes back as it was.

    Attributes:
        seconds: How long it is away.
    """

    seconds: float

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        away = cluster.boundaries.with_name("away")
        cluster.boundaries.rename(away)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            away.rename(cluster.boundaries)


@dataclass(frozen=True)
class Disconnect:
    """Clients that go away at random times, so that their requests wait, are computed, or are
    answered.

    Attributes:
        number: How many.
        at_once: How many of them at a time.
        num_tokens: Tokens of answers that they do not wait for.
    """

    number: int
    at_once: int = 20
    num_tokens: int = 200

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        for first in range(0, self.number, self.at_once):
            leaving = []
            for name in range(first, min(first + self.at_once, self.number)):
                prompt = prompt_of(10**6 + name % 50, chance.choice((20, 100, 600, 1500)))
                after_s = chance.choice((0.002, 0.01, 0.03, 0.1, 0.3))
                leaving.append(client.ask(prompt, self.num_tokens, leave_after_s=after_s))
            await asyncio.gather(*leaving)


@dataclass
class NeverReads:
    """Clients that send a request and read nothing of the answer, until `leave`.

    Attributes:
        number: How many.
        num_tokens: Tokens of the answers.
    """

    number: int
    num_tokens: int = 1000
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        address = urlsplit(client.url)
        for name in range(self.number):
            _, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
            self._writers.append(writer)
            body = json.dumps(body_of(prompt_of(2 * 10**6 + name), self.num_tokens)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            await writer.drain()
            writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def leave(self) -> None:
        """Close the connections."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


MALFORMED: Sequence[dict[str, Any]] = (
    {"prompt": []},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "temperature": "warm"},
    {"prompt": "x", "top_p": 7},
    {"prompt": [999_999]},
    {"prompt": "x", "nvext": {"annotations": ["logits_processors:{"]}},
    {"prompt": "x", "nvext": {"annotations": ['logits_processors:{"processors": [{"name": "no_such"}]}']}},
    {"prompt": "x", "no_such_field": 1},
)
"""Bodies that must be refused."""

OVERSIZED: Sequence[dict[str, Any]] = (
    {"prompt": [300] * 5000},
    {"prompt": "word " * 20_000},
    {"prompt": "x", "nvext": {"annotations": ["logits_processors:" + "[" * 200_000]}},
)


@dataclass
class BadRequests:
    """Requests that are malformed, or too large.

    Attributes:
        bodies: What is sent, each once.
        answers: Status and text of each answer.
    """

    bodies: tuple[dict[str, Any], ...] = (*MALFORMED, *OVERSIZED)
    answers: list[tuple[int, str]] = field(default_factory=list)

    async def inject(self, cluster: Cluster, client: LoadClient, chance: random.Random) -> None:
        for body in self.bodies:
            sent = {"model": MODEL, "max_tokens": 4, **body}
            self.answers.append(await asyncio.to_thread(http, f"{client.url}/v1/completions", sent))

    @property
    def served(self) -> list[tuple[dict[str, Any], tuple[int, str]]]:
        """Bodies that were not refused with an answer, and what came."""
        pairs = zip(self.bodies * (1 + len(self.answers) // len(self.bodies)), self.answers, strict=False)
        return [(body, answer) for body, answer in pairs if not 400 <= answer[0] < 600]
