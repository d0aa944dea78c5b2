"""The simulation of `fleet.py`: workers step by step, and the choice of one for each request."""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

ANSWER = 128
"""Tokens of an answer, on the mean."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker can do; seconds, and tokens per second."""

    step_s: float = 0.02
    prompt_rate: float = 10_000
    slots: int = 64
    budget: int = 2048


@dataclass(slots=True)
class Request:
    """One request: when it came, what it has to do, and when its tokens came."""

    at_s: float
    prompt: int
    answer: int
    group: int = -1
    left_to_compute: int = 0
    done: int = 0
    begun_at: int = 0
    first_s: float = math.inf
    last_s: float = math.inf
    gap_s: float = 0.0


@dataclass(slots=True)
class Batch:
    """A worker's queue and rows.

    Attributes:
        waiting: Requests without a row.
        prefilling: Rows whose prompts are being computed.
        ends: A heap of the decoding rows, by the step that is their last.
        peaks: Number and seconds of steps, each longer than all after it.
    """

    waiting: deque[Request] = field(default_factory=deque)
    prefilling: list[Request] = field(default_factory=list)
    ends: list[tuple[int, int, Request]] = field(default_factory=list)
    peaks: list[tuple[int, float]] = field(default_factory=list)
    step: int = 0
    begun_s: float = 0.0
    ended_s: float = 0.0
    stepping: bool = False
    prompts_alone: bool = False
    has_arrivals: bool = False
    gathering_since_s: float = -math.inf
    alive: bool = True
    prefixes: set[int] = field(default_factory=set)

    @property
    def num_rows(self) -> int:
        return len(self.prefilling) + len(self.ends)

    @property
    def load(self) -> int:
        return len(self.waiting) + self.num_rows

    def end_step(self, now_s: float) -> None:
        """Count a step: the time since the one before is a gap between tokens of decoding rows."""
        self.stepping = False
        if self.prompts_alone:
            return
        took_s = now_s - (self.ended_s if self.ends else self.begun_s)
        self.step, self.ended_s = self.step + 1, now_s
        while self.peaks and self.peaks[-1][1] <= took_s:
            self.peaks.pop()
        self.peaks.append((self.step, took_s))

    def leaves_decoding_out(self, now_s: float) -> bool:
        """Whether the next step computes prompts alone, as the engine's `Pacing` had it before
        decision 58, for requests that came during a step: so that they begin together, at most half
        of the time.
        """
        may_wait = self.ended_s > self.gathering_since_s and now_s - self.gathering_since_s > 2 * MAX_GATHER_S
        if self.has_arrivals and (not self.ends or may_wait):
            self.gathering_since_s = now_s
        found = self.has_arrivals and bool(self.ends) and now_s - self.gathering_since_s < MAX_GATHER_S
        self.has_arrivals = False
        return found

    def longest_since(self, step: int) -> float:
        """Seconds of the longest step after one; 0 if there was none."""
        found = bisect.bisect_right(self.peaks, step, key=lambda peak: peak[0])
        return self.peaks[found][1] if found < len(self.peaks) else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals: `rate` a second for `seconds`; `shared` is the part of each prompt that it has in
    common with the others of its group, `groups` their number.
    """

    rate: float
    seconds: float
    prompt: int = 512
    answer: int = ANSWER
    shared: float = 0.0
    groups: int = 1

    def requests(self, seed: int) -> Iterator[Request]:
        """Poisson arrivals; lengths are exponential around their means, from 1 on."""
        source = random.Random(seed)
        at_s = 0.0
        while (at_s := at_s + source.expovariate(self.rate)) < self.seconds:
            prompt, answer = (max(1, round(source.expovariate(1 / mean))) for mean in (self.prompt, self.answer))
            yield Request(at_s, prompt, answer, source.randrange(self.groups) if self.shared else -1)


MAX_GATHER_S = 0.03
"""`worker.engines.embedded.serving.pacing.MAX_GATHER_S`."""

IN_TURN, OF_TWO, BY_PREFIX = "in turn", "of two", "by prefix"
"""How a worker is chosen: Dynamo's default, the less loaded one of two, or by the KV router."""


