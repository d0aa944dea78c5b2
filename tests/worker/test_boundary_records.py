"""A worker's records in the boundary store: when they are written, renewed and removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from worker.engines import EngineInfo
from worker.errors import BoundaryStoreUnavailable, InvalidRequest, PoisonRequest
from worker.migration import boundary_record, record_store
from worker.migration.boundary import Boundary
from worker.migration.records import BoundaryRecords
from worker.migration.store import StoreError
from worker.requests.request import GenerationRequest, RequestLimits, parse_request

LIMITS = RequestLimits(context_length=64, vocab_size=8, eos_token_ids=(2,))


class Memory:
    """A store whose puts wait for ``free``, and that fails or hangs while told so."""

    address = "memory"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_puts = 0
        self.free = asyncio.Event()
        self.free.set()
        self.changed = asyncio.Condition()
        self.fails = False
        self.hangs = False

    async def open(self) -> None:
        pass

    async def get(self, key: str) -> bytes | None:
        await self._answer()
        return self.values.get(key)

    async def put(self, key: str, value: bytes) -> None:
        await self._answer()
        await self.free.wait()
        self.values[key] = value
        self.num_puts += 1
        async with self.changed:
            self.changed.notify_all()

    async def delete(self, key: str) -> None:
        await self._answer()
        self.values.pop(key, None)
        async with self.changed:
            self.changed.notify_all()

    async def close(self) -> None:
        pass

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise StoreError("memory: is gone")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    @property
    def attempts(self) -> list[int]:
        return [Boundary.decode(value).attempts for value in self.values.values()]


@pytest.fixture(autouse=True)
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records go away soon."""
    monkeypatch.setattr(boundary_record, "EXPIRY_S", 0.05)


def request(*token_ids: int, max_tokens: int = 9) -> GenerationRequest:
    return parse_request({"token_ids": list(token_ids), "stop_conditions": {"max_tokens": max_tokens}}, LIMITS)


def worker(store: Memory, pool: str = "pool", ttl_s: float = 300.0) -> BoundaryRecords:
    return BoundaryRecords(store, pool, ttl_s)


async def written(
    records: BoundaryRecords, request_id: str, asked: GenerationRequest, seed: int = 7
) -> boundary_record.BoundaryRecord:
    """The record of a request that begins, once the store has it."""
    record = await records.begin(request_id, asked)
    record.write(seed)
    await record.wait_written()
    return record


async def test_only_the_first_token_waits_for_the_record() -> None:
    store = Memory()
    records = worker(store)
    store.free.clear()
    record = await records.begin("a", request(1, 2))
    record.write(7)
    waits = asyncio.create_task(record.wait_written())
    await asyncio.sleep(0)
    assert not waits.done()
    store.free.set()
    await waits
    assert store.attempts == [1]
    record.settle()
    await store.until(lambda: not store.values)
    await records.close()


async def test_a_dead_worker_leaves_its_record_and_two_end_the_request() -> None:
    store = Memory()
    for attempt in (1, 2):
        record = await worker(store).begin("a", request(1, 2))
        record.write(7)
        await record.wait_written()
        assert store.attempts == [attempt]
    with pytest.raises(PoisonRequest, match="in flight in 2 workers that died"):
        await worker(store).begin("a", request(1, 2))
    with pytest.raises(PoisonRequest, match="in flight in 2 workers that died"):
        await worker(store).begin("a", request(1, 2, 3, 4, max_tokens=7))
    await written(worker(store), "a", request(1, 3), seed=8)
    assert store.attempts == [1]
    assert (await worker(store, "another pool").begin("a", request(1, 3))).request.params.seed is None


async def test_a_drawn_seed_survives_also_before_the_first_token() -> None:
    store = Memory()
    await written(worker(store), "a", request(1, 2))
    assert (await worker(store).begin("a", request(1, 2))).request.params.seed == 7
    moved = (await worker(store).begin("a", request(1, 2, 5, max_tokens=8))).request
    assert (moved.params.seed, moved.params.max_tokens, moved.generated_token_ids) == (7, 9, [5])


async def test_a_repeated_request_keeps_its_own_seed() -> None:
    """A client that gives several requests one id, and each a seed."""
    store = Memory()
    await written(worker(store), "a", request(1, 2), seed=9)
    asked = request(1, 2)
    asked = replace(asked, params=replace(asked.params, seed=5))
    assert (await worker(store).begin("a", asked)).request.params.seed == 5
    assert (await worker(store).begin("a", request(1, 2))).request.params.seed == 9


