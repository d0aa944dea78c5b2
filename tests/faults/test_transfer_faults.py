"""Prefill and decode workers are killed at every stage of a transfer, under load, with migration:
each answer is what it would have been, and nothing stays held.

`tests/e2e/test_disagg_faults.py` does so to one request at a time, without migration.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from checker import Reference, check_answers
from cluster import PACED, Cluster, running_cluster
from e2e_stack import Worker, wait_for
from load_client import LoadClient, Record, all_begun, prompt_of, under_load
from stopped_processes import stopped, unread

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

logger = logging.getLogger(__name__)

NUM_STREAMS = 16
NUM_TOKENS = 100
LENGTH = 100
LEASE_S = 10
PACE_S = {"prefill": 0.25, "decode": 0.02}
"""Of steps: a stage lasts long enough to be seen."""

PATIENCE = 20
"""The frontend must not give up on those that are stopped here."""


class Pool:
    """Two prefill and two decode workers.

    Args:
        cluster: Runs them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._started: dict[str, list[Worker]] = {"prefill": [], "decode": []}

    def living(self, role: str) -> list[Worker]:
        """Those that run."""
        return [worker for worker in self._started[role] if worker.running]

    async def fill(self) -> None:
        """Replace the dead, and wait until the frontend has a connection to every worker."""
        await asyncio.to_thread(self.cluster.forget_dead)
        for role in ("prefill", "decode") * 2:
            if len(self.living(role)) < 2:
                await asyncio.to_thread(self._begin, role)
        for worker in self.cluster.living:
            await asyncio.to_thread(self.cluster.stack.wait_registered, worker)
        async with LoadClient(self.cluster.url) as client:
            while not await asyncio.to_thread(self._all_asked):
                await asyncio.gather(*(client.ask(prompt_of(name), 2) for name in range(4)))

    def _begin(self, role: str) -> None:
        arguments = [*self.cluster.arguments, "--disaggregation-mode", role]
        if role == "prefill":
            arguments += ["--kv-lease-s", str(LEASE_S)]
        stack = self.cluster.stack
        worker = stack.start_worker(*arguments, script=PACED, wait=False, PACE_S=str(PACE_S[role]))
        stack.wait_endpoint(worker)
        self._started[role].append(worker)

    def _all_asked(self) -> bool:
        name = "dynamo_component_requests_total"
        return all(worker.metric(name, dynamo_endpoint="generate") > 0 for worker in self.cluster.living)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pool]:
    with running_cluster(tmp_path_factory.mktemp("pool"), tiny_model, patience=PATIENCE) as cluster:
        yield Pool(cluster)


Asked = list[asyncio.Task[Record]]


async def ask_all(client: LoadClient, first: int) -> Asked:
    """All at once."""
    prompts = [prompt_of(first + name, LENGTH) for name in range(NUM_STREAMS)]
    asked = [asyncio.create_task(client.ask(prompt, NUM_TOKENS)) for prompt in prompts]
    while len(client.records) < NUM_STREAMS:
        await asyncio.sleep(0)
    return asked


async def ask_and_send_all(pool: Pool, client: LoadClient, first: int) -> Asked:
    """All at once, until each has come to a prefill worker.

    One that the frontend sends to a worker as it dies is refused a connection, which 1.4.2 does not
    migrate (docs/reliability.md).
    """

    def num_received() -> float:
        name = "dynamo_component_requests_total"
        return sum(worker.metric(name, dynamo_endpoint="generate") for worker in pool.living("prefill"))

    before = await asyncio.to_thread(num_received)
    asked = await ask_all(client, first)
    await until(lambda: num_received() >= before + NUM_STREAMS, "all requests")
    return asked


async def kill_with_unread_requests(pool: Pool, client: LoadClient, victim: Worker) -> Asked:
    with stopped(victim):
        asked = await ask_all(client, 0)
        await until(lambda: unread(victim, pool.cluster.frontend) > 0, "a request")
        victim.end()
    return asked


async def kill_while_it_computes(pool: Pool, client: LoadClient, victim: Worker) -> Asked:
    asked = await ask_and_send_all(pool, client, 100)
    await until(lambda: victim.metric("dlw_in_flight_requests") > 0, "a request")
    victim.end()
    return asked


async def kill_with_leases(pool: Pool, client: LoadClient, victim: Worker) -> Asked:
    with stopped(*pool.living("decode")):
        asked = await ask_and_send_all(pool, client, 200)
        await until(lambda: victim.metric("dlw_kv_leased_prompts") > 0, "a lease")
        victim.end()
    return asked


async def kill_while_it_answers(pool: Pool, client: LoadClient, victim: Worker) -> Asked:
    asked = await ask_and_send_all(pool, client, 300)
    await all_begun(client, 10)
    victim.end()
    return asked


async def until(condition: Callable[[], bool], what: str) -> None:
    """Other processes offer nothing to await."""
    await asyncio.to_thread(wait_for, condition, what, 30)


@pytest.mark.parametrize(
    ("role", "kill"),
    [
        ("prefill", kill_with_unread_requests),
        ("prefill", kill_while_it_computes),
        ("prefill", kill_with_leases),
        ("decode", kill_with_unread_requests),
        ("decode", kill_while_it_computes),
        ("decode", kill_while_it_answers),
    ],
)
async def test_a_worker_is_killed_at_a_stage(
    pool: Pool, reference: Reference, role: str, kill: Callable[[Pool, LoadClient, Worker], Awaitable[Asked]]
) -> None:
    await pool.fill()
    async with LoadClient(pool.cluster.url) as client:
        await asyncio.gather(*await kill(pool, client, pool.living(role)[0]))
    check_answers(client.records, reference)
    logger.info("%s, %s: longest gap %.2f s", role, kill.__name__, max(one.longest_gap_s for one in client.records))
    await asyncio.to_thread(pool.cluster.check_settled)


async def test_workers_are_killed_at_random_moments(pool: Pool, reference: Reference) -> None:
    """Under load without a pause, so that transfers are under way at every stage."""
    chance = random.Random(15)
    for turn in range(6):
        await pool.fill()
        async with LoadClient(pool.cluster.url) as client:
            async with under_load(client, NUM_STREAMS, 40, first=1000 * (turn + 1)):
                await asyncio.sleep(chance.uniform(0.5, 2))
                chance.choice(pool.cluster.living).end()
                await asyncio.sleep(1)
            check_answers(client.records, reference)
            logger.info("%d answers", len(client.records))
        await asyncio.to_thread(pool.cluster.check_settled)
