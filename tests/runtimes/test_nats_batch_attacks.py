"""Batches on a hostile day: malformed messages, queues that vanish, limits that change, altered
results. Every line gets exactly one result, and no slot is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, StreamConfig
from nats.js.errors import ServiceUnavailableError
from nats_workers import connected, running
from ports import free_port
from raw_nats import RawNats
from servers import NatsServer
from test_nats_batch import completed, connection, emptied, line, mixed_lines
from test_nats_faults import probe

from worker.engines.weights import ChangesWeights
from worker.errors import ConfigurationError
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.batch.command import main
from worker.runtimes.nats.batch.layout import QueuedRequest
from worker.runtimes.nats.batch.loops import Loops
from worker.runtimes.nats.batch.patience import PatientServer
from worker.runtimes.nats.batch.store import BatchStore, DamagedResults, UnknownBatch
from worker.runtimes.nats.connection import ConnectionOptions, connect
from worker.runtimes.nats.protocol import Subjects
from worker.runtimes.nats.runtime import NatsWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK = ("--batch", "--batch-ack-wait-s", "1.5", "--max-num-seqs", "4")
GOOD: dict[str, Any] = {
    "batch": "bad",
    "index": 0,
    "custom_id": "a",
    "url": "/v1/completions",
    "body": {"prompt": [9], "max_tokens": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path_factory.mktemp("nats"))
    made.start()
    yield made
    made.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: NatsServer) -> AsyncIterator[Client]:
    made = await connect(ConnectionOptions(url=server.url), "test")
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(server: NatsServer, tiny_model: Path) -> AsyncIterator[NatsWorker]:
    async with running(tiny_model, server.url, "attacked", *QUICK) as made:
        yield made


def subject(model: str, batch: str = "bad") -> str:
    return layout.queue_subject(Subjects(model, "1"), "normal", batch)


def stream(model: str) -> str:
    return layout.stream_name(Subjects(model, "1"), "normal")


async def reasons(client: Client, stream: str) -> list[str]:
    """Reasons of the dead letters that come from a stream, in their order."""
    js, found = client.jetstream(), []
    for sequence in range(1, (await js.stream_info(layout.DEAD_LETTERS)).state.last_seq + 1):
        headers = (await js.get_msg(layout.DEAD_LETTERS, sequence)).headers or {}
        if headers["Nats-Msg-Id"].startswith(f"{stream}/"):
            found.append(headers["Dlw-Reason"])
    return found


async def read_into(found: list[dict[str, Any]], store: BatchStore, batch: str) -> None:
    async for each in store.results(batch):
        found.append(each)


async def fill(client: Client) -> None:
    """Fill a server's disk to the last byte. Raises what it says when there is no more room."""
    for size in (4096, 256):
        with contextlib.suppress(ServiceUnavailableError):
            while True:
                await client.jetstream().publish("fill", b"x" * size)
    while True:
        await client.jetstream().publish("fill", b"x")


def written(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


MALFORMED: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"no request", "the message is not JSON"),
    "empty": (b"", "the message is not JSON"),
    "a list": (b"[1]", "must be a JSON object"),
    "20,000 brackets": (b"[" * 20_000, "nested too deep"),
    "a deep body": (written(body={"a": json.loads("[" * 500 + "]" * 500)}), "nested more than 128 deep"),
    "not UTF-8": (b'{"batch": "\xff"}', "the message is not JSON"),
    "no custom_id": (written(custom_id=None), "custom_id must be a text of 1 to 512 characters, got None"),
    "half a surrogate pair": (written(custom_id="\ud800"), "half of a surrogate pair in custom_id"),
    "half a surrogate pair in a body": (written(body={"prompt": "\udfff"}), "half of a surrogate pair in body.prompt"),
    "a long custom_id": (written(custom_id="a" * 513), "custom_id must be"),
    "another batch": (written(batch="another"), "batch is 'another', and the subject is"),
    "no name of a batch": (written(batch="a b/c"), "batch must be a text that matches"),
    "no batch": (json.dumps({"index": 0}).encode(), "the message has no batch"),
    "a negative index": (written(index=-1), "index must be an integer of at least 0"),
    "an index that is none": (written(index=True), "index must be an integer"),
    "a deadline that is none": (written(deadline_s="soon"), "deadline_s must be a number of seconds"),
    "no number": (written().replace(b'"index": 0', b'"index": NaN'), "NaN is not JSON"),
    "a key twice": (b'{"batch": "a", "batch": "b"}', "ambiguous"),
    "an unknown field": (written(reply="$JS.API.STREAM.DELETE.x"), "unknown field 'reply'"),
    "no digest": (written(body=None, body_digest="x" * 5000), "body_digest must be 32 hexadecimal digits"),
    "two bodies": (written(body_digest="0" * 32), "both body and body_digest"),
    "a list as a name": (written(custom_id=["a"]), "custom_id must be"),
}


