"""Dynamo with its request and event planes over NATS, and discovery in etcd."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from e2e_stack import Stack, Worker, running_stack, wait_for
from kv_router_checks import complete, num_cached, num_stored, prompt_of
from servers import EtcdServer, NatsServer

ENGINE = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--enable-kv-routing", "true")


class NatsStack(Stack):
    """With the servers in its directory."""

    nats: NatsServer
    etcd: EtcdServer

    def wait_endpoint(self, worker: Worker) -> None:
        """The NATS plane says it in its own words."""
        wait_for(lambda: "Registering NATS endpoint" in worker.log or not worker.running, "registration")
        assert worker.running, worker.log


@pytest.fixture
def planes(tmp_path: Path, tiny_model: Path) -> Iterator[NatsStack]:
    """An empty stack, whose processes meet over NATS and etcd."""
    with running_stack(tmp_path, tiny_model) as plain:
        stack = plain
        stack.__class__ = NatsStack
        assert isinstance(stack, NatsStack)
        stack.nats, stack.etcd = NatsServer(tmp_path / "nats"), EtcdServer(tmp_path / "etcd")
        try:
            stack.nats.start()
            stack.etcd.start()
            del stack.environ["DYN_FILE_KV"]
            stack.environ |= {
                "DYN_DISCOVERY_BACKEND": "etcd",
                "ETCD_ENDPOINTS": stack.etcd.url,
                "ETCD_LEASE_TTL": "60",
                "DYN_REQUEST_PLANE": "nats",
                "DYN_EVENT_PLANE": "nats",
                "NATS_SERVER": stack.nats.url,
            }
            yield stack
        finally:
            stack.end()
            stack.nats.kill()
            stack.etcd.kill()


def serve(stack: NatsStack, number: int) -> None:
    stack.start_frontend("--router-mode", "kv")
    for worker in [stack.start_worker(*ENGINE, wait=False) for _ in range(number)]:
        stack.wait_registered(worker)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "an answer")


def test_prefixes_stay_with_their_worker_and_answers_stream(planes: NatsStack) -> None:
    serve(planes, 2)
    prefixes = [prompt_of(number, 96) for number in range(4)]
    for prefix in prefixes:
        before = num_stored(planes)
        assert num_cached(planes, [*prefix, 301]) == 0
        wait_for(lambda before=before: num_stored(planes) > before, "that the router hears of the prefix")
    for number, prefix in enumerate(prefixes):
        for _ in range(2):
            assert num_cached(planes, prefix + prompt_of(100 + number, 5)) == 96
    stream = planes.client().completions.create(
        model="tiny", prompt=prompt_of(7, 20), max_tokens=240, stream=True, extra_body={"ignore_eos": True}
    )
    assert sum(bool(chunk.choices) for chunk in stream) > 4
    fresh = (prompt_of(number, 96) for number in count(1000))

    def both_answer() -> bool:  # among idle workers that know no prefix, the router draws
        complete(planes, next(fresh))
        return all(worker.metric("dlw_requests_total") > 0 for worker in planes.workers)

    wait_for(both_answer, "that both workers answer")


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_etcd_is_away_for_30_s(planes: NatsStack) -> None:
    """The worker is found again within 15 s of its return, without a restart.

    Dynamo's processes leave when their lease is over, so that it must be longer than that.
    """
    serve(planes, 1)
    (worker,) = planes.workers
    pid = worker.child.pid
    planes.etcd.kill()
    time.sleep(30)
    planes.etcd.start()
    wait_for(lambda: stack_answers(planes), "an answer", timeout_s=15)
    assert worker.running
    assert worker.child.pid == pid


def stack_answers(stack: Stack) -> bool:
    status, text = stack.post("completions", prompt=prompt_of(3, 10), max_tokens=2, ignore_eos=True)
    return status == 200 and bool(json.loads(text)["choices"])
