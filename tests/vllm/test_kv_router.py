"""Two workers on vLLM behind Dynamo's KV router, and vLLM's load among a worker's metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_stack import Stack, Worker, wait_for
from kv_router_checks import check_prefixes_stay, complete, num_cached, prompt_of
from vllm_stack import vllm_workers

pytestmark = pytest.mark.real_model

BLOCK = 32
OPTIONS = ("--enable-kv-routing", "true", "--kv-block-size", str(BLOCK))

Served = tuple[Stack, list[Worker]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("router") / "stack"
    with vllm_workers(directory, 2, *OPTIONS, frontend=["--router-mode", "kv"]) as running:
        yield running


def test_prefixes_stay_with_their_worker(served: Served) -> None:
    stack, workers = served
    check_prefixes_stay(stack, 3 * BLOCK)
    answered = [worker.metric("vllm:request_success_total") for worker in workers]
    assert all(answered), answered
    for worker in workers:
        assert "block_hash mismatch" not in worker.log


def test_a_salt_separates_prefixes(served: Served) -> None:
    stack, _ = served
    prompt = prompt_of(1000, 3 * BLOCK + 1)

    def cached(salt: str | None) -> int:
        return num_cached(stack, prompt, **({} if salt is None else {"cache_salt": salt}))

    assert (cached(None), cached("tenant"), cached("other")) == (0, 0, 0)
    for salt in (None, "tenant", "other"):
        wait_for(lambda salt=salt: cached(salt) == 3 * BLOCK, f"the prefix of {salt} is known")


def test_the_load_is_that_of_the_scheduler(served: Served) -> None:
    stack, workers = served
    complete(stack, prompt_of(2000, 8))
    for worker in workers:
        assert worker.metric("dlw_kv_total_blocks") > 100
        wait_for(lambda worker=worker: worker.metric("dlw_kv_used_blocks") == 0, "all blocks to be free")
        assert worker.metric("dlw_running_requests") == worker.metric("dlw_waiting_requests") == 0
        assert worker.metric("dlw_batch_size_rows_count") > 0
