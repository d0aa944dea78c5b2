"""Faults under load, on one cluster: every answer is whole and right, and nothing is left behind.

`test_faults_campaign.py` has the long series, with bounds on time.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from checker import Reference, check_answers, check_ended
from cluster import ENGINE, PACED, Cluster, running_cluster
from e2e_stack import DYNAMO, Stack, running_stack, wait_for
from injectors import BadRequests, Disconnect, Drain, Kill, NeverReads, RollingRestart
from load_client import LoadClient, Record, prompt_of, streams, under_load

from adapters.client import logits_processors, processor

NUM_TOKENS = 100


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), tiny_model) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """With two workers, whatever the last test has left of them.

    The dead are forgotten first: a frontend of 1.4.2 that hears of a new worker tries them again.
    """
    shared.forget_dead()
    shared.start(2)
    return shared


@pytest.fixture
def chance() -> random.Random:
    return random.Random(15)


async def test_a_worker_is_killed(cluster: Cluster, reference: Reference, chance: random.Random) -> None:
    async with LoadClient(cluster.url) as client:
        asked = await streams(client, 64, NUM_TOKENS)
        await Kill(replaced=False).inject(cluster, client, chance)
        await asyncio.gather(*asked)
        calm = await asyncio.gather(*(client.ask(prompt_of(name), NUM_TOKENS) for name in range(64)))
    check_answers(client.records, reference)
    assert [record.text for record in client.records[:64]] == [record.text for record in calm]
    cluster.check_settled()


async def test_a_worker_is_killed_behind_the_kv_router(
    tmp_path: Path, tiny_model: Path, reference: Reference, chance: random.Random
) -> None:
    """The KV router of 1.4.2 still has a request booked when it moves, and so refuses to move it.

    Its stream ends with an error. What a drain leaves over goes on with both.
    """
    with running_cluster(tmp_path, tiny_model, router_mode="kv") as cluster:
        cluster.start(3)
        async with LoadClient(cluster.url) as client:
            asked = await streams(client, 16, NUM_TOKENS)
            await Drain(replaced=False, second_after_s=0.1).inject(cluster, client, chance)
            await asyncio.gather(*asked)
        check_answers(client.records, reference)
        async with LoadClient(cluster.url) as client:
            asked = await streams(client, 16, 4 * NUM_TOKENS)  # none has ended before the kill
            await Kill(replaced=False).inject(cluster, client, chance)
            await asyncio.gather(*asked)
        check_ended(client.records)
        lost = [record for record in client.records if record.errors]
        assert bool(lost) is (DYNAMO < (1, 6))
        check_answers([record for record in client.records if record not in lost], reference)
        cluster.check_settled()


@pytest.mark.campaign
async def test_workers_are_replaced_one_by_one(cluster: Cluster, reference: Reference, chance: random.Random) -> None:
    restart = RollingRestart()
    async with LoadClient(cluster.url) as client, under_load(client, 8, NUM_TOKENS, first=1000):
        await restart.inject(cluster, client, chance)
    check_answers(client.records, reference)
    assert restart.drain.statuses == [0, 0]
    cluster.check_settled()


@pytest.mark.campaign
async def test_a_second_signal_migrates_at_once(cluster: Cluster, reference: Reference, chance: random.Random) -> None:
    async with LoadClient(cluster.url) as client:
        asked = await streams(client, 8, 1000)
        leaving = next(worker for worker in cluster.living if worker.metric("dlw_in_flight_requests") > 0)
        leaving.signal(signal.SIGTERM)
        await asyncio.to_thread(wait_for, lambda: leaving.metric("dlw_draining") == 1, "the drain", 30)
        leaving.signal(signal.SIGTERM)
        assert await asyncio.to_thread(leaving.wait) == 0
        assert "drained: 0 finished" in leaving.log  # it did not wait for them
        await asyncio.gather(*asked)
    check_answers(client.records, reference)
    cluster.check_settled()


@pytest.mark.campaign
async def test_bad_clients_beside_good_ones(cluster: Cluster, reference: Reference, chance: random.Random) -> None:
    """Those that leave, those that never read, and those whose requests cannot be served."""
    never, bad = NeverReads(8), BadRequests()
    async with LoadClient(cluster.url) as client:
        async with under_load(client, 4, NUM_TOKENS, first=2000):
            await never.inject(cluster, client, chance)
            await Disconnect(60).inject(cluster, client, chance)
            await bad.inject(cluster, client, chance)
        await never.leave()
    check_answers(client.records, reference)
    check_ended(client.records)
    assert not bad.served
    assert len(cluster.living) == 2
    cluster.check_settled()


@pytest.mark.campaign
async def test_a_stopped_worker_is_left_alone(cluster: Cluster, reference: Reference) -> None:
    async with LoadClient(cluster.url) as client:
        asked = await streams(client, 16, NUM_TOKENS)
        stopped = cluster.living[0]
        stopped.signal(signal.SIGSTOP)
        try:
            late = [asyncio.create_task(client.ask(prompt_of(3000 + name), 8)) for name in range(16)]
            await asyncio.gather(*asked, *late)
        finally:
            stopped.signal(signal.SIGCONT)
    check_ended(client.records)
    check_answers([record for record in client.records if not record.errors], reference)
    assert DYNAMO < (1, 6) or not any(record.errors for record in client.records)  # 1.4.2 migrates no time-out
    cluster.check_settled()
    stopped.end()  # the frontend would leave it alone for a minute


@pytest.mark.campaign
async def test_the_boundary_store_is_away_and_comes_back(cluster: Cluster, reference: Reference) -> None:
    """What is in flight goes on; new requests are refused until it is back, without a restart."""
    async with LoadClient(cluster.url) as client:
        asked = await streams(client, 8, NUM_TOKENS)
        away = cluster.boundaries.rename(cluster.boundaries.with_name("away"))
        refused = [await client.ask(prompt_of(4000 + name), 8) for name in range(2)]
        away.rename(cluster.boundaries)
        await asyncio.gather(*asked)
        again = [await client.ask(record.prompt, 8) for record in refused]
    check_answers([task.result() for task in asked] + again, reference)
    for record in refused:
        assert record.errors
        assert not record.token_ids
    assert any(f"file:{cluster.boundaries}" in worker.log for worker in cluster.living)
    cluster.check_settled()


async def answered(client: LoadClient, prompt: Sequence[int], num_tokens: int) -> Record:
    """The first answer without an error: 1.4.2 may send a request to one of two workers that have
    just died.
    """
    while True:
        record = await client.ask(prompt, num_tokens)
        if not record.errors:
            return record


async def test_a_request_that_kills_workers_is_refused_by_the_rest(cluster: Cluster, reference: Reference) -> None:
    await cluster.start_one()
    async with LoadClient(cluster.url) as client:
        poison = await client.ask(prompt_of(5000), 8, **logits_processors(processor("faults/exits")))
        calm = await answered(client, prompt_of(5000), 8)
    assert poison.errors
    wait_for(lambda: len(cluster.living) == 1, "that the others have ended")
    assert sum(worker.metric("dlw_requests_total", outcome="poison") for worker in cluster.living) == 1
    check_answers([calm], reference)
    cluster.check_settled()


@pytest.mark.campaign
async def test_a_request_that_kills_workers_beside_others(cluster: Cluster, reference: Reference) -> None:
    """Two workers are lost at most, and of the others only those that were in both of them."""
    await cluster.start_one()
    async with LoadClient(cluster.url) as client:
        asked = await streams(client, 12, 400, first=6000)
        numbers = sorted(worker.metric("dlw_in_flight_requests") for worker in cluster.living)
        poison = await client.ask(prompt_of(5000), 8, **logits_processors(processor("faults/exits")))
        await asyncio.gather(*asked)
        calm = await answered(client, prompt_of(5000), 8)
    assert poison.errors
    (survivor,) = wait_for(lambda: len(cluster.living) == 1 and cluster.living, "that the others have ended")
    innocent = [task.result() for task in asked]
    refused = [record for record in innocent if record.errors]
    assert survivor.metric("dlw_requests_total", outcome="poison") == 1 + len(refused)
    assert len(refused) <= numbers[-1]  # not those of the second worker, nor of the third
    check_ended(client.records)
    check_answers([*(record for record in innocent if not record.errors), calm], reference)
    cluster.check_settled()


@pytest.mark.campaign
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_busy_worker_is_not_taken_for_a_hung_one(patient: Stack, path: str) -> None:
    """Its step takes longer than the frontend's stream time-out; empty chunks say that it lives."""
    asked = {"prompt": "z"} if path == "completions" else {"messages": [{"role": "user", "content": "z"}]}
    for stream in (False, True):
        status, text = patient.post(path, max_tokens=2, stream=stream, **asked)
        assert status == 200, text
        assert "error" not in text
        assert '"finish_reason":"length"' in text


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """A worker whose steps take 1.5 s, and a frontend that waits 1 s for a sign of life."""
    with running_stack(tmp_path_factory.mktemp("patient"), tiny_model) as stack:
        stack.environ["DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"] = "1"
        stack.start_frontend()
        stack.start_worker(*ENGINE, "--keepalive-s", "0.2", script=PACED, PACE_S="1.5")
        yield stack