async def test_what_cannot_be_begun_is_set_aside_and_batches_go_on(
    server: NatsServer, client: Client, tiny_model: Path
) -> None:
    port = free_port()
    async with running(tiny_model, server.url, "bad", *QUICK, "--metrics-port", str(port)):
        for data, _ in MALFORMED.values():
            await client.jetstream().publish(subject("bad"), data)
        results = await completed(BatchStore(client), (await BatchStore(client).submit(mixed_lines(3), "bad")).id)
        await emptied(client, stream("bad"))
        assert await asyncio.to_thread(probe, port, "/health") == (200, "ok\n")
    assert [each["custom_id"] for each in results] == ["text-0", "chat 1", "text-2"]
    found = await reasons(client, stream("bad"))
    assert len(found) == len(MALFORMED)
    for name, (_, reason) in MALFORMED.items():
        assert any(reason in each for each in found), (name, found)


async def test_a_request_for_another_endpoint_is_a_400(client: Client, worker: NatsWorker) -> None:
    record = await BatchStore(client).submit([line("a", prompt=[9], max_tokens=1)], "attacked")
    await client.jetstream().publish(
        subject("attacked", record.id), written(batch=record.id, custom_id="b", index=1, url="/v1/embeddings")
    )
    while len(results := [each async for each in BatchStore(client).results(record.id)]) < 2:
        await asyncio.sleep(0.02)
    assert results[1]["response"]["status_code"] == 400
    assert results[1]["response"]["body"]["error"]["param"] == "url"


async def test_headers_of_a_request_are_no_status_of_the_server(
    server: NatsServer, client: Client, worker: NatsWorker
) -> None:
    """The client library takes them for one, and loses what came with the message."""
    store = BatchStore(client)
    async with RawNats(server.port) as raw:
        for status in (b"NATS/1.0 503\r\n\r\n", b"NATS/1.0\r\nStatus: 404\r\n\r\n", b"NATS/1.0 \xff\xff\xff\r\n\r\n"):
            target = subject("attacked", "status").encode()
            raw.publish(target, data=written(batch="status", custom_id=f"s{status[9]}"), headers=status)
        await raw.flushed()
    record = await store.submit(mixed_lines(8), "attacked")
    assert len(await completed(store, record.id)) == 8
    await emptied(client, stream("attacked"))
    bucket = await client.jetstream().key_value(layout.results_bucket("status"))
    assert (await bucket.status()).values == 3


