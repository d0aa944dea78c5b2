"""Laws of conservation: whatever requests ask for and however they end, what an operator reads of a
worker that is idle again adds up, and agrees with what the clients were told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dynamo.llm import exceptions
from prometheus_client import CollectorRegistry
from request_lines import kept_lines
from served_worker import serving
from test_llm_engine import SEAL, FakeEngine, chains, collect, outcomes, raising, request, started
from test_nothing_is_left import WAIT_S, Load, what_is_left

from worker.arguments import parse_arguments
from worker.engines import TokenDelta
from worker.errors import InvalidRequest, Overloaded
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

CROWDED = (
    *("--max-num-seqs", "2", "--max-queue", "1", "--kv-block-size", "4", "--context-length", "64"),
    *("--kv-blocks", "40", "--grammar-timeout-s", "0.3"),
)
"""Settings with which some requests are refused as too many, and some are preempted."""

IDLE = (
    *("dlw_in_flight_requests", "dlw_waiting_requests", "dlw_running_requests", "dlw_kv_used_blocks"),
    *("dlw_grammars_waiting", "dlw_grammars_running", "dlw_processor_breakers_open", "dlw_draining"),
)
"""Gauges of what is under way."""


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    with kept_lines() as kept:
        yield kept


class Told:
    """A worker as the runtime sees it, which notes the chunks that its clients get."""

    def __init__(self, worker: WorkerEngine) -> None:
        self._worker = worker
        self.abort = worker.abort
        self.num_tokens = 0
        self.usages: list[dict[str, Any]] = []

    async def generate(self, raw: Any, context: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(self._worker.generate(raw, context)) as chunks:
            async for chunk in chunks:
                self.num_tokens += len(chunk["token_ids"])
                if "completion_usage" in chunk:
                    self.usages.append(chunk["completion_usage"])
                yield chunk

    def total(self, name: str) -> int:
        return sum(usage[name] for usage in self.usages)


def totals(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample of a scrape by its name, summed over its labels."""
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def by(registry: CollectorRegistry, name: str, label: str) -> dict[str, float]:
    """The samples of one name by a label."""
    samples = [sample for family in registry.collect() for sample in family.samples if sample.name == name]
    return {sample.labels[label]: sample.value for sample in samples}


def is_unserved(line: dict[str, Any]) -> bool:
    """Whether a request was refused, or only checked: the engine computed nothing of it."""
    is_checked = line["finish_reason"] == "stop" and line["time_to_first_token_s"] is None
    return is_checked or line["error"] in ("InvalidRequest", "Overloaded")


def prompts(lines: list[dict[str, Any]]) -> int:
    """Tokens of the prompts of some requests."""
    return sum(line["prompt_tokens"] for line in lines)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize("seed", range(10, 13))