async def test_a_request_to_an_adapter_has_a_record_of_its_own() -> None:
    store = Memory()
    await written(worker(store), "a", request(1, 2))
    asked = replace(request(1, 2, 3, max_tokens=8), lora_name="x")
    assert (await worker(store).begin("a", asked)).request.generated_token_ids == []
    assert (await worker(store).begin("a", replace(asked, lora_name=None))).request.generated_token_ids == [3]


async def test_answers_do_not_continue_in_workers_of_other_numerics() -> None:
    store = Memory()
    info = EngineInfo("embedded", "0", 64, 8, (2,), 4, 10, 4, 64, made_by="exact, native kernels", kv_dtype="bfloat16")
    first, alike, other = worker(store), worker(store), worker(store)
    for records, changes in ((first, {}), (alike, {}), (other, {"kv_dtype": "int8 of bfloat16"})):
        records.computes(replace(info, **changes))  # type: ignore[arg-type]
    await written(first, "a", request(1, 2))
    moved = request(1, 2, 5, max_tokens=8)
    with pytest.raises(InvalidRequest, match=r"request id: its answer cannot go on here: kv_dtype is 'bfloat16' on"):
        await other.begin("a", moved)
    assert (await alike.begin("a", moved)).request.generated_token_ids == [5]
    assert (await other.begin("a", request(1, 2))).request.params.seed == 7  # nothing was generated yet
    assert store.attempts == [1]


async def test_answers_do_not_continue_on_other_weights() -> None:
    store, weights = Memory(), {"first": "", "other": ""}
    info = EngineInfo("embedded", "0", 64, 8, (2,), 4, 10, 4, 64)
    first, other = worker(store), worker(store)
    first.computes(info, lambda: weights["first"])
    other.computes(info, lambda: weights["other"])
    record = await first.begin("a", request(1, 2))
    record.write(7)
    record.sampled_from("")
    await record.wait_written()
    assert store.num_puts == 1  # it says so already
    moved = request(1, 2, 5, max_tokens=8)
    assert (await other.begin("a", moved)).request.generated_token_ids == [5]
    weights["first"] = "5f2a"  # an update with keep: the answer goes on with new weights
    record.sampled_from("5f2a")
    await record.wait_written()
    with pytest.raises(
        InvalidRequest, match=r"cannot go on here: weights is '5f2a' on the worker that began .* and ''"
    ):
        await other.begin("a", moved)
    weights["other"] = "5f2a"
    assert (await other.begin("a", moved)).request.generated_token_ids == [5]
    assert (await other.begin("a", request(1, 2))).request.params.seed == 7  # nothing was generated yet
    await first.close()


async def test_a_late_renewal_brings_no_older_weights_back() -> None:
    """The renewal has looked at the store before the weights changed, and writes when they have."""

    class Late(Memory):
        late: asyncio.Event | None = None

        async def get(self, key: str) -> bytes | None:
            found, late, self.late = await super().get(key), self.late, None
            if late is not None:
                await late.wait()
            return found

    store = Late()
    records = worker(store)
    record = await written(records, "a", request(1, 2))
    late = store.late = asyncio.Event()
    renewal = asyncio.create_task(record.renew())
    while store.late is not None:
        await asyncio.sleep(0)
    record.sampled_from("5f2a")
    waits = asyncio.create_task(record.wait_written())
    for _ in range(20):
        await asyncio.sleep(0)
    late.set()
    await asyncio.gather(renewal, waits)
    assert [Boundary.decode(value).weights for value in store.values.values()] == ["5f2a"]
    await records.close()


async def test_answers_do_not_continue_in_another_model() -> None:
    """A worker that was started again under the same name may have loaded another checkpoint."""
    store, weights = Memory(), {"updated": ""}
    info = EngineInfo("embedded", "0", 64, 8, (2,), 4, 10, 4, 64)
    first, alike, other, untold = (worker(store) for _ in range(4))
    for records, model in ((first, "5f2a"), (alike, "5f2a"), (other, "80c1"), (untold, "")):
        records.computes(info, lambda: weights["updated"], model)
    record = await written(first, "a", request(1, 2))
    moved = request(1, 2, 5, max_tokens=8)
    with pytest.raises(InvalidRequest, match=r"cannot go on here: model is '5f2a' on the worker that .* and '80c1' on"):
        await other.begin("a", moved)
    for records in (alike, untold):
        assert (await records.begin("a", moved)).request.generated_token_ids == [5]
    assert (await other.begin("a", request(1, 2))).request.params.seed == 7  # nothing was generated yet
    await written(untold, "of a worker without one", request(1, 2))
    assert (await other.begin("of a worker without one", moved)).request.generated_token_ids == [5]
    weights["updated"] = "77d0"  # all weights are updated ones, whatever was loaded
    record.sampled_from("77d0")
    await record.wait_written()
    assert (await other.begin("a", moved)).request.generated_token_ids == [5]
    await first.close()


