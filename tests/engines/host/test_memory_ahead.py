"""Memory of the KV store that is there before a step writes to it."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_mappings import CAN_POPULATE, resident_bytes

from worker.engines.embedded.host import memory
from worker.engines.embedded.host.memory_ahead import START_S, MemoryAhead, populate
from worker.engines.embedded.kv_cache import KvStore

CPU = torch.device("cpu")
MIB = 2**20


def test_populated_memory_is_there_and_keeps_its_values() -> None:
    tensors = memory.zeros(3, (32, MIB // 2), torch.uint8, CPU)
    tensors[1][9, 5] = 7
    before = resident_bytes(tensors[0].data_ptr())
    assert all(populate(tensor[8:12]) == CAN_POPULATE for tensor in tensors)
    assert before <= 2 * MIB
    if CAN_POPULATE:
        assert 6 * MIB <= resident_bytes(tensors[0].data_ptr()) <= 12 * MIB
    assert tensors[1][9, 5] == 7
    assert sum(int(tensor.count_nonzero()) for tensor in tensors) == 1


def await_touched() -> None:
    """Wait until no thread touches memory."""
    for thread in threading.enumerate():
        if thread.name == "kv-memory":
            thread.join(timeout=30)
            assert not thread.is_alive()


def test_a_store_gets_the_memory_of_its_next_pages() -> None:
    tensors = memory.zeros(2, (64, 1, 1, MIB // 4), torch.uint8, CPU)
    store = KvStore(tensors[:1], tensors[1:], is_read_behind=False, ahead=MemoryAhead(tensors))
    store.begin([])
    await_touched()
    assert not resident_bytes(tensors[0].data_ptr())
    for _ in range(2):
        store.begin([0, 3])
        await_touched()
        found = resident_bytes(tensors[0].data_ptr())
        assert 6 * MIB <= found <= 12 * MIB if CAN_POPULATE else not found
        store.give_back()
        assert not resident_bytes(tensors[0].data_ptr())


def test_a_step_needs_no_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has none left, the step thread would die of what only makes it faster."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    tensors = memory.zeros(2, (64, 1, 1, MIB // 4), torch.uint8, CPU)
    store = KvStore(tensors[:1], tensors[1:], is_read_behind=False, ahead=MemoryAhead(tensors))
    store.begin([0, 3])
    assert not resident_bytes(tensors[0].data_ptr())


def test_memory_that_is_given_back_stays_so() -> None:
    tensors = memory.zeros(2, (64, 1, 1, MIB // 4), torch.uint8, CPU)
    ahead = MemoryAhead(tensors)
    ahead.begin()
    ahead.forget()
    await_touched()
    assert not resident_bytes(tensors[0].data_ptr())


@given(
    num_rows=st.integers(1, 200),
    row_kib=st.sampled_from([1, 100, 700, 2048, 5000]),
    steps=st.lists(st.one_of(st.none(), st.integers(0, 199)), max_size=30),
    begins=st.booleans(),
)
def test_rows_are_touched_once_and_before_they_are_reached(
    num_rows: int, row_kib: int, steps: list[int | None], begins: bool
) -> None:
    """Where rows are reached one after the other; None gives the memory back."""
    row_bytes = row_kib * 1024
    tensor = torch.empty(row_bytes, dtype=torch.uint8, device="meta").expand(num_rows, -1)
    whole = torch.empty(num_rows, 1)
    touched: set[int] = set()
    events: list[threading.Event] = []
    before = 0

    def touch(tensors: list[torch.Tensor], after_s: float, is_over: threading.Event) -> None:
        assert len(tensors) == 2
        rows = {int(tensors[1].storage_offset()) + number for number in range(len(tensors[1]))}
        assert not rows & touched
        assert not is_over.is_set()
        events.append(is_over)
        assert after_s == (0 if reached else START_S)
        touched.update(rows)

    span = max(1, 2 * MIB // row_bytes)
    ahead, reached = MemoryAhead([tensor, whole], touch), False
    for step in steps:
        if begins:
            reached = False
            ahead.begin()
        reached = True
        if step is None:
            ahead.forget()
            assert all(event.is_set() for event in events)
            touched.clear()
            continue
        for row in range(min(step, num_rows)):
            assert not row or row in touched
            ahead.reach(row)
            assert touched >= set(range(min(num_rows, row + 1 + span // 2 + 1)))
            assert len(touched) == max(touched) + 1
            assert max(touched) <= max(row + 2 * span, before)
        before = max(touched, default=0)
