"""``SOAK_WORKERS`` workers (64) behind two frontends and two front doors at one port, which are
killed and drained under a steady load for ``SOAK_MINUTES``: no answer is lost or different, and the
memory of what lives through it is flat.

Where the machine itself stands still for some seconds, all leases end at once, which no deployment
of one machine survives: such a round is told of, and neither it nor that time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from checker import Reference, check_answers, check_ended
from cluster import PATIENCE, Cluster, running_cluster
from e2e_stack import Process, http, wait_for
from front_door_process import Door
from injectors import Drain, Fault, Kill
from load_client import LoadClient, under_load
from ports import free_port
from test_soak import MINUTES, SEED, Usage

logger = logging.getLogger(__name__)

NUM_WORKERS = int(os.environ.get("SOAK_WORKERS", "64"))
STARTED_AT_ONCE = 4
NUM_CLIENTS = 16
NUM_TOKENS = 60
FAULTS_PER_ROUND = 3
STOOD_STILL_S = 3.0


class Standstill:
    """Notes for how long this process, and with it the machine, stood still.

    Attributes:
        seconds: All such times together.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Notes it in the block."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            now_s = time.monotonic()
            if now_s - before_s > STOOD_STILL_S:
                self.seconds += now_s - before_s
            before_s = now_s


def start_frontend(cluster: Cluster) -> tuple[Process, str]:
    """A second frontend beside the cluster's, and its address."""
    stack, port = cluster.stack, free_port()
    command = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(port), "--migration-limit", "3"]
    frontend = Process(command, stack.environ, stack.directory / "second_frontend.log")
    stack.keep(frontend)
    url = f"http://127.0.0.1:{port}"
    wait_for(lambda: http(f"{url}/health")[0] == 200 or not frontend.running, "the second frontend")
    assert frontend.running, frontend.log
    return frontend, url


async def start_workers(cluster: Cluster, still: Standstill) -> None:
    """Start what is missing, a few at a time, until the living are registered, and no others."""
    while True:
        before_s, missing = still.seconds, NUM_WORKERS - len(cluster.living)
        try:
            if missing <= 0:  # below it where a standstill ended a round after it had started one more
                return await asyncio.to_thread(cluster.forget_dead)
            await asyncio.to_thread(cluster.start, len(cluster.living) + min(STARTED_AT_ONCE, missing))
        except (AssertionError, subprocess.TimeoutExpired):
            await asyncio.sleep(1)  # until a standstill has been noted
            if still.seconds == before_s:
                raise


async def a_round(
    cluster: Cluster, client: LoadClient, faults: list[Fault], chance: random.Random, first: int, reference: Reference
) -> None:
    """Faults under load, and what must hold of all answers and workers afterwards."""
    async with under_load(client, NUM_CLIENTS, NUM_TOKENS, first=first):
        while len([record for record in client.records if record.token_ids]) < NUM_CLIENTS:
            await asyncio.sleep(0.01)
        for fault in faults:
            await fault.inject(cluster, client, chance)
        await asyncio.sleep(1)
    for fault in faults:
        assert not isinstance(fault, Drain) or fault.statuses == [0], fault
    check_ended(client.records)
    await asyncio.to_thread(check_answers, client.records, reference)
    await asyncio.to_thread(cluster.check_settled)


@pytest.mark.campaign
@pytest.mark.timeout(MINUTES * 60 + 1800)
async def test_a_fleet_loses_nothing(tmp_path: Path, tiny_model: Path) -> None:
    chance, reference, still = random.Random(SEED), Reference(tiny_model), Standstill()
    counts: Counter[str] = Counter()
    arguments = ("--kv-cache-memory", "16MiB")
    with running_cluster(tmp_path, tiny_model, *arguments, max_num_seqs=16, patience=2 * PATIENCE) as cluster:
        async with still.watched():
            await start_workers(cluster, still)
            second, url = await asyncio.to_thread(start_frontend, cluster)
            shared = ("--reuse-port", "--response-store-mib", "0")
            upstream = f"{cluster.url},{url}"
            one = await asyncio.to_thread(Door, cluster.stack, *shared, upstream=upstream)
            other = await asyncio.to_thread(Door, cluster.stack, *shared, upstream=upstream, port=one.port)
            cluster.spared = cluster.living[0]
            lives = {"first frontend": cluster.frontend, "second frontend": second, "worker": cluster.spared}
            used = {name: Usage(each) for name, each in {**lives, "first door": one, "second door": other}.items()}
            logger.info("%d workers run", len(cluster.living))
            begun_s, still.seconds = time.monotonic(), 0.0
            while (lasted_s := time.monotonic() - begun_s - still.seconds) < MINUTES * 60:
                logger.info("%.0f s, without %.0f s of standstill: %s", lasted_s, still.seconds, dict(counts))
                faults: list[Fault] = [chance.choice((Kill(), Drain(), Drain(second_after_s=0.5)))]
                faults += [chance.choice((Kill(), Drain())) for _ in range(FAULTS_PER_ROUND - 1)]
                before_s = still.seconds
                async with LoadClient(one.url) as client:
                    try:
                        await a_round(cluster, client, faults, chance, counts["asked"] + 10**6, reference)
                    except (AssertionError, subprocess.TimeoutExpired) as error:
                        if still.seconds == before_s:
                            raise
                        logger.warning("a round does not count, all stood still: %s", str(error)[:300])
                        counts["rounds that do not count"] += 1
                    else:
                        counts["rounds"] += 1
                        counts["answers"] += len(client.records)
                        counts.update(type(fault).__name__ for fault in faults)
                    counts["asked"] += len(client.records)
                reference.forget()
                await start_workers(cluster, still)
                for usage in used.values():
                    usage.sample()
            logger.info("%.0f s, without %.0f s of standstill: %s", lasted_s, still.seconds, dict(counts))
            assert counts["rounds"], counts
            for name, usage in used.items():
                usage.check(name)
            leaving = cluster.living
            for worker in leaving:
                worker.signal(signal.SIGTERM)
            assert [await asyncio.to_thread(worker.wait, 120) for worker in leaving] == [0] * len(leaving)