class Fleet:
    """`count` workers; `run` answers every request of a load.

    Args:
        count: Number of workers.
        worker: Abilities of each.
        router: How a worker is chosen.
        shared: Part of a prompt that is cached where another one of its group was computed.
        path_s: Seconds that a request's way to the worker takes.
        seed: Seed of the choices of workers.
    """

    def __init__(
        self,
        count: int,
        worker: Worker,
        router: str = IN_TURN,
        shared: float = 0.0,
        path_s: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.batches = [Batch() for _ in range(count)]
        self.worker, self.router, self.shared, self.path_s = worker, router, shared, path_s
        self._source = random.Random(seed)
        self._events: list[tuple[float, int, int]] = []  # time, order, worker whose step ends
        self._order = 0
        self._alive: Sequence[int] = range(count)
        self._turn = 0

    def run(self, requests: Sequence[Request], kill: float = 0.0, kill_at_s: float = math.inf) -> list[Request]:
        """The requests, answered; the first `kill` of the workers die at `kill_at_s`."""
        for request in requests:
            if kill and request.at_s >= kill_at_s:
                self._until(kill_at_s)
                self._kill(math.ceil(kill * len(self.batches)), kill_at_s)
                kill = 0.0
            arrives_s = request.at_s + self.path_s
            self._until(arrives_s)
            self._take(request, arrives_s)
        self._until(math.inf)
        return list(requests)

    def _until(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            at_s, _, index = heapq.heappop(self._events)
            self._end_step(index, at_s)

    def _take(self, request: Request, now_s: float) -> None:
        index = self._choose(request)
        batch = self.batches[index]
        cached = self.shared if request.group in batch.prefixes else 0.0
        request.left_to_compute = max(1, round(request.prompt * (1 - cached))) + request.done
        batch.prefixes.add(request.group)
        batch.waiting.append(request)
        batch.has_arrivals = True
        if not batch.stepping:
            self._begin_step(index, now_s)

    def _choose(self, request: Request) -> int:
        if self.router == IN_TURN:
            self._turn += 1
            return self._alive[self._turn % len(self._alive)]
        found = min(self._source.choices(self._alive, k=2), key=lambda index: self.batches[index].load)
        if self.router == BY_PREFIX and request.group >= 0:
            home = request.group % len(self.batches)
            if self.batches[home].alive and self.batches[home].load <= 2 * self.batches[found].load + 4:
                return home
        return found

    def _begin_step(self, index: int, now_s: float) -> None:
        batch, worker = self.batches[index], self.worker
        while batch.waiting and batch.num_rows < worker.slots:
            batch.prefilling.append(batch.waiting.popleft())
        batch.prompts_alone = batch.leaves_decoding_out(now_s) and bool(batch.prefilling)
        left = budget = worker.budget - (0 if batch.prompts_alone else len(batch.ends))
        for row in batch.prefilling:
            chunk = min(row.left_to_compute, left)
            row.left_to_compute -= chunk
            left -= chunk
        computed = budget - left
        batch.stepping, batch.begun_s = True, now_s
        self._order += 1
        heapq.heappush(self._events, (now_s + worker.step_s + computed / worker.prompt_rate, self._order, index))

    def _end_step(self, index: int, now_s: float) -> None:
        batch = self.batches[index]
        if not batch.alive:
            return
        batch.end_step(now_s)
        while batch.ends and batch.ends[0][0] == batch.step:
            row = heapq.heappop(batch.ends)[2]
            row.done, row.last_s = row.answer, now_s
            row.gap_s = max(row.gap_s, batch.longest_since(row.begun_at))
        for row in [row for row in batch.prefilling if not row.left_to_compute]:
            batch.prefilling.remove(row)
            self._first_token(batch, row, now_s)
        if batch.num_rows or batch.waiting:
            self._begin_step(index, now_s)
        else:
            batch.peaks.clear()

    def _first_token(self, batch: Batch, row: Request, now_s: float) -> None:
        """Of a request here; one that has moved had others before."""
        if row.first_s == math.inf:
            row.first_s = now_s
        else:
            row.gap_s = max(row.gap_s, now_s - row.last_s)
        row.done, row.last_s, row.begun_at = row.done + 1, now_s, batch.step
        if row.done < row.answer:
            self._order += 1
            heapq.heappush(batch.ends, (batch.step + row.answer - row.done, self._order, row))

    def _kill(self, count: int, now_s: float) -> None:
        """Workers die at once; what they had goes on elsewhere."""
        lost: list[Request] = []
        for batch in self.batches[:count]:
            batch.alive = False
            for _, _, row in batch.ends:
                row.done += batch.step - row.begun_at
                row.last_s = batch.ended_s
                row.gap_s = max(row.gap_s, batch.longest_since(row.begun_at))
            lost += [*(row for _, _, row in batch.ends), *batch.prefilling, *batch.waiting]
        self._alive = range(count, len(self.batches))
        for request in lost:
            self._take(request, now_s)


def disaggregated(
    requests: Sequence[Request], prefill: int, decode: int, worker: Worker, handoff_s: float
) -> list[Request]:
    """Requests answered by prefill workers, which compute prompts one after the other, and decode
    workers, to which a prompt's KV takes `handoff_s` a token. These compute its last position.
    """
    free_s = [0.0] * prefill  # a heap: when each prefill worker has nothing to do
    handed = []
    for request in requests:
        begins_s = max(request.at_s, heapq.heappop(free_s))
        ends_s = begins_s + worker.step_s + request.prompt / worker.prompt_rate
        heapq.heappush(free_s, ends_s)
        handed.append(replace(request, at_s=ends_s + handoff_s * request.prompt, prompt=1))
    order = sorted(range(len(handed)), key=lambda number: handed[number].at_s)
    Fleet(decode, worker).run([handed[number] for number in order])
    return [replace(done, at_s=asked.at_s) for done, asked in zip(handed, requests, strict=True)]
