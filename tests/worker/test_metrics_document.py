"""docs/metrics.md is what a worker's scrape has, name by name; and the histograms' counts."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dynamo.llm.exceptions import InvalidArgument
from ports import free_port
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from served_worker import Client, serving

from adapters.client import processor
from worker.disaggregation.serving import TransferMetrics
from worker.engines import Measured, QueueTimes
from worker.lifecycle.drain import InFlightRequests
from worker.metrics import LoadMetrics, WorkerMetrics
from worker.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
PROMPT = [9, 30, 41, 77, 30]
Family = tuple[str, frozenset[str]]
"""Type and labels."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A worker that has answered two requests, failed one and refused one."""
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    store = f"file:{tmp_path_factory.mktemp('boundaries')}"
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("a key\n")
    port = ["--engine-port", str(free_port()), "--engine-key-file", str(keys)]
    async with serving(model, "--migration", "on", "--boundary-store", store, *port) as client:
        stop = {"max_tokens": 4, "ignore_eos": True}
        regex, bigrams = processor("regex", pattern="[a-z ]{8,30}"), processor("no_repeat_ngram", n=2)
        await client.ask(PROMPT, stop_conditions=stop)
        await client.ask(PROMPT, regex, stop_conditions={"max_tokens": 4})
        repeated = processor("forced_prefix", token_ids=[60, 61, 60, 61])
        with pytest.raises(InvalidArgument, match="forces token 61"):
            await client.ask(PROMPT, repeated, bigrams, stop_conditions=stop)
        with pytest.raises(InvalidArgument, match=r"sampling_options\.n"):
            await client.ask(PROMPT, sampling_options={"n": 2})
        yield client


def families(registry: CollectorRegistry) -> dict[str, Family]:
    """What a scrape has, by the names that queries use."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        if family.name.endswith("_created"):  # of the client library's own
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = frozenset(label for sample in family.samples for label in sample.labels)
        found[name] = family.type, labels - {"le"}
    return found


def documented() -> dict[str, Family]:
    rows = re.findall(r"^\| `(dlw_\w+)` \| (\w+) \| (.*?) \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


async def test_the_document_has_every_metric_of_a_scrape_and_no_other(served: Client) -> None:
    worker, registry = served.worker, CollectorRegistry()
    TransferMetrics(worker.server.engine, worker.server.disaggregation, registry)
    assert families(worker.server.metrics.registry) | families(registry) == documented()


def value(client: Client, name: str, **labels: str) -> Any:
    return client.worker.server.metrics.registry.get_sample_value(name, labels)


async def test_the_rows_of_engines_that_know_their_load(served: Client) -> None:
    """What only some engines have is said once, for a number of rows."""
    registry, server = CollectorRegistry(), served.worker.server
    assert isinstance(server.engine, Measured)
    LoadMetrics(server.engine, server.info, registry)
    names = list(documented())
    first = names.index("dlw_waiting_requests")
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    (word,) = re.findall(r"waiting queue; embedded engine and vLLM, as the next (\w+) \|", DOCUMENT.read_text())
    assert set(names[first : first + 2 + words.index(word)]) == set(families(registry))


async def test_requests_tell_when_they_were_first_counted() -> None:
    """By it the alert of broken engines knows that a worker was started again."""
    registry = WorkerMetrics(InFlightRequests()).registry
    assert 'dlw_requests_created{outcome="stop"}' in generate_latest(registry).decode()


async def test_what_the_histograms_observed(served: Client) -> None:
    counts = {
        "dlw_queue_time_seconds": 3,
        "dlw_kv_transfer_seconds": 0,
        "dlw_request_duration_seconds": 3,
        "dlw_prompt_length_tokens": 3,
    }
    assert {name: value(served, f"{name}_count") for name in counts} == counts
    assert value(served, "dlw_time_to_first_token_seconds_count") == 3
    generated = value(served, "dlw_tokens_total", kind="generated")
    assert generated == 4 + 4 + 3  # those before a failure, too
    assert value(served, "dlw_answer_length_tokens_sum") == generated
    assert value(served, "dlw_prompt_length_tokens_sum") == 3 * len(PROMPT)
    rows = value(served, "dlw_batch_size_rows_sum")
    # the row that failed had no token, and the two that were forced before it may have been drafted
    assert generated - 1 <= rows <= generated + 1
    assert value(served, "dlw_batch_size_rows_bucket", le="1.0") == value(served, "dlw_batch_size_rows_count")
    assert 0 < value(served, "dlw_queue_time_seconds_sum") < value(served, "dlw_request_duration_seconds_sum")
    assert (value(served, "dlw_waiting_requests"), value(served, "dlw_running_requests")) == (0, 0)
    assert value(served, "dlw_kv_used_blocks") == 0 < value(served, "dlw_kv_total_blocks")


async def test_a_request_in_the_batch_is_in_the_load(served: Client) -> None:
    stop = {"max_tokens": 1500, "ignore_eos": True}
    stream = served.worker.generate({"token_ids": PROMPT, "stop_conditions": stop}, served)
    await anext(stream)
    assert value(served, "dlw_running_requests") == 1
    assert value(served, "dlw_kv_used_blocks") > 0
    await stream.aclose()


async def test_a_chunks_tokens_share_its_time_and_transfer_is_no_queue() -> None:
    metrics = WorkerMetrics(InFlightRequests())
    metrics.observe_tokens(2, 0.3, is_first=True)
    metrics.observe_tokens(2, 0.3, is_first=False)
    metrics.observe_request(10.0, 12.0, QueueTimes(10.25, 11.5, 11.0), 7, 4)
    found = metrics.registry.get_sample_value
    assert found("dlw_time_to_first_token_seconds_count") == 1
    assert found("dlw_inter_token_latency_seconds_count") == 2
    assert found("dlw_inter_token_latency_seconds_bucket", {"le": "0.15"}) == 2
    assert found("dlw_queue_time_seconds_sum") == 0.25 + 0.5  # at last for a slot
    assert found("dlw_kv_transfer_seconds_sum") == 0.75
    assert found("dlw_request_duration_seconds_sum") == 2