async def test_who_migrates_in_order_is_not_counted() -> None:
    store = Memory()
    for _ in range(5):
        record = await worker(store).begin("a", request(1, 2))
        record.write(7)
        await record.wait_written()
        await record.release()
        assert store.attempts == [0]
    broken = await written(worker(store), "a", request(1, 2))
    broken.drop()
    await broken.release()
    assert store.attempts == [1]


async def test_what_is_still_being_written_is_waited_for() -> None:
    """A request that leaves before its record is there would count as one that died, or go on."""
    store = Memory()
    for settles in (False, True):
        records = worker(store)
        record = await records.begin("a", request(1, 2))
        store.free.clear()
        record.write(7)
        for _ in range(10):
            await asyncio.sleep(0)
        if settles:
            record.settle()
        leaving = asyncio.create_task(record.release())
        for _ in range(10):
            await asyncio.sleep(0)
        store.free.set()
        await leaving
        if settles:
            await store.until(lambda: Boundary.decode(*store.values.values()).is_answered)
        else:
            assert store.attempts == [0]
        await records.close()


async def test_a_cancelled_request_goes_away_a_little_later() -> None:
    store = Memory()
    records = worker(store)
    record = await written(records, "a", request(1, 2))
    record.expire()
    await store.until(lambda: store.attempts == [0])
    await store.until(lambda: not store.values)
    await records.close()


@pytest.mark.parametrize("is_left", [False, True])
async def test_an_ended_answer_can_continue_soon_and_is_not_repeated(is_left: bool) -> None:
    store = Memory()
    records = worker(store)
    record = await written(records, "a", request(1, 2))
    record.settle()
    if is_left:
        record.expire()  # its stream is closed behind the end
    await store.until(lambda: all(Boundary.decode(value).is_answered for value in store.values.values()))
    again = await worker(store).begin("a", request(1, 2, 3, max_tokens=8))
    assert again.request.generated_token_ids == [3]
    assert again.request.params.seed == 7
    other = await worker(store).begin("a", request(1, 2))  # a client that gives all its requests one id
    assert other.request.params.seed is None
    await store.until(lambda: not store.values)
    await records.close()


async def test_what_another_worker_has_taken_over_is_left_alone() -> None:
    store = Memory()
    slow, fast = worker(store), worker(store)
    first = await written(slow, "a", request(1, 2))
    second = await written(fast, "a", request(1, 2, 5, max_tokens=8))
    await first.release()
    assert store.attempts == [2]
    second.settle()
    await store.until(lambda: not store.values)
    await fast.close()


@pytest.mark.parametrize("closes", [False, True])
async def test_a_resumed_worker_does_not_take_over_a_cancelled_request(closes: bool) -> None:
    """The frontend gave the request to another worker; the first one takes it in later, and hears
    that it was cancelled.
    """
    store = Memory()
    stopped, serving, last = worker(store), worker(store), worker(store)
    await written(serving, "r", request(1, 3), seed=5)
    before = dict(store.values)
    late = await written(stopped, "r", request(1, 3), seed=5)
    assert store.values != before
    late.expire()
    if closes:
        await stopped.close()
    else:
        await store.until(lambda: store.values == before)
    assert store.values == before
    again = await last.begin("r", request(1, 3, 4, 5, max_tokens=7))  # the one that served it has died
    assert again.request.prompt_token_ids == [1, 3]
    assert again.request.generated_token_ids == [4, 5]


async def test_records_of_requests_in_flight_are_written_again() -> None:
    store = Memory()
    records = worker(store, ttl_s=0.03)
    await records.open()
    record = await records.begin("a", request(1, 2))
    record.write(7)
    await store.until(lambda: store.num_puts >= 3)
    record.settle()
    await store.until(lambda: not store.values)
    await records.close()


async def test_records_are_renewed_in_time_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before, waits, sleep = asyncio.all_tasks(), list[float](), asyncio.sleep

    async def waiting(seconds: float) -> None:
        waits.append(seconds)
        await sleep(3600)

    monkeypatch.setattr(asyncio, "sleep", waiting)
    records = worker(Memory(), ttl_s=300.0)
    await records.open()
    await sleep(0)
    assert all(2 * seconds < 300 for seconds in waits)  # one may fail
    await records.close()
    assert waits
    assert asyncio.all_tasks() == before


