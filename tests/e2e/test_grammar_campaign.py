"""Generated grammar bombs through the frontend, by the thousand, beside clients who want nothing but their answers."""

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
"""500 is what the older frontend makes of a grammar that goes beyond its limits after the first token."""

CACHE_MIB = 32
SLACK_BYTES = 64 << 20
"""What an allocator may keep beside the cache."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Shared]:
    with running_stack(tmp_path_factory.mktemp("stack"), tiny_model) as stack:
        stack.start_frontend()
        options = ["--device", "cpu", "--dtype", "float32", "--grammar-cache-mib", str(CACHE_MIB), *PATIENT]
        yield stack, stack.start_worker(*options)


def throw(stack: Stack, worker: Worker, seed: int, numbers: range) -> Counter[str]:
    """Send the bombs, eight at a time; kinds and statuses of the answers."""

    def one(number: int) -> str:
        reply = chat(stack, max_tokens=8, **bomb(seed, number))
        kind = KINDS[number % len(KINDS)].__name__
        assert reply.status in ANSWERS, f"bomb {seed}/{number}, {kind}: {reply.status} {reply.text[:300]}"
        assert worker.running, f"bomb {seed}/{number}, {kind}"
        return f"{kind} {reply.status}"

    with ThreadPoolExecutor(8) as pool:
        return Counter(pool.map(one, numbers))


def check_calm(worker: Worker) -> None:
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "all freed")
    for outcome in ("unknown_error", "engine_broken"):
        assert worker.metric("dlw_requests_total", outcome=outcome) == 0
    assert worker.metric("dlw_grammar_cache_bytes") <= CACHE_MIB << 20
    assert worker.metric("dlw_grammar_sandbox_restarts_total") == 0


def test_five_bombs_of_each_kind(served: Shared) -> None:
    stack, worker = served
    throw(stack, worker, 0, range(5 * len(KINDS)))
    check_calm(worker)
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_2_400_bombs(served: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    stack, worker = served
    expected = chat(stack, max_tokens=8).token_ids
    over = threading.Event()

    def bystander() -> int:
        for number in itertools.count():
            if over.is_set():
                return number
            assert chat(stack, max_tokens=8).token_ids == expected
            assert chat(stack, processor("choice", choices=[f"word {number}"])).content == f"word {number}"
        raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(bystander)
        try:
            statuses = throw(stack, worker, 1, range(400))
            before = psutil.Process(worker.child.pid).memory_info().rss
            statuses += throw(stack, worker, 1, range(400, 2400))
        finally:
            over.set()
        answered = beside.result()
    check_calm(worker)
    grown = psutil.Process(worker.child.pid).memory_info().rss - before
    with capsys.disabled():
        shown = ", ".join(f"{kind}: {count}" for kind, count in sorted(statuses.items()))
        sys.stdout.write(f"\n{shown}\n{answered} requests beside them; {grown / 2**20:.0f} MiB grown\n")
    assert answered > 0
    assert grown < (CACHE_MIB << 20) + SLACK_BYTES