async def test_what_is_counted_adds_up(model: Path, seed: int, lines: list[dict[str, Any]]) -> None:
    async with serving(model, *CROWDED, "--log-requests") as client:
        worker, before = client.worker, asyncio.all_tasks()
        told = Told(worker)
        load = Load(told, seed)  # type: ignore[arg-type]
        async with asyncio.timeout(WAIT_S):
            await load.run(120)
            while what_is_left(worker, before) or len(lines) < load.num_begun:
                await asyncio.sleep(0.01)
        registry = worker.server.metrics.registry
        found, ended = totals(registry), by(registry, "dlw_requests_total", "outcome")
        tokens = by(registry, "dlw_tokens_total", "kind")
    assert {name: found[name] for name in IDLE} == dict.fromkeys(IDLE, 0)
    assert sum(ended.values()) == load.num_begun == len(lines)
    assert ended["refused"] == found["dlw_refused_fields_total"]
    assert not ended["unknown_error"]
    # tokens: those that clients got, those of the log, and those of their answers' usage
    assert tokens["generated"] == told.num_tokens == sum(line["generated_tokens"] for line in lines)
    assert told.total("completion_tokens") <= tokens["generated"] == found["dlw_answer_length_tokens_sum"]
    assert told.total("prompt_tokens") <= tokens["prompt"] == found["dlw_prompt_length_tokens_sum"]
    assert tokens["cached"] <= tokens["prompt"]
    # requests that the engine had: none that was refused, by whomever, or only checked
    served = [line for line in lines if line["seed"] is not None and not is_unserved(line)]
    perhaps = [line for line in lines if line["seed"] is None and line["finish_reason"] in ("cancelled", "length")]
    num_served = found["dlw_request_duration_seconds_count"]
    assert len(served) <= num_served <= len(served) + len(perhaps)
    assert prompts(served) <= tokens["prompt"] <= prompts(served) + prompts(perhaps)
    assert num_served == found["dlw_prompt_length_tokens_count"] == found["dlw_answer_length_tokens_count"]
    assert found["dlw_queue_time_seconds_count"] <= num_served
    assert found["dlw_time_to_first_token_seconds_count"] <= found["dlw_queue_time_seconds_count"]
    assert found["dlw_time_to_first_token_seconds_count"] == sum(line["generated_tokens"] > 0 for line in lines)
    assert found["dlw_inter_token_latency_seconds_count"] <= tokens["generated"]
    # grammars
    assert by(registry, "dlw_grammar_cache_lookups_total", "result")["miss"] == found["dlw_grammars_total"]
    assert found["dlw_grammars_total"] == found["dlw_grammar_seconds_count"]
    assert found.get("dlw_speculation_accepted_tokens_total", 0) <= found.get(
        "dlw_speculation_proposed_tokens_total", 0
    )


async def scripted(error: Exception) -> tuple[WorkerEngine, dict[str, float]]:
    """A worker whose engine has ended one request with an error, and what it then counts."""
    worker, _, _ = await started(raising(error))
    with pytest.raises((exceptions.InvalidArgument, exceptions.HttpError)):
        await collect(worker, request())
    return worker, totals(worker.server.metrics.registry)


@pytest.mark.parametrize("error", [Overloaded("the queue is full"), InvalidRequest("token_ids", "must be fewer")])
async def test_what_an_engine_refuses_has_no_tokens_nor_times(error: Exception) -> None:
    """A flood of refusals would make the times look short, and the prefix hit rate small."""
    worker, found = await scripted(error)
    assert sum(outcomes(worker).values()) == 1
    assert found["dlw_tokens_total"] == 0
    names = ("request_duration_seconds", "prompt_length_tokens", "answer_length_tokens", "queue_time_seconds")
    assert [found[f"dlw_{name}_count"] for name in names] == [0] * 4
    await worker.cleanup()


async def test_the_log_has_the_prompt_as_usage_has_it(lines: list[dict[str, Any]]) -> None:
    """A picture becomes many tokens, which the engine alone knows."""

    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5], finish_reason="length", num_prompt_tokens=40)

    worker, _, _ = await started(script)
    worker.server.reports.open(replace(worker.server.arguments, log_requests=True))
    chunks = await collect(worker, request())
    await worker.cleanup()
    assert lines[0]["prompt_tokens"] == chunks[-1]["completion_usage"]["prompt_tokens"] == 40


async def test_a_prefill_worker_has_no_answers() -> None:
    """Each prompt was an answer of 0 tokens, so that half of a pool's answers looked empty."""

    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(finish_reason="length", kv={"of": "the prompt"})

    arguments = parse_arguments(["--model-path", "/models/tiny", "--disaggregation-mode", "prefill"], {})
    engine: Any = FakeEngine(script)
    worker = WorkerEngine(engine, arguments, seal=SEAL, shut_down=lambda: None, make_chains=chains)
    await worker.start(1)
    await collect(worker, request())
    found = totals(worker.server.metrics.registry)
    assert (found["dlw_prompt_length_tokens_count"], found["dlw_answer_length_tokens_count"]) == (1, 0)
    await worker.cleanup()