async def test_what_another_worker_has_taken_over_is_not_renewed() -> None:
    """A worker was stopped, and its request moved: it goes on at its renewals, and hears later that
    the request was cancelled.
    """
    store = Memory()
    stopped, serving, last = worker(store), worker(store), worker(store)
    first = await written(stopped, "a", request(1, 2))
    second = await written(serving, "a", request(1, 2, 5, max_tokens=8))
    before = dict(store.values)
    await first.renew()
    first.sampled_from("5f2a")
    await first.wait_written()
    assert store.values == before
    first.expire()
    await stopped.close()
    await second.release()
    again = await last.begin("a", request(1, 2, 5, 6, max_tokens=7))
    assert again.request.generated_token_ids == [5, 6]


async def test_a_record_that_could_not_replace_another_is_missed() -> None:
    """Also where the weights have changed meanwhile, and the record is written again."""
    store = Memory()
    await written(worker(store), "a", request(1, 2))
    second = await worker(store).begin("a", request(1, 2, 5, max_tokens=8))
    store.fails = True
    second.write(7)
    await asyncio.sleep(0.01)
    store.fails = False
    second.sampled_from("5f2a")
    with pytest.raises(BoundaryStoreUnavailable, match="memory: is gone"):
        await second.wait_written()


async def test_a_record_that_the_store_has_lost_is_written_anew() -> None:
    store = Memory()
    records = worker(store)
    record = await written(records, "a", request(1, 2))
    before = dict(store.values)
    for lost in ({}, dict.fromkeys(before, b"damaged")):
        store.values = lost
        await record.renew()
        assert store.values == before
    await records.close()


async def test_close_removes_what_has_ended() -> None:
    store = Memory()
    records = worker(store)
    for number, name in enumerate("abc"):
        record = await records.begin(name, request(1, 2))
        record.write(7)
        await record.wait_written()
        if number:
            record.expire()
    await records.close()
    assert len(store.values) == 1


async def test_a_worker_that_was_stopped_waits_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out was over before anybody saw that the store had answered."""
    monkeypatch.setattr(record_store, "TIMEOUT_S", 0.4)

    class Slow(Memory):
        async def get(self, key: str) -> bytes | None:
            await asyncio.to_thread(time.sleep, 0.1)
            return await super().get(key)

    reading = asyncio.create_task(record_store.RecordStore(Slow()).read("a"))
    await asyncio.sleep(0.05)
    time.sleep(0.6)
    assert await reading is None


async def test_requests_are_refused_while_the_store_fails_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "TIMEOUT_S", 0.02)
    store = Memory()
    records = worker(store)
    store.fails = True
    with pytest.raises(BoundaryStoreUnavailable, match="the boundary store memory: is gone"):
        await records.begin("a", request(1, 2))
    store.fails, store.hangs = False, True
    with pytest.raises(BoundaryStoreUnavailable, match=r"store memory: does not answer within 0.02 s"):
        await records.begin("a", request(1, 2))
    store.hangs = False
    record = await records.begin("a", request(1, 2))
    store.fails = True
    record.write(7)
    with pytest.raises(BoundaryStoreUnavailable, match="is gone"):
        await record.wait_written()
    record.settle()
    while records._live:  # although the store fails
        await asyncio.sleep(0)
    store.fails = False
    assert records.num_failures >= 3
    await records.close()


async def test_a_store_that_hangs_is_told_once_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was begun there would be carried out when nobody waits for it any more."""
    monkeypatch.setattr(record_store, "TIMEOUT_S", 0.02)
    before, store = asyncio.all_tasks(), Memory()
    records = record_store.RecordStore(store)
    store.hangs = True
    for _ in range(3):
        with pytest.raises(BoundaryStoreUnavailable, match="does not answer"):
            await records.read("a")
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    store.hangs = False
    await records.read("a")
    assert [entry.levelname for entry in caplog.records] == ["ERROR", "WARNING"]


@pytest.mark.parametrize("data", [b"", b"no record", b'{"version":1}', b"\xff"])
async def test_a_damaged_record_refuses_its_request_and_no_other(data: bytes) -> None:
    """Taken for a new request, a continuation would have its answer in its prompt."""
    store = Memory()
    records = BoundaryRecords(store, "pool")
    store.values[records.key_of("damaged")] = data
    with pytest.raises(BoundaryStoreUnavailable, match="memory: a record cannot be read"):
        await records.begin("damaged", request(1, 3, 4))
    assert records.num_failures == 1
    record = await written(records, "other", request(1, 3, 4))
    record.drop()
    await records.close()
