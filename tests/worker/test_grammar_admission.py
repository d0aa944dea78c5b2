"""Requests with a grammar, from the chain builder to the engine: refused alone, counted,
cancelled, drained.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from dynamo.llm import exceptions
from prometheus_client import CollectorRegistry
from test_llm_engine import ARGUMENTS, Context, FakeEngine, outcomes, two_tokens
from test_llm_engine import request as raw_request

from adapters.catalog import Catalog, Policy, model_context
from adapters.grammars.sandbox import GrammarSandbox, SandboxBusy, SandboxUnavailable
from adapters.processors.grammar import grammar_cache, tokenizer_tables
from adapters.vocabulary import Vocabulary
from worker.arguments import Arguments, parse_arguments
from worker.engines import EngineInfo, EngineRequest, ReadKv, RequestHints
from worker.errors import GrammarsUnavailable, InvalidRequest, Overloaded, StartupError
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.requests.request import GenerationRequest
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.sampling import GuidedDecodingParams, SamplingParams
from worker.tiny_model import write_tiny_model

FOREVER_S = 600.0
SLOW = {"json": {"type": "integer", "multipleOf": 99999989}}
GOOD = {"choice": ["yes", "no"]}
INFO = EngineInfo("fake", "0", 100, 1024, (1,), 4, 10, 4, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def facts(model: str) -> Context:
    return model_context(Vocabulary.from_pretrained(model, 1024, (1,)))


@pytest.fixture
def sandbox(facts: Context) -> Iterator[GrammarSandbox]:
    """One in which a slow grammar never ends."""
    tables = tokenizer_tables(facts.vocabulary)
    with GrammarSandbox(lambda: tables, timeout_s=FOREVER_S, max_wait_s=FOREVER_S) as running:
        running.wait_ready()
        grammar_cache(facts.vocabulary).sandbox = running
        yield running


def chains_of(facts: Context, registry: CollectorRegistry | None = None) -> ServedChainBuilder:
    return ServedChainBuilder(Catalog.default(), Policy(), "tiny", facts, registry or CollectorRegistry())


async def build(
    chains: ServedChainBuilder, guided: dict[str, Any], client: str | None = None, *, label: str | None = None
) -> Any:
    params = SamplingParams(max_tokens=9, guided_decoding=GuidedDecodingParams(**guided))
    made = GenerationRequest(prompt_token_ids=[5], params=params)
    own = replace(params, stop_token_ids=[1])
    asked = EngineRequest("", [5], own, seed=1, cache_salt=client, hints=RequestHints(client=label))
    return (await chains.prepare(asked, chains.select(made, {}), 9)).chain


async def running(sandbox: GrammarSandbox, chains: ServedChainBuilder, count: int = 1) -> None:
    """Until ``count`` grammars are in the sandbox; each look at it is a grammar that is compiled
    meanwhile.
    """
    number = 0
    while sandbox.num_running + sandbox.num_waiting != count:
        number += 1
        await build(chains, {"choice": [f"look {count} {number}"]})


@pytest.mark.parametrize(
    ("guided", "field", "problem"),
    [
        ({"regex": "("}, "sampling_options.guided_decoding.args.pattern", "unclosed"),
        (
            {"grammar": "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(4000)), 'r4000: "b"'])},
            "sampling_options.guided_decoding.args.lark",
            "takes more than 2 MiB of stack",
        ),
        ({"json": {"unevaluatedItems": False}}, "sampling_options.guided_decoding.args.schema", "cannot be enforced"),
    ],
)
async def test_a_refusal_names_the_field_and_the_limit(
    facts: Context, sandbox: GrammarSandbox, guided: dict[str, Any], field: str, problem: str
) -> None:
    chains = chains_of(facts)
    with pytest.raises(InvalidRequest) as refused:
        await build(chains, guided)
    assert (refused.value.field, problem in refused.value.problem) == (field, True)
    assert (await build(chains, GOOD)).members[0].name == "choice"


async def test_slow_grammars_block_neither_builder_nor_asyncio_threads(facts: Context, sandbox: GrammarSandbox) -> None:
    chains = chains_of(facts)
    bombs = [
        asyncio.create_task(build(chains, {"json": {"type": "integer", "multipleOf": 99999989 - 2 * i}}, f"client {i}"))
        for i in range(40)  # more than asyncio's pool has threads
    ]
    await running(sandbox, chains, 40)
    assert await asyncio.to_thread(threading.current_thread)
    assert (await build(chains, {"regex": "[a-c]+"}, "client 0")).members[0].name == "regex"
    assert not any(bomb.done() for bomb in bombs)
    for bomb in bombs:
        bomb.cancel()
    await asyncio.gather(*bombs, return_exceptions=True)
    await running(sandbox, chains, 0)
    assert sandbox.counts["cancelled"] == 40


async def test_heavy_grammars_of_one_client_keep_no_other_out(facts: Context) -> None:
    """Whether or not it sends a cache salt: requests without one were clients of their own each."""
    chains, tables = chains_of(facts), tokenizer_tables(facts.vocabulary)
    limits: dict[str, Any] = {"timeout_s": FOREVER_S, "max_wait_s": FOREVER_S, "max_waiting": 4}
    with GrammarSandbox(lambda: tables, **limits) as sandbox:
        sandbox.wait_ready()
        grammar_cache(facts.vocabulary).sandbox = sandbox

        def slow(number: int, label: str) -> asyncio.Task[Any]:
            schema = {"type": "integer", "multipleOf": 99999989 - 2 * number}
            return asyncio.create_task(build(chains, {"json": schema}, label=label))

        large = [slow(number, "large") for number in range(12)]
        while sandbox.num_waiting + sandbox.num_running + sum(task.done() for task in large) < len(large):
            await asyncio.sleep(0.01)
        num_refused = sum(task.done() for task in large)
        assert num_refused
        small = slow(12, "small")
        while sum(task.done() for task in large) == num_refused and not small.done():
            await asyncio.sleep(0.01)
        assert not small.done()
        for task in (*large, small):
            task.cancel()
        ended = await asyncio.gather(*large, small, return_exceptions=True)
        assert {type(each) for each in ended} == {Overloaded, asyncio.CancelledError}


async def test_schemas_of_one_client_hold_no_other_s_up(facts: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """That take as much work as is allowed for one, in each of the threads; also where it leaves,
    and comes again.
    """
    chains, grammars, go_on, begun = chains_of(facts), Catalog.grammars, threading.Event(), list[str]()

    def waiting(catalog: Catalog, selection: Any, context: Any) -> Any:
        if selection.processors[0].args["choices"] == ["large"]:
            begun.append("large")
            assert go_on.wait(FOREVER_S)
        return grammars(catalog, selection, context)

    def come() -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(build(chains, {"choice": ["large"]}, label="large")) for _ in range(40)]

    monkeypatch.setattr(Catalog, "grammars", waiting)
    large = come()
    try:
        async with asyncio.timeout(10):
            while len(begun) < 3:
                await asyncio.sleep(0.001)
            for task in large:
                task.cancel()
            await asyncio.gather(*large, return_exceptions=True)
            large = come()
            await asyncio.sleep(0.01)
            assert (await build(chains, GOOD, label="small")).members[0].name == "choice"
        assert not any(task.done() for task in large)
    finally:
        go_on.set()
        await asyncio.gather(*large)


async def test_a_full_queue_or_missing_process_is_no_grammars_fault(
    facts: Context, sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = chains_of(facts)
    failure: Exception = SandboxBusy("too many grammars wait to be compiled")
    original = sandbox.submit

    def submit(*arguments: Any) -> Any:
        future = original(*arguments)
        future.cancel()
        failed: Any = type(future)()
        failed.set_exception(failure)
        return failed

    monkeypatch.setattr(sandbox, "submit", submit)
    with pytest.raises(Overloaded, match=r"guided_decoding\.args\.choices: too many grammars wait"):
        await build(chains, GOOD)
    failure = SandboxUnavailable("cannot start")
    with pytest.raises(GrammarsUnavailable, match="the sandbox cannot start"):
        await build(chains, GOOD)
    monkeypatch.undo()
    assert await build(chains, GOOD)


@pytest.fixture
async def worker(facts: Context, sandbox: GrammarSandbox) -> AsyncIterator[tuple[WorkerEngine, ServedChainBuilder]]:
    made: list[ServedChainBuilder] = []

    def make_chains(arguments: Arguments, info: EngineInfo, registry: CollectorRegistry) -> ServedChainBuilder:
        made.append(chains_of(facts, registry))
        return made[0]

    serving = WorkerEngine(FakeEngine(two_tokens), ARGUMENTS, shut_down=lambda: None, make_chains=make_chains)
    await serving.start(1)
    yield serving, made[0]
    await serving.cleanup()


def guided(fields: dict[str, Any]) -> Any:
    return raw_request(sampling_options={"guided_decoding": fields})


async def collect(stream: AsyncGenerator[Any, None]) -> list[Any]:
    return [chunk async for chunk in stream]


Served = tuple[WorkerEngine, ServedChainBuilder]


async def test_requests_count_as_in_flight_while_they_compile(worker: Served, sandbox: GrammarSandbox) -> None:
    engine, chains = worker
    slow = asyncio.create_task(collect(engine.generate(guided(SLOW), Context("slow"))))
    await running(sandbox, chains)
    assert engine.server.metrics.registry.get_sample_value("dlw_in_flight_requests") == 1
    assert engine.server.in_flight.num_blocks == 0
    with pytest.raises(exceptions.InvalidArgument, match="'slow' is being served already"):
        await collect(engine.generate(guided(GOOD), Context("slow")))
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert len(engine.server.in_flight) == 0


async def test_a_refused_grammar_leaves_nothing_in_flight(worker: Served) -> None:
    engine, _ = worker
    with pytest.raises(exceptions.InvalidArgument, match="unclosed"):
        await collect(engine.generate(guided({"regex": "("}), Context()))
    assert len(engine.server.in_flight) == 0
    assert outcomes(engine) == {"refused": 1}


async def test_an_abort_while_a_grammar_compiles_ends_both(worker: Served, sandbox: GrammarSandbox) -> None:
    engine, chains = worker
    slow = asyncio.create_task(collect(engine.generate(guided(SLOW), Context("slow"))))
    await running(sandbox, chains)
    await engine.abort(Context("slow"))
    assert len(engine.server.in_flight) == 0
    chunks = await slow
    assert [(chunk["token_ids"], chunk["finish_reason"]) for chunk in chunks] == [([], "cancelled")]
    assert outcomes(engine) == {"cancelled": 1}
    await build(chains, {"choice": ["after"]})
    assert (sandbox.num_running, sandbox.counts["cancelled"]) == (0, 1)


async def test_a_deadline_passes_while_a_grammar_compiles(worker: Served, sandbox: GrammarSandbox) -> None:
    """The answer ends then, and the compilation with it."""
    engine, chains = worker
    limits = json.dumps({"version": 1, "processors": [], "deadline": time.time() + 1.0})  # it has begun by then
    raw = {**guided(SLOW), "annotations": [f"logits_processors:{limits}"]}
    chunks = await asyncio.wait_for(collect(engine.generate(raw, Context("late"))), 60)
    assert [(chunk["token_ids"], chunk["finish_reason"]) for chunk in chunks] == [([], "length")]
    assert outcomes(engine) == {"length": 1}
    assert len(engine.server.in_flight) == 0
    await build(chains, {"choice": ["after"]})
    assert (sandbox.num_running, sandbox.counts["cancelled"]) == (0, 1)


@pytest.mark.parametrize("is_aborted", [True, False])
async def test_a_request_that_leaves_while_it_compiles_ends_its_lease(
    worker: Served, sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    """The runtime aborts it, or cancels the task that reads its stream."""
    engine, chains = worker
    server, released = engine.server, []
    leased = ReadKv({"token": 1})
    monkeypatch.setattr(server.disaggregation, "kv_of", lambda request, selection: leased)
    monkeypatch.setattr(server.engine, "release_kv", lambda *kv: released.append(kv), raising=False)
    slow = asyncio.create_task(collect(engine.generate(guided(SLOW), Context("slow"))))
    await running(sandbox, chains)
    if is_aborted:
        await engine.abort(Context("slow"))
    else:
        slow.cancel()
    await asyncio.wait([slow])
    assert released == [(leased, len(guided(SLOW)["token_ids"]))]
    assert len(server.in_flight) == 0


async def test_a_drain_hands_off_what_still_compiles(worker: Served, sandbox: GrammarSandbox) -> None:
    engine, chains = worker
    slow = asyncio.create_task(collect(engine.generate(guided(SLOW), Context("slow"))))
    await running(sandbox, chains)
    pid = sandbox.pid
    await engine.cleanup()
    with pytest.raises(exceptions.EngineShutdown):
        await slow
    assert engine.server.metrics.registry.get_sample_value("dlw_drain_migrated_total") == 1
    assert pid is not None
    assert sandbox.pid is None


def arguments_for(model: str) -> Arguments:
    return parse_arguments(["--model-path", model, "--grammar-timeout-s", "1", "--grammar-cache-mib", "3"], {})


async def test_a_workers_chain_builder_has_a_sandbox_and_its_metrics(model: str) -> None:
    registry = CollectorRegistry()
    chains = await asyncio.to_thread(make_chain_builder, arguments_for(model), INFO, registry)
    cache = grammar_cache(chains.vocabulary)
    assert cache.sandbox is not None
    assert (cache.max_bytes, cache.sandbox.limits.timeout_s) == (3 << 20, 1.0)
    cache.sandbox._jobs.max_wait_s = FOREVER_S  # a second of its processor time may be long beside load
    for _ in range(2):
        await build(chains, GOOD)
    with pytest.raises(InvalidRequest, match="takes more than 1 s of processor time"):
        await build(chains, SLOW)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert (value("dlw_grammars_total", outcome="compiled"), value("dlw_grammars_total", outcome="time")) == (1, 1)
    assert value("dlw_grammar_cache_lookups_total", result="hit") == 1
    assert value("dlw_grammar_cache_bytes") == cache.num_bytes > 0
    assert value("dlw_grammars_waiting") == value("dlw_grammars_running") == 0
    assert value("dlw_grammar_seconds_count") == 2
    assert value("dlw_grammar_sandbox_restarts_total") == 0
    await chains.close()
    try:
        with pytest.raises(GrammarsUnavailable):
            await build(chains_of(chains.builder.model), {"regex": "z"})
    finally:
        cache.sandbox = None  # other tests in this process may have an equal tokenizer, and so this cache


def test_a_sandbox_that_cannot_start_stops_the_worker(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(StartupError, match="the sandbox for grammars cannot start"):
        make_chain_builder(arguments_for(model), INFO, CollectorRegistry())
