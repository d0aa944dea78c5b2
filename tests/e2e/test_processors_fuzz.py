"""Requests that nobody should send, by the thousand: each is answered or refused, and the worker
is what it was.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from e2e_stack import Stack, Worker, wait_for
from fuzzed_requests import Case, case
from processor_requests import chat, serving

from adapters.client import processor

Shared = tuple[Stack, Worker]

LEAKED_BYTES = 12 * 1024
"""Memory kept per request that counts as a leak."""


@pytest.fixture
def served(tmp_path: Path, tiny_model: Path) -> Iterator[Shared]:
    with serving(tmp_path, tiny_model) as running:
        yield running


@dataclass
class Record:
    """What a run has seen.

    Attributes:
        wrong: Cases that came out otherwise than they must.
        refusals_s: Latency of each refusal, seconds.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)

    def add(self, number: int, sent: Case, answer: httpx.Response, seconds: float) -> None:
        status = answer.status_code
        self.statuses[f"{sent.kind} {status}"] += 1
        if status == 400:
            self.refusals_s.append(seconds)
        fitting = {"refused": {400}, "served": {200}, "either": {200, 400}}[sent.fate]
        if status not in fitting:
            shown = f"{sent.body[:300]!r} {sent.headers!r:.300}"
            self.wrong.append(f"case {number}, {sent.kind}, {sent.fate}: {status} {answer.text[:200]}\n  {shown}")

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.refusals_s, n=100)[-1]


def fuzz(stack: Stack, worker: Worker, seed: int, numbers: range) -> Record:
    """Send the cases one after the other, and see every hundred that the worker still answers as
    it did.
    """
    record = Record()
    expected = chat(stack, max_tokens=4).content
    url = f"{stack.url}/v1/chat/completions"
    with httpx.Client(timeout=60) as client:
        for number in numbers:
            sent = case(seed, number)
            headers = [(b"content-type", b"application/json"), *sent.headers]
            began = time.perf_counter()
            answer = client.post(url, content=sent.body, headers=headers)
            record.add(number, sent, answer, time.perf_counter() - began)
            assert worker.running, f"case {number}: {sent.body[:2000]!r}"
            if number % 100 == 99:
                assert chat(stack, max_tokens=4).content == expected
                assert chat(stack, processor("choice", choices=["ok"])).content == "ok"
    return record


def rss(worker: Worker) -> int:
    """Resident memory of the worker process, bytes."""
    return int(psutil.Process(worker.child.pid).memory_info().rss)


def grown_bytes(stack: Stack, worker: Worker, seed: int, numbers: range, limit: float) -> float:
    """Bytes per request that memory grows by when requests that were served before are sent again.

    The least of six rounds, or of those up to one below `limit`: an allocator takes some megabytes
    for each thread once, on a busy machine in later rounds; a leak grows in every round.
    """
    growths: list[float] = []
    while len(growths) < 6 and min(growths, default=math.inf) >= limit:
        before = rss(worker)
        check(worker, fuzz(stack, worker, seed, numbers))
        growths.append((rss(worker) - before) / len(numbers))
    return min(growths)


def check(worker: Worker, record: Record) -> None:
    assert not record.wrong, "\n".join(record.wrong)
    assert worker.metric("dlw_requests_total", outcome="unknown_error") == 0
    assert worker.metric("dlw_requests_total", outcome="engine_broken") == 0
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "all freed", 10)


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Writes a line that is shown however the tests are run."""

    def write(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return write


def test_200_fuzzed_requests(served: Shared, tell: Callable[[str], None]) -> None:
    stack, worker = served
    record = fuzz(stack, worker, 0, range(200))
    check(worker, record)
    assert grown_bytes(stack, worker, 0, range(200), LEAKED_BYTES) < LEAKED_BYTES
    assert len(record.refusals_s) > 120
    assert record.p99_s < 5  # a stall, not a slow machine
    tell(f"p99 of {len(record.refusals_s)} refusals: {1e3 * record.p99_s:.1f} ms")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_10_000_fuzzed_requests(served: Shared, tell: Callable[[str], None]) -> None:
    stack, worker = served
    record = fuzz(stack, worker, 1, range(10_000))
    check(worker, record)
    grown = grown_bytes(stack, worker, 1, range(2000), LEAKED_BYTES / 4)
    tell(f"p99 of {len(record.refusals_s)} refusals: {1e3 * record.p99_s:.1f} ms, {grown:.0f} B kept a request")
    tell(", ".join(f"{kind}: {count}" for kind, count in sorted(record.statuses.items())))
    assert grown < LEAKED_BYTES / 4
    assert record.p99_s < 0.05


def test_bystanders_do_not_notice(served: Shared) -> None:
    """Long answers beside a storm of bad requests are what they are alone."""
    stack, worker = served
    options = {"max_tokens": 300, "ignore_eos": True}
    alone = chat(stack, **options).token_ids  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as pool:
        mates = [pool.submit(chat, stack, stream=number % 2 == 0, **options) for number in range(4)]  # type: ignore[arg-type]
        storms = [pool.submit(fuzz, stack, worker, 2, range(start, start + 42)) for start in range(0, 168, 42)]
        records = [storm.result() for storm in storms]
        assert [mate.result().token_ids for mate in mates] == [alone] * 4
    for record in records:
        check(worker, record)
