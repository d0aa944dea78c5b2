"""What a step's admission looks at grows with neither a client's queue nor long prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_turns import BLOCK, Engine, request

from worker.engines.embedded.admission_order import Admission
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.sampling import LogitsCollector

MANY = 256


def calls_in_a_step(engine: Engine, owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Times that a step calls a method of a class."""
    num_calls, method = 0, getattr(owner, name)

    def counted(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        return method(*arguments)

    monkeypatch.setattr(owner, name, counted)
    engine.step()
    return num_calls


def test_a_step_looks_at_one_request_of_a_starved_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waiting request that had no room was looked at in each step, for 60 µs."""
    engine = Engine(slots=32, pages=100, mixed=None)
    for number in range(3):
        engine.scheduler.add(request(f"a{number}", "a", 10 * BLOCK, 100))
    engine.scheduler.add(request("b", "b", 40 * BLOCK, 100))
    engine.step()
    for number in range(MANY):
        engine.scheduler.add(request(f"c{number}", "c", 80 * BLOCK, 100))

    num_looks = calls_in_a_step(engine, KvCache, "has_room", monkeypatch)
    assert len(engine.running) == 4
    assert num_looks < MANY // 4


def test_a_client_for_whom_there_is_no_room_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of requests that might give way was tried for each: with 50 clients that wait for
    much memory, steps of 30 requests took 0.3 s longer.
    """
    engine = Engine(slots=32, pages=100, mixed=None)
    for number in range(16):
        engine.scheduler.add(request(f"a{number}", "a", 2 * BLOCK, 100))
    engine.step()
    for number in range(MANY):
        engine.scheduler.add(request(f"c{number}", f"c{number}", 99 * BLOCK))

    num_looks = calls_in_a_step(engine, KvCache, "has_room", monkeypatch)
    assert len(engine.running) == 16
    assert MANY <= num_looks < 2 * MANY


class Looked(set[int]):
    """Hashes that count how often they are looked at."""

    num_looks = 0

    def __contains__(self, item: object) -> bool:
        self.num_looks += 1
        return super().__contains__(item)


@given(prompt=st.integers(1, 200 * BLOCK), start=st.integers(0, 3), end=st.integers(0, 200))
def test_more_than_half_of_a_prompt_is_waited_for(prompt: int, start: int, end: int) -> None:
    """Two look-ups tell whether so many blocks are about to be cached, however many they are; what
    holds the last token is computed in any case.
    """
    queues = Engine(slots=1).scheduler.queues
    one = request("a", None, prompt)
    pending = Looked(one.hash_blocks(BLOCK)[start:end])
    num_shared = min(len(pending), (prompt - 1) // BLOCK) if start == 0 else 0
    waits = Admission(queues, None)._awaits_prefix(one, pending)  # type: ignore[arg-type]
    assert waits == (2 * num_shared * BLOCK > prompt)
    assert pending.num_looks <= 2


def test_scores_of_a_prompt_wait_for_no_other_prompt() -> None:
    """They take all of it: prompts with one beginning were computed one after the other."""
    engine = Engine(slots=8, mixed=None)
    for name in "abcdefgh":
        one = request("same", None, 4 * BLOCK + 1)
        one.id, one.tap = name, LogitsCollector(one.tokens, top_n=0)
        engine.scheduler.add(one)
    engine.step()
    assert len(engine.plans[0].chunks) == 8


def test_prompts_are_hashed_once_for_all_starved_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of them all blocks of the prompts in prefill were put into a set, in each step."""
    engine = Engine(slots=4, pages=100, mixed=16)
    for number in range(2):
        engine.scheduler.add(request(f"a{number}", "a", 30 * BLOCK, 100))
    engine.step()
    for number in range(MANY):
        engine.scheduler.add(request(f"c{number}", f"c{number}", 90 * BLOCK, 100))

    num_looks = calls_in_a_step(engine, Admission, "_pending", monkeypatch)
    assert len(engine.running) == 2
    assert num_looks <= 2


def test_no_prompt_is_looked_at_while_no_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step put the hashes of all blocks of a long prompt into a set, for nobody."""
    engine = Engine(slots=2)
    engine.scheduler.add(request("a", "a", MANY * BLOCK))
    engine.scheduler.add(request("b", "b", MANY * BLOCK))
    engine.step()
    engine.scheduler.add(request("c", "c", MANY * BLOCK))

    num_looks = calls_in_a_step(engine, Admission, "_pending", monkeypatch)
    assert len(engine.running) == 2
    assert num_looks == 0
