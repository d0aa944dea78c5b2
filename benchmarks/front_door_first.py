"""What the front door adds to the time to first token, for `front_door.py`.

Open-loop load: requests come at fixed times, every other one through the front door and the rest
straight to the frontend, whether those before have been answered or not. Each answer is a stream
of an event every 20 ms that lasts until as many others are open on its way as the table says. This
process plays clients and frontend on one core, and the front door has another one to itself. The
time to first token is counted from before the connection is made to the first event.

A request through the front door and the next one that is not are a pair; the estimate is the
median of the pairs' differences, its interval of 95 % by bootstrap over the pairs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

GAP_S = 0.01
"""Time between two arrivals, one on each way in twice as much."""

EVENT_S = 0.02
"""Time between two events of an answer."""

TICK_S = 0.001
RESAMPLES = 4000
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Wire:
    """What is sent: a request and the parts of its answer."""

    request: bytes
    head: bytes
    event: bytes
    last: bytes


@dataclass(slots=True)
class Answer:
    """A stream of the frontend that is open.

    Attributes:
        due_s: Time of its next event.
        ends_s: Time of its end.
    """

    transport: asyncio.Transport
    due_s: float
    ends_s: float


class Frontend(asyncio.Protocol):
    """Answers a request at once, and then with an event now and then.

    Args:
        wire: The request and the answer that are sent.
        lasts_s: Time that an answer lasts.
        answers: The streams that are open.
    """

    def __init__(self, wire: Wire, lasts_s: float, answers: list[Answer]) -> None:
        self._wire = wire
        self._lasts_s = lasts_s
        self._answers = answers
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(self._wire.request[-64:]):
            self._received = b""
            self._transport.write(self._wire.head + self._wire.event)
            now = time.monotonic()
            self._answers.append(Answer(self._transport, now + EVENT_S, now + self._lasts_s))


class Client(asyncio.Protocol):
    """One request, whose first event `first` is called for; it reads until the connection ends."""

    def __init__(self, wire: Wire, first: Callable[[float], None]) -> None:
        self._wire = wire
        self._first: Callable[[float], None] | None = first
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._wire.request)
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._first is not None:
            self._head += data
            if b"data: " in self._head:
                self._first(time.perf_counter())
                self._first = None
        if data.endswith(self._wire.last):
            self._transport.close()


async def _send_events(wire: Wire, answers: list[Answer]) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        for answer in [one for one in answers if one.due_s <= now]:
            answer.due_s += EVENT_S
            ended = answer.ends_s <= now
            answer.transport.write(wire.last if ended else wire.event)
            if ended:
                answers.remove(answer)


async def measure_first(door: int, frontend: int, wire: Wire, num_streams: int, num_pairs: int) -> list[float]:
    """Seconds that the front door adds to the first token, of each pair of requests.

    Args:
        door: Port of the front door, before the frontend.
        frontend: Port on which this process serves the frontend.
        wire: The request and the answer that are sent.
        num_streams: Streams that are open through the front door.
        num_pairs: Pairs of requests.
    """
    loop = asyncio.get_running_loop()
    answers: list[Answer] = []
    lasts_s = 2 * GAP_S * num_streams
    server = await loop.create_server(lambda: Frontend(wire, lasts_s, answers), "127.0.0.1", frontend)
    ticking = asyncio.create_task(_send_events(wire, answers))
    num_warm = num_streams + 8  # until as many streams are open as shall be
    times: list[list[asyncio.Future[float]]] = []
    asking: list[asyncio.Task[object]] = []

    def ask(port: int) -> asyncio.Future[float]:
        found: asyncio.Future[float] = loop.create_future()
        began = time.perf_counter()
        made = loop.create_connection(
            lambda: Client(wire, lambda now: found.set_result(now - began)), "127.0.0.1", port
        )
        asking.append(loop.create_task(made))
        return found

    begins = time.monotonic()
    for number in range(num_warm + num_pairs):
        order = (door, frontend) if number % 2 == 0 else (frontend, door)
        pair = {}
        for half, port in enumerate(order):
            await asyncio.sleep(max(0.0, begins + (2 * number + half) * GAP_S - time.monotonic()))
            pair[port] = ask(port)
        times.append([pair[door], pair[frontend]])
    async with asyncio.timeout(TIMEOUT_S):
        taken = [await asyncio.gather(*pair) for pair in times]
        await asyncio.gather(*asking)
        await asyncio.sleep(lasts_s + 2 * EVENT_S)  # until the last answer has ended
    ticking.cancel()
    server.close()
    return [through - straight for through, straight in taken[num_warm:]]


def pin(number: int, core: int) -> None:
    """Keep a process, 0 for this one, on one of the cores that it may use; nothing with one."""
    cores = sorted(os.sched_getaffinity(0 if number == 0 else number))
    if len(cores) > 1:
        os.sched_setaffinity(number, {cores[core % len(cores)]})


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its interval of 95 % by bootstrap."""
    data, numbers = np.array(values), np.random.default_rng(0)
    medians = np.median(numbers.choice(data, (RESAMPLES, len(data))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(data)), float(low), float(high)
