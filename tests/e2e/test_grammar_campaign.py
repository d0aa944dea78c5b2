"""Generated grammar bombs through the frontend, by the thousand, beside clients who want nothing
but their answers.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from e2e_stack import DYNAMO, Stack, Worker, running_stack, wait_for
from grammar_bombs import KINDS, bomb
from processor_requests import PATIENT, chat

from adapters.client import processor

Shared = tuple[Stack, Worker]

ANSWERS = {200, 400, 529} | ({500} if DYNAMO < (1, 6) else set())
"""Answered; refused; not compiled in time, because other bombs were in front of it; failed by a
limit of a step after the first token, which the older frontend makes a 500: a `multipleOf` does,
and nothing else did in 2,400. `check_calm` holds every 500 against the worker's count."""

CACHE_MIB = 32
TIMEOUT_S = 0.3
"""Processor time of a bomb: a sixth of them take whatever they may."""

PAUSE_S = 0.5
"""Of the client beside the bombs: it is there to see wrong answers, not to take their time."""

SLACK_BYTES = 64 << 20
"""What an allocator may keep beside the cache."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Shared]:
    with running_stack(tmp_path_factory.mktemp("stack"), tiny_model) as stack:
        stack.start_frontend()
        limits = ["--grammar-cache-mib", str(CACHE_MIB), "--grammar-timeout-s", str(TIMEOUT_S)]
        yield stack, stack.start_worker("--device", "cpu", "--dtype", "float32", *limits, *PATIENT)


def throw(stack: Stack, worker: Worker, seed: int, numbers: range) -> Counter[str]:
    """Send the bombs, eight at a time; kinds and statuses of the answers."""

    def one(number: int) -> str:
        reply = chat(stack, max_tokens=4, **bomb(seed, number))
        kind = KINDS[number % len(KINDS)].__name__
        assert reply.status in ANSWERS - ({500} if kind != "multiple_of" else set()), (
            f"bomb {seed}/{number}, {kind}: {reply.status} {reply.text[:300]}"
        )
        assert worker.running, f"bomb {seed}/{number}, {kind}"
        return f"{kind} {reply.status}"

    with ThreadPoolExecutor(8) as pool:
        return Counter(pool.map(one, numbers))


def check_calm(worker: Worker, statuses: Counter[str]) -> None:
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "all freed")
    for outcome in ("unknown_error", "engine_broken"):
        assert worker.metric("dlw_requests_total", outcome=outcome) == 0
    errors = sum(count for answer, count in statuses.items() if answer.endswith(" 500"))
    assert errors <= worker.metric("dlw_processor_errors_total", reason="unsatisfiable")
    assert worker.metric("dlw_grammar_cache_bytes") <= CACHE_MIB << 20
    assert worker.metric("dlw_grammar_sandbox_restarts_total") == 0


@pytest.mark.campaign
def test_five_bombs_of_each_kind(served: Shared) -> None:
    stack, worker = served
    check_calm(worker, throw(stack, worker, 0, range(5 * len(KINDS))))
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_2_400_bombs(served: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    stack, worker = served
    expected = chat(stack, max_tokens=8).token_ids
    over = threading.Event()
    resident: list[int] = []  # since the last 400, twice a second

    def bystander() -> int:
        for number in itertools.count():
            if over.is_set():
                return number
            assert chat(stack, max_tokens=8).token_ids == expected
            assert chat(stack, processor("choice", choices=[f"word {number}"])).content == f"word {number}"
            resident.append(psutil.Process(worker.child.pid).memory_info().rss)
            over.wait(PAUSE_S)
        raise AssertionError

    statuses: Counter[str] = Counter()
    memory = []
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(bystander)
        try:
            for first in range(0, 2400, 400):
                statuses += throw(stack, worker, 1, range(first, first + 400))
                memory.append(min(resident))  # soon after free memory went back to the system
                resident.clear()
        finally:
            over.set()
        answered = beside.result()
    with capsys.disabled():
        shown = ", ".join(f"{kind}: {count}" for kind, count in sorted(statuses.items()))
        lowest = ", ".join(f"{size / 2**20:.0f}" for size in memory)
        sys.stdout.write(f"\n{shown}\n{answered} requests beside them; resident in every 400 at least: {lowest} MiB\n")
    check_calm(worker, statuses)
    assert answered > 0
    assert max(memory[3:]) - memory[2] < SLACK_BYTES  # the arenas of all threads have been filled by then