@pytest.mark.parametrize("how", ["raises", "ends"])
async def test_a_failed_loop_fails_the_health_check_and_restarts(
    server: NatsServer, client: Client, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    port = free_port()
    model = f"loop-{how}"
    async with running(tiny_model, server.url, model, *QUICK, "--metrics-port", str(port)) as worker:
        batches = worker._batches
        assert batches is not None
        with monkeypatch.context() as patched:
            patched.setattr(batches, "_fetch", lambda: 1 // 0)
            if how == "ends":
                batches._loops._tasks["fetch"].cancel()
            while (found := await asyncio.to_thread(probe, port, "/health"))[0] == 200:
                await asyncio.sleep(0.01)
            assert "batches: cannot fetch" in found[1]
            assert (await asyncio.to_thread(probe, port, "/live"))[0] == 200
        record = await BatchStore(client).submit(mixed_lines(3), model)
        assert len(await completed(BatchStore(client), record.id)) == 3
        assert await asyncio.to_thread(probe, port, "/health") == (200, "ok\n")


async def test_failures_of_nats_show_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    loops, failing = Loops(), True

    async def step() -> None:
        await asyncio.sleep(0)
        if failing:
            raise TimeoutError("away")

    loops.begin("try", step)
    await asyncio.sleep(0.02)
    assert loops.problem is None
    now = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr("worker.runtimes.nats.batch.loops.time.monotonic", lambda: now + 10)
        assert loops.problem == "batches: cannot try: away"
    failing = False
    while loops._failing:
        await asyncio.sleep(0.01)
    loops.stop()


async def test_a_recreated_stream_is_served_without_a_restart(
    server: NatsServer, client: Client, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtimes.nats.batch.consumer.RENEW_S", 0.1)
    store, js = BatchStore(client), client.jetstream()
    async with running(tiny_model, server.url, "deleted", *QUICK) as worker:
        for _ in range(2):
            assert len(await completed(store, (await store.submit(mixed_lines(3), "deleted")).id)) == 3
            await js.delete_stream(stream("deleted"))
        await js.delete_stream(layout.DEAD_LETTERS)
        record = await store.submit(mixed_lines(2), "deleted")
        await js.publish(subject("deleted"), b"no request")
        assert len(await completed(store, record.id)) == 2
        await emptied(client, stream("deleted"))
        await js.delete_consumer(stream("deleted"), layout.CONSUMER)
        assert len(await completed(store, (await store.submit(mixed_lines(3), "deleted")).id)) == 3
        assert worker._batches is not None
        assert worker._batches.problem is None
    assert len(await reasons(client, stream("deleted"))) == 1


async def test_results_deleted_while_a_batch_runs_are_written_anew(client: Client, worker: NatsWorker) -> None:
    store, js = BatchStore(client), client.jetstream()
    record = await store.submit(mixed_lines(2), "attacked")
    assert len(await completed(store, record.id)) == 2
    await js.delete_key_value(layout.results_bucket(record.id))
    with pytest.raises(ConfigurationError, match="were deleted"):
        await store.status(record.id)
    await js.publish(subject("attacked", record.id), written(batch=record.id, custom_id="late", index=0))
    while True:
        try:
            if (await store.status(record.id)).num_answered == 1:
                break
        except ConfigurationError:
            await asyncio.sleep(0.02)


async def test_limits_that_change(server: NatsServer, client: Client, tiny_model: Path) -> None:
    """The worker's own are those of the consumer; an operator's on the stream stay."""
    js = client.jetstream()
    async with running(tiny_model, server.url, "limits", "--batch", "--batch-ack-wait-s", "60"):
        pass
    config = (await js.stream_info(stream("limits"))).config
    config.max_bytes = 10_000_000
    await js.update_stream(config)
    async with running(tiny_model, server.url, "limits", *QUICK) as worker:
        assert (await js.consumer_info(stream("limits"), layout.CONSUMER)).config.ack_wait == 1.5
        assert (await js.stream_info(stream("limits"))).config.max_bytes == 10_000_000
        record = await BatchStore(client).submit(mixed_lines(3), "limits")
        assert len(await completed(BatchStore(client), record.id)) == 3
        await js.add_consumer(
            stream("limits"), ConsumerConfig(name=layout.CONSUMER, durable_name=layout.CONSUMER, ack_wait=0.5)
        )
        assert worker._batches is not None
        while worker._batches._queues[1].ack_wait_s != 0.5:
            await asyncio.sleep(0.02)


async def test_a_stream_of_another_kind_is_said_at_the_start(
    server: NatsServer, client: Client, tiny_model: Path
) -> None:
    await client.jetstream().add_stream(StreamConfig(name=stream("other-kind"), subjects=[subject("other-kind", "*")]))
    with pytest.raises(ConfigurationError, match="the stream DLW_BATCH_other-kind-1_normal must be a work queue"):
        async with running(tiny_model, server.url, "other-kind", *QUICK):
            pass


async def test_a_server_with_small_messages(tmp_path: Path, tiny_model: Path) -> None:
    small = NatsServer(tmp_path / "server", config="max_payload: 16KB\n")
    small.start()
    try:
        async with connection(small) as client, running(tiny_model, small.url, "small", *QUICK):
            store = BatchStore(client)
            lines = [
                line("large in", prompt=[9], max_tokens=1, user="u" * 100_000),
                line("large out", prompt=[9], max_tokens=200, ignore_eos=True, logprobs=5),
            ]
            record = await store.submit(lines, "small")
            results = await completed(store, record.id)
            await client.jetstream().publish(subject("small"), b"x" * 16_000)
            await emptied(client, stream("small"))
            assert len(await reasons(client, stream("small"))) == 1
    finally:
        small.kill()
    assert [each["response"]["status_code"] for each in results] == [200, 200]
    assert len(json.dumps(results[1])) > 16_384


async def test_results_that_are_missing_or_altered_are_named(
    client: Client, worker: NatsWorker, server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, js = BatchStore(client), client.jetstream()
    lines = [line(f"id {index}", prompt=[9, 30 + index], max_tokens=2) for index in range(6)]
    record = await store.submit(lines, "attacked")
    whole = await completed(store, record.id)
    bucket = await js.key_value(layout.results_bucket(record.id))
    keys = [layout.result_key(f"id {index}") for index in range(6)]
    await bucket.delete(keys[0])
    for key, value in zip(keys[1:5], (b"no JSON", b"[]", b'{"object": "gone"}', b""), strict=True):
        await bucket.put(key, value)
    found: list[dict[str, Any]] = []
    with pytest.raises(DamagedResults) as raised:
        await read_into(found, store, record.id)
    assert found == whole[5:]
    assert raised.value.problems == {
        "'id 0'": "was deleted",
        "'id 1'": "was altered",
        "'id 2'": "was altered",
        "'id 3'": "is not in the object store any more",
        "'id 4'": "was altered",
    }
    swapped = (await bucket.get(keys[5])).value
    assert swapped is not None
    await bucket.put(keys[4], swapped)  # another request's
    out = tmp_path / "out"
    command = ["results", record.id, "-o", str(out), "--nats-url", server.url]
    assert await asyncio.to_thread(main, command) == 2
    assert "'id 0' was deleted; 'id 1' was altered" in capsys.readouterr().err
    assert [json.loads(each) for each in out.read_text().splitlines()] == whole[5:]


async def test_results_that_vanished_are_named(client: Client, worker: NatsWorker) -> None:
    store, js = BatchStore(client), client.jetstream()
    record = await store.submit(mixed_lines(4), "attacked")
    await completed(store, record.id)
    await emptied(client, stream("attacked"))
    bucket = layout.results_bucket(record.id)
    await js.purge_stream(f"KV_{bucket}", subject=f"$KV.{bucket}.text-2")
    with pytest.raises(DamagedResults, match="request 3 has no result, and is queued no more"):
        _ = [each async for each in store.results(record.id)]


async def test_records_that_are_altered_and_ids_that_are_taken(client: Client, worker: NatsWorker) -> None:
    store = BatchStore(client)
    record = await store.submit(mixed_lines(2), "attacked")
    await completed(store, record.id)
    with pytest.raises(ConfigurationError, match="was submitted with priority 'normal', not 'low'"):
        await store.submit(mixed_lines(2), "attacked", priority="low", batch=record.id)
    await store.cancel(record.id)
    with pytest.raises(ConfigurationError, match="was cancelled"):
        await store.submit(mixed_lines(2), "attacked", batch=record.id)
    with pytest.raises(ConfigurationError, match="the deadline must be a number"):
        await store.submit(mixed_lines(1), "attacked", deadline_s=float("nan"))
    with pytest.raises(UnknownBatch):
        await store.record("a batch/that is none")
    records = await client.jetstream().key_value(layout.BATCHES)
    for value in (b"", b"[]", b"{}", written(), json.dumps({"id": record.id, "model": 3}).encode()):
        await records.put(record.id, value)
        with pytest.raises(ConfigurationError, match=f"the record of {record.id} was altered"):
            await store.status(record.id)


async def test_the_same_id_twice_has_one_result_that_is_no_error(client: Client, worker: NatsWorker) -> None:
    """Two bodies under one id, at once: `dlw-batch` refuses them in one file, not in two."""
    store, js = BatchStore(client), client.jetstream()
    record = await store.submit([line("a", prompt=[9], max_tokens=300, ignore_eos=True)], "attacked")
    for tokens in (200, 100, 1):
        body = {"prompt": [9], "max_tokens": tokens, "ignore_eos": True}
        await js.publish(subject("attacked", record.id), written(batch=record.id, body=body))
    await emptied(client, stream("attacked"))
    (result,) = [each async for each in store.results(record.id)]
    assert result["response"]["status_code"] == 200
    assert (await (await js.key_value(layout.results_bucket(record.id))).status()).values == 1


async def test_a_client_cannot_take_the_id_of_a_batchs_request(
    server: NatsServer, client: Client, worker: NatsWorker
) -> None:
    long = {"token_ids": [9], "stop_conditions": {"max_tokens": 1900, "ignore_eos": True}}
    async with await connected(server.url, "attacked") as asking:
        guess = f"batch_taken-{layout.digest(b'a')}"
        held = asking.stream(request_id=guess, **long)  # type: ignore[arg-type]
        await anext(held)
        store = BatchStore(client)
        record = await store.submit([line("a", prompt=[9], max_tokens=2)], "attacked", batch="batch_taken")
        (result,) = await completed(store, record.id)
        await held.aclose()
    assert result["response"]["status_code"] == 200


async def test_results_that_have_no_room_hold_no_slot(
    server: NatsServer, client: Client, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket of one batch is full: others go on, and it is completed when it has room."""
    monkeypatch.setattr("worker.runtimes.nats.batch.patience.PATIENCE_S", 0.3)
    monkeypatch.setattr("worker.runtimes.nats.batch.answerer.FAILURE_DELAY_S", 0.3)
    js, store = client.jetstream(), BatchStore(client)
    full = await store.submit(mixed_lines(8), "full", batch="batch_full")
    config = (await js.stream_info("KV_dlw-results-batch_full")).config
    config.max_bytes = 100
    await js.update_stream(config)
    async with running(tiny_model, server.url, "full", *QUICK, "--batch-max-deliver", "2") as worker:
        other = await store.submit(mixed_lines(5), "full", priority="low")
        assert len(await completed(store, other.id)) == 5
        config.max_bytes = -1
        await js.update_stream(config)
        results = await completed(store, full.id)
        await emptied(client, stream("full"))
        assert worker._batches is not None
        while worker._batches._running:
            await asyncio.sleep(0.02)
    assert len({each["custom_id"] for each in results}) == 8


async def test_a_full_disk_stops_batches_and_loses_none(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream has no room at all: nothing is tried in vain, and all is answered once it has."""
    monkeypatch.setattr("worker.runtimes.nats.batch.patience.PATIENCE_S", 0.1)
    monkeypatch.setattr("worker.runtimes.nats.batch.patience.PASSES_S", 0.5)
    small = NatsServer(tmp_path / "server", config="jetstream { max_file_store: 1MB }\n")
    small.start()
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-nobody-knows\n")
    pausable = ("--engine-port", str(free_port()), "--engine-key-file", str(keys))
    lines = [line(f"l-{index}", prompt=[9, 30 + index], max_tokens=20, ignore_eos=True) for index in range(3)]
    try:
        async with (
            connection(small) as client,
            running(tiny_model, small.url, "disk", *QUICK, "--batch-max-deliver", "1", *pausable) as worker,
        ):
            store, js, batches = BatchStore(client), client.jetstream(), worker._batches
            assert batches is not None
            assert isinstance(worker.server.engine, ChangesWeights)
            weights = worker.server.engine.weights
            assert weights is not None
            await js.add_stream(StreamConfig(name="FILL", subjects=["fill"]))
            await weights.pause("keep")  # no answer comes before the disk is full
            record = await store.submit(lines, "disk")
            while len(batches._running) < 3:
                await asyncio.sleep(0.005)
            with pytest.raises(ServiceUnavailableError, match="insufficient resources"):
                await fill(client)
            await weights.resume()
            while worker.server.engine.num_unfinished():
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)  # many times the patience
            assert len(batches._running) == 3
            assert batches.problem is not None
            assert "insufficient resources" in batches.problem
            assert (await store.status(record.id)).num_answered == 0
            await js.purge_stream("FILL")
            results = await completed(store, record.id)
            await emptied(client, stream("disk"))
            assert batches.problem is None
            served = worker.server.metrics.registry.get_sample_value("dlw_requests_total", {"outcome": "length"})
    finally:
        small.kill()
    assert [each["response"]["status_code"] for each in results] == [200] * 3
    assert served == 3


async def test_retries_end_unless_the_server_fails_every_operation(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtimes.nats.batch.patience.PATIENCE_S", 0.02)
    monkeypatch.setattr("worker.runtimes.nats.batch.patience.RETRY_S", 0.01)
    storage, calls = PatientServer(client), 0

    async def fails() -> None:
        nonlocal calls
        calls += 1
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await storage.patiently(fails)
    assert calls > 1

    async def is_down() -> bool:
        return False

    monkeypatch.setattr(storage, "_does_other_things", is_down)
    waits = asyncio.create_task(storage.patiently(fails))
    before = calls
    while calls < before + 10:
        await asyncio.sleep(0.01)
    assert not waits.done()
    waits.cancel()


async def test_the_clock_is_set_back_and_forward(
    client: Client, worker: NatsWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, shift_s = time.time, [0.0]
    monkeypatch.setattr("worker.runtimes.nats.batch.answerer.time.time", lambda: real() + shift_s[0])
    store = BatchStore(client)
    for seconds in (-86_400.0, 0.0, 86_400.0):
        shift_s[0] = seconds
        record = await store.submit(mixed_lines(4), "attacked", deadline_s=real() + 3600)
        results = await completed(store, record.id)
        assert len(results) == 4
        assert {each["error"] is not None for each in results} == {seconds > 0}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_BODIES = st.fixed_dictionaries(
    {"prompt": st.just([9, 30]) | _JSON, "max_tokens": st.integers(1, 3) | _JSON},
    optional=dict.fromkeys(("stop", "n", "logprobs", "logit_bias", "seed", "logits_processors"), _JSON),
)
_MESSAGES = st.binary(max_size=20) | st.builds(
    written,
    batch=st.just("bad") | _JSON,
    index=st.integers(0, 9) | _JSON,
    custom_id=st.text(st.characters(codec=None), max_size=3) | _JSON,
    url=st.just("/v1/completions") | _JSON,
    body=_BODIES | _JSON,
    body_digest=st.just("") | st.just("0" * 32) | _JSON,
    deadline_s=st.none() | _JSON,
)


@given(messages=st.lists(_MESSAGES, min_size=1, max_size=12), number=st.integers(1, 6))
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_each_line_has_one_result_beside_any_messages(
    client: Client, worker: NatsWorker, messages: list[bytes], number: int
) -> None:
    assert worker._batches is not None
    store, js = BatchStore(client), client.jetstream()
    for data in messages:
        await js.publish(subject("attacked"), data)
    record = await store.submit(mixed_lines(number), "attacked")
    for data in messages:
        await js.publish(subject("attacked"), data)
    results = await completed(store, record.id)
    assert [each["custom_id"] for each in results] == [json.loads(each)["custom_id"] for each in mixed_lines(number)]
    await emptied(client, stream("attacked"))
    while worker._batches._running or worker._batches._asides:
        await asyncio.sleep(0.01)
    assert worker._batches.problem is None


@given(_MESSAGES)
@settings(max_examples=examples(500))
async def test_what_is_read_can_be_begun(data: bytes) -> None:
    try:
        request = QueuedRequest.from_bytes(data)
    except layout.Malformed as error:  # type: ignore[attr-defined]
        str(error).encode()
        return
    assert layout.custom_id_of(request.key) == request.custom_id
    assert len(f"$KV.{layout.results_bucket(request.batch)}.{request.key}") < 4096
    layout.digest(request.custom_id.encode())
    layout.request_digest(request.custom_id, request.url, request.body)
    assert QueuedRequest.from_bytes(request.as_bytes()) == request


@pytest.mark.campaign
@pytest.mark.timeout(1800)
async def test_5000_lines(own_server: NatsServer, tiny_model: Path) -> None:
    """With lines that are refused, malformed messages between them, and a reader of the results."""
    lines = mixed_lines(5000)
    async with (
        connection(own_server) as client,
        running(tiny_model, own_server.url, "many", "--batch", "--max-num-seqs", "64"),
        running(tiny_model, own_server.url, "many", "--batch", "--max-num-seqs", "16"),
    ):
        store = BatchStore(client)
        for data, _ in MALFORMED.values():
            await client.jetstream().publish(subject("many"), data)
        record = await store.submit(lines, "many")
        read = 0
        while (await store.status(record.id)).state != "completed":
            async for _ in store.results(record.id):
                read += 1
                await asyncio.sleep(0)
            await asyncio.sleep(2)
        results = [each async for each in store.results(record.id)]
        status = await store.status(record.id, count_failed=True)
        letters = await reasons(client, stream("many"))
    assert [each["custom_id"] for each in results] == [json.loads(each)["custom_id"] for each in lines]
    assert status.num_failed == 500
    assert len(letters) == len(MALFORMED)


@pytest.mark.parametrize("seconds", ["-5", "0", "nan", "soon"])
async def test_a_batch_that_has_no_time_is_a_mistake(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All its requests would have expired when they are queued."""
    with pytest.raises(SystemExit):
        main(["submit", "requests.jsonl", f"--deadline-s={seconds}"])
    problem = f"argument --deadline-s: must be a number of seconds above 0, got '{seconds}'"
    assert problem in capsys.readouterr().err
