"""Everything that goes wrong, in random order, under a steady load, for ``SOAK_MINUTES``.

Between two faults the load pauses, and then everything must hold: the answers, the counts of
requests, pages and leases. One worker and the frontend live through it all; their memory and their
file descriptors must not grow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil
import pytest
from checker import Reference, check_answers, check_ended
from cluster import Cluster, running_cluster
from e2e_stack import DYNAMO, Process
from injectors import BadRequests, Disconnect, Drain, Fault, Kill, NeverReads, Stop
from load_client import LoadClient, under_load

logger = logging.getLogger(__name__)

MINUTES = float(os.environ.get("SOAK_MINUTES", "20"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
NUM_WORKERS = 3
NUM_CLIENTS = 6
WARM_UP = 0.4
"""Part of the time after which memory must be flat: until then caches fill."""

MAX_GROWTH_MB = 24.0
MAX_MORE_FDS = 8


class Usage:
    """What a process uses, looked at between faults.

    Args:
        process: Lives through it all.
    """

    def __init__(self, process: Process) -> None:
        self._process = psutil.Process(process.child.pid)
        self.megabytes: list[float] = []
        self.fds: list[float] = []

    def sample(self) -> None:
        """Look now."""
        self.megabytes.append(self._process.memory_info().rss / 1e6)
        self.fds.append(self._process.num_fds())

    def check(self, name: str) -> None:
        """It uses no more at the end than when it was warm."""
        megabytes, fds = growth(self.megabytes), growth(self.fds)
        logger.info("the %s grew by %.1f MB and %d file descriptors once it was warm", name, megabytes, fds)
        assert megabytes <= MAX_GROWTH_MB, f"the {name}'s memory grows: {self.megabytes}"
        assert fds <= MAX_MORE_FDS, f"the {name}'s file descriptors grow: {self.fds}"


def growth(samples: Sequence[float]) -> float:
    """The median of the last third after the warm-up, less that of the first third."""
    warm = samples[int(WARM_UP * len(samples)) :]
    third = max(1, len(warm) // 3)
    return median(warm[-third:]) - median(warm[:third])


def a_fault(chance: random.Random) -> Fault:
    """The next one."""
    kinds = (
        Kill(),
        Drain(),
        Drain(second_after_s=0.5),
        Stop(chance.choice((0.5, 10.0))),
        Disconnect(40),
        NeverReads(8),
        BadRequests(),
    )
    return chance.choice(kinds)


async def under_fault(cluster: Cluster, client: LoadClient, fault: Fault, chance: random.Random, first: int) -> None:
    """One fault under load, and what must hold afterwards of all but the answers' tokens."""
    async with under_load(client, NUM_CLIENTS, 60, first=first):
        while len(client.records) < NUM_CLIENTS or any(not record.token_ids for record in client.records[:NUM_CLIENTS]):
            await asyncio.sleep(0.005)
        await fault.inject(cluster, client, chance)
        await asyncio.sleep(1)
    if isinstance(fault, NeverReads):
        await fault.leave()
    if isinstance(fault, Drain):
        assert fault.statuses == [0], fault
    check_ended(client.records)
    await asyncio.to_thread(cluster.check_settled)
    await asyncio.to_thread(cluster.forget_dead)


@pytest.mark.campaign
@pytest.mark.timeout(MINUTES * 60 + 300)
async def test_everything_at_random(tmp_path: Path, tiny_model: Path) -> None:
    chance = random.Random(SEED)
    reference = Reference(tiny_model)
    counts: Counter[str] = Counter()
    num_answers = 0
    with running_cluster(tmp_path, tiny_model, "--kv-cache-memory", "64MiB", patience=2) as cluster:
        cluster.start(NUM_WORKERS)
        cluster.spared = cluster.living[0]
        used = {"frontend": Usage(cluster.frontend), "worker": Usage(cluster.spared)}
        until = time.monotonic() + MINUTES * 60
        while time.monotonic() < until:
            fault = a_fault(chance)
            logger.info("%d answers; next: %s", num_answers, repr(fault)[:80])
            async with LoadClient(cluster.url) as client:
                await under_fault(cluster, client, fault, chance, first=counts.total() * 10**4)
            if isinstance(fault, Stop) and DYNAMO < (1, 6):  # it does not migrate them
                client.records = [record for record in client.records if not record.errors]
            check_answers(client.records, reference)
            reference.forget()
            await asyncio.to_thread(cluster.start, NUM_WORKERS)
            for usage in used.values():
                usage.sample()
            counts[type(fault).__name__] += 1
            num_answers += len(client.records)
        logger.info("%d answers, faults: %s", num_answers, dict(counts))
        for name, usage in used.items():
            usage.check(name)
        leaving = cluster.living
        for worker in leaving:
            worker.signal(signal.SIGTERM)
        assert [await asyncio.to_thread(worker.wait) for worker in leaving] == [0] * NUM_WORKERS
