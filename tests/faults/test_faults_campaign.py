"""The faults of docs/reliability.md in their long series, with its bounds on time.

What is measured is logged: ``-o log_cli=true -o log_cli_level=INFO`` shows it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from checker import Reference, check_answers, check_ended
from cluster import running_cluster
from e2e_stack import DYNAMO
from injectors import BadRequests, Disconnect, Drain, Kill, NeverReads, RollingRestart
from load_client import LoadClient, Record, all_begun, prompt_of, streams, under_load

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

logger = logging.getLogger(__name__)

NUM_TOKENS = 150
KILL_GAP_S = 2.0
STOP_GAP_S = 4.0
DRAIN_S = 4
FINISH_S = 2.0
"""How much longer than its budget a drain may take."""

NOTICE_S = 0.2
"""How long a frontend may go on sending requests to a worker that is leaving."""


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture
def chance() -> random.Random:
    return random.Random(15)


def longest_gap(records: Sequence[Record]) -> float:
    return max(record.longest_gap_s for record in records)


async def test_kills_with_64_streams(tmp_path: Path, tiny_model: Path, reference: Reference) -> None:
    with running_cluster(tmp_path, tiny_model) as cluster:
        for turn in range(5):
            cluster.start(2)
            async with LoadClient(cluster.url) as client:
                asked = await streams(client, 64, NUM_TOKENS, first=turn * 64)
                await all_begun(client, 10 + 20 * turn)
                await Kill(replaced=False).inject(cluster, client, random.Random(turn))
                await asyncio.gather(*asked)
            check_answers(client.records, reference, KILL_GAP_S)
            logger.info("kill -9, 64 streams: longest gap %.2f s", longest_gap(client.records))
            await asyncio.to_thread(cluster.check_settled)
            await asyncio.to_thread(cluster.forget_dead)


@pytest.mark.parametrize("migrates", [True, False])
async def test_sigterm_with_streams_that_outlast_the_grace_period(
    tmp_path: Path, tiny_model: Path, reference: Reference, chance: random.Random, migrates: bool
) -> None:
    """They end within the budget; without migration nobody else could finish them."""
    budget = ("--drain-timeout-s", "30")
    with running_cluster(tmp_path, tiny_model, *budget, migrates=migrates, pace_s=0.02) as cluster:
        cluster.stack.environ["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "1"
        cluster.start(2)
        drain = Drain(replaced=False)
        async with LoadClient(cluster.url) as client:
            asked = await streams(client, 32, 300)
            async with under_load(client, 4, 20, first=1000):
                await drain.inject(cluster, client, chance)
            await asyncio.gather(*asked)
        check_answers(client.records, reference)
        assert drain.statuses == [0]
        logger.info("SIGTERM, streams of 6 s, migration %s: left after %.1f s", migrates, drain.seconds[0])
        await asyncio.to_thread(cluster.check_settled)


async def test_a_drain_past_its_budget_migrates_the_rest(
    tmp_path: Path, tiny_model: Path, reference: Reference, chance: random.Random
) -> None:
    with running_cluster(tmp_path, tiny_model, "--drain-timeout-s", str(DRAIN_S), pace_s=0.02) as cluster:
        cluster.start(2)
        drain = Drain(replaced=False)
        async with LoadClient(cluster.url) as client:
            asked = await streams(client, 32, 500)
            await drain.inject(cluster, client, chance)
            await asyncio.gather(*asked)
        check_answers(client.records, reference, KILL_GAP_S)
        assert drain.statuses == [0]
        logger.info(
            "drain of %d s: left after %.1f s, gap %.2f s", DRAIN_S, drain.seconds[0], longest_gap(client.records)
        )
        assert drain.seconds[0] <= DRAIN_S + FINISH_S
        await asyncio.to_thread(cluster.check_settled)


async def test_a_worker_that_leaves_is_sent_nothing_more(
    tmp_path: Path, tiny_model: Path, reference: Reference
) -> None:
    with running_cluster(tmp_path, tiny_model, "--drain-timeout-s", "30", pace_s=0.02) as cluster:
        cluster.start(2)
        async with LoadClient(cluster.url) as client:
            asked = await streams(client, 4, 300)
            async with under_load(client, 8, 4, first=1000):
                leaving = cluster.living[0]
                leaving.signal(signal.SIGTERM)
                await asyncio.sleep(NOTICE_S)
                came = await asyncio.to_thread(leaving.metric, "dynamo_component_requests_total")
                await asyncio.sleep(1)
                assert await asyncio.to_thread(leaving.metric, "dynamo_component_requests_total") == came
            await asyncio.gather(*asked)
        check_answers(client.records, reference)
        assert await asyncio.to_thread(leaving.wait) == 0


async def test_rolling_restarts_under_load(
    tmp_path: Path, tiny_model: Path, reference: Reference, chance: random.Random
) -> None:
    restart = RollingRestart()
    with running_cluster(tmp_path, tiny_model) as cluster:
        cluster.start(3)
        for turn in range(2):
            async with LoadClient(cluster.url) as client, under_load(client, 16, NUM_TOKENS, first=10**5 * turn):
                await restart.inject(cluster, client, chance)
            check_answers(client.records, reference)
            gap = longest_gap(client.records)
            logger.info("rolling restart: %d answers, longest gap %.2f s", len(client.records), gap)
        assert restart.drain.statuses == [0] * 6
        await asyncio.to_thread(cluster.check_settled)


async def test_a_stopped_worker(tmp_path: Path, tiny_model: Path, reference: Reference) -> None:
    """1.6.1 migrates its requests; 1.4.2 ends those that had begun with an error."""
    with running_cluster(tmp_path, tiny_model, pace_s=0.02, patience=1) as cluster:
        cluster.start(2)
        async with LoadClient(cluster.url) as client:
            asked = await streams(client, 32, NUM_TOKENS)
            victim = cluster.living[0]
            victim.signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            late = [client.ask(prompt_of(10**4 + name), 20) for name in range(16)]
            await asyncio.gather(*asked, *late)
            victim.signal(signal.SIGCONT)
        check_ended(client.records)
        failed = [record for record in client.records if record.errors]
        waited = [record.ended_s - stopped_s for record in failed if record.ended_s is not None]
        logger.info("SIGSTOP: %d of %d failed, after %s s", len(failed), len(client.records), waited)
        logger.info("SIGSTOP: longest gap %.2f s", longest_gap(client.records))
        if DYNAMO >= (1, 6):
            check_answers(client.records, reference, STOP_GAP_S)
        check_answers([record for record in client.records if not record.errors], reference, STOP_GAP_S)
        assert max(waited, default=0.0) <= STOP_GAP_S
        await asyncio.to_thread(cluster.check_settled)


async def test_a_thousand_disconnects(
    tmp_path: Path, tiny_model: Path, reference: Reference, chance: random.Random
) -> None:
    """Few slots, so that requests wait; long prompts, so that they are computed."""
    with running_cluster(tmp_path, tiny_model, "--max-num-batched-tokens", "128", max_num_seqs=8) as cluster:
        cluster.start(2)
        async with LoadClient(cluster.url) as client, under_load(client, 4, 40, first=3000):
            await Disconnect(1000, at_once=40).inject(cluster, client, chance)
        check_answers(client.records, reference)
        logger.info("disconnects: %d left", sum(record.has_left for record in client.records))
        await asyncio.to_thread(cluster.check_settled)


async def test_never_reading_and_bad_clients(
    tmp_path: Path, tiny_model: Path, reference: Reference, chance: random.Random
) -> None:
    never, bad = NeverReads(64, num_tokens=300), BadRequests()
    with running_cluster(tmp_path, tiny_model) as cluster:
        cluster.start(1)
        async with LoadClient(cluster.url) as client:
            async with under_load(client, 8, NUM_TOKENS, first=4000):
                await never.inject(cluster, client, chance)
                for _ in range(10):
                    await bad.inject(cluster, client, chance)
            await asyncio.to_thread(cluster.check_settled)  # those that never read have ended too
            await never.leave()
        check_answers(client.records, reference)
        assert not bad.served
        assert len(cluster.living) == 1
