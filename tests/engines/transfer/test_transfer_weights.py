"""KV of other weights is never read: refused where versions differ, else recomputed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from connector_doubles import Side, run
from kv_doubles import WIDTH, answer, recall_request

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.vocabulary import Vocabulary
from worker.engines.embedded.kv_cache import BlocksStored
from worker.engines.embedded.plan import Request
from worker.engines.weights import WeightVersion
from worker.errors import InvalidRequest

PROMPT = random.Random(3).choices(range(3, WIDTH), k=120)
NEW = WeightVersion(1, "1", "f00d")


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    both = [Side(lease_s=60.0), Side()]
    yield both
    for side in both:
        side.close()
        assert side.is_empty


def update(side: Side) -> None:
    """New weights, which compute the same: what counts is which KV is read."""
    side.stepper.change_weights(lambda: None, NEW)


def leased(sides: list[Side], name: str) -> None:
    sides[0].prefill(name, PROMPT)
    run(sides, lambda: sides[0].finished(name) is not None)


def test_workers_of_different_versions_refuse(sides: list[Side]) -> None:
    prefill, decode = sides
    leased(sides, "old")
    old = prefill.handle("old")
    update(decode)
    prefill.connector, mine = decode.connector, prefill.connector
    with pytest.raises(InvalidRequest, match=r"model is 'recall' on the prefill worker and 'f00d' on this decode"):
        prefill.handle("old")
    prefill.connector = mine
    decode.decode("late", PROMPT, old, 4)  # it was admitted before the update
    run(sides, lambda: decode.finished("late") is not None)
    assert decode.tokens("late") == answer(PROMPT, 4)
    assert decode.connector.counts == {"cancelled": 1, "dropped": 1}
    update(prefill)
    leased(sides, "new")
    decode.decode("new", PROMPT, prefill.handle("new"), 4)
    run(sides, lambda: decode.finished("new") is not None)
    assert decode.tokens("new") == answer(PROMPT, 4)
    run(sides, lambda: prefill.is_empty and decode.is_empty)


@pytest.mark.parametrize("num_steps", range(6))
def test_what_is_on_its_way_is_recomputed(sides: list[Side], num_steps: int) -> None:
    prefill, decode = sides
    leased(sides, "one")
    decode.decode("one", PROMPT, prefill.handle("one"), 6)
    for _ in range(num_steps):
        decode.step()
        prefill.step()
    received = decode.connector.counts["received"]
    update(decode)
    run(sides, lambda: decode.finished("one") is not None)
    assert decode.tokens("one") == answer(PROMPT, 6)
    assert decode.connector.counts["received"] == received, "KV of other weights was read"
    run(sides, lambda: prefill.is_empty and decode.is_empty)


def test_the_receipt_of_a_ready_request_says_it_is_recomputed() -> None:
    sides = [Side(lease_s=60.0), Side(max_num_seqs=1)]
    prefill, decode = sides
    leased(sides, "first")
    leased(sides, "second")
    decode.decode("first", PROMPT, prefill.handle("first"), 40)
    request = recall_request(decode.model, "second", PROMPT, 4)
    chain = request.chain = ProcessorChain([], Context(Vocabulary(WIDTH)))
    run(sides, lambda: bool(decode.tokens("first")))
    decode.connector.receive(request, prefill.handle("second"))
    run(sides, lambda: chain.receipt.mode == "disaggregated")  # it waits for the only slot
    update(decode)
    assert chain.receipt.mode == "local prefill"
    assert decode.connector.counts["dropped"] == 1
    assert request.queue_times is None  # it waits again
    decode.abort("first")
    decode.abort("second")
    run(sides, lambda: prefill.is_empty and decode.is_empty)
    for side in sides:
        side.close()


def waiting_for_a_slot() -> tuple[list[Side], Request]:
    """Two workers, and a request whose KV is at the second one, where another has the only slot."""
    sides = [Side(lease_s=60.0), Side(max_num_seqs=1)]
    prefill, decode = sides
    leased(sides, "first")
    other = PROMPT[::-1]
    prefill.prefill("second", other)
    run(sides, lambda: prefill.finished("second") is not None)
    decode.decode("first", PROMPT, prefill.handle("first"), 40)
    run(sides, lambda: bool(decode.tokens("first")))
    request = recall_request(decode.model, "second", other, 4)
    decode.connector.receive(request, prefill.handle("second"))
    run(sides, lambda: decode.connector.counts["received"] == 2)
    return sides, request


def test_waiting_for_a_slot_is_no_part_of_the_transfer() -> None:
    sides, request = waiting_for_a_slot()
    prefill, decode = sides
    ready_s = time.monotonic()
    run(sides, lambda: decode.finished("second") is not None)
    times = request.queue_times
    assert times is not None
    assert times.received_s is not None
    assert times.allocated_s < times.received_s <= ready_s < times.admitted_s
    run(sides, lambda: prefill.is_empty and decode.is_empty)
    for side in sides:
        side.close()


def test_no_time_is_negative_of_a_request_that_gets_no_slot() -> None:
    """It was admitted before its KV had been read, and its time in the queue was negative."""
    sides, request = waiting_for_a_slot()
    prefill, decode = sides
    decode.abort("second")
    times = request.queue_times
    assert times is not None
    assert times.received_s is not None
    assert times.allocated_s < times.received_s <= times.admitted_s
    decode.abort("first")
    run(sides, lambda: prefill.is_empty and decode.is_empty)
    for side in sides:
        side.close()


def test_a_request_that_ends_at_a_shut_gate_ends_its_lease(sides: list[Side]) -> None:
    prefill, decode = sides
    leased(sides, "one")
    decode.stepper.shut_gate()
    decode.stepper.add(recall_request(decode.model, "one", PROMPT, 4), prefill.handle("one"))
    ended = decode.stepper.abort("one")
    assert ended is not None
    assert ended.finish_reason == "cancelled"
    assert decode.connector.counts == {"cancelled": 1}
    run(sides, lambda: prefill.is_empty and decode.is_empty)


def test_none_is_drained_while_kv_is_on_its_way(sides: list[Side]) -> None:
    prefill, decode = sides
    leased(sides, "one")
    decode.stepper.add(recall_request(decode.model, "one", PROMPT, 4), prefill.handle("one"))
    decode.stepper.shut_gate()
    assert decode.stepper.scheduler.is_idle
    assert not decode.stepper.is_drained
    run(sides, lambda: decode.stepper.is_drained)
    assert decode.tokens("one") == answer(PROMPT, 4)
    assert decode.connector.counts["received"] == 1
    run(sides, lambda: prefill.is_empty and decode.is_empty)


def test_routers_hear_that_leased_blocks_of_old_weights_are_gone(sides: list[Side]) -> None:
    prefill = sides[0]
    cache, known = prefill.stepper.scheduler.cache, set[int]()
    cache.record_events()
    leased(sides, "one")
    for is_updated in (False, True):
        if is_updated:
            update(prefill)
        for event in cache.drain_events():
            hashes = set(event.block_hashes)
            known = known | hashes if isinstance(event, BlocksStored) else known - hashes
        assert bool(known) != is_updated
    assert prefill.connector.num_leased == 1
    prefill.connector._prefill.close()


def test_cached_blocks_of_old_weights_are_not_found(sides: list[Side]) -> None:
    prefill = sides[0]
    leased(sides, "first")
    update(prefill)
    leased(sides, "again")
    outputs = prefill.outputs
    assert outputs["first"][-1].num_cached_tokens == outputs["again"][-1].num_cached_tokens == 0
    leased(sides, "hit")
    assert outputs["hit"][-1].num_cached_tokens > 0
    prefill.connector._prefill.close()
