"""`WorkerEngine` between the runtime and an engine, both fake: who is told what, and what is
freed when.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from typing import Any

import pytest
from dynamo.common.backend.engine import GenerateRequest
from dynamo.llm import exceptions
from prometheus_client import CollectorRegistry

from adapters.catalog import Catalog, Policy, model_context
from adapters.vocabulary import Vocabulary
from worker.arguments import Arguments, parse_arguments
from worker.disaggregation.seal import Seal
from worker.engines import EngineInfo, EngineRequest, RequestHints, TokenDelta
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded, StartupError
from worker.metrics import OUTCOMES
from worker.processors.builder import ServedChainBuilder
from worker.requests.refusals import ONLY_CHECKED, REFUSAL, WANTS_REFUSAL
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.sampling import SamplingParams

ARGUMENTS = parse_arguments(["--model-path", "/models/tiny", "--drain-timeout-s", "0.01"], {})
SEAL = Seal("a secret of this pool, and of no other")
INFO = EngineInfo(
    name="fake",
    version="0",
    context_length=100,
    vocab_size=50,
    eos_token_ids=(2,),
    kv_block_size=4,
    total_kv_blocks=10,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.lifecycle.drain.FLUSH_S", 0.0)


Script = Callable[[str, SamplingParams], AsyncGenerator[TokenDelta, None]]


class Context:
    def __init__(self, request_id: str = "a") -> None:
        self._id = request_id

    def id(self) -> str:
        return self._id

    @property
    def metadata(self) -> dict[str, str]:
        return {}

    def trace_headers(self) -> dict[str, str]:
        return {"traceparent": self._id}


def chains(arguments: Arguments, info: EngineInfo, registry: CollectorRegistry) -> ServedChainBuilder:
    """Of a model without a tokenizer."""
    model = model_context(Vocabulary(info.vocab_size, eos_token_ids=info.eos_token_ids))
    return ServedChainBuilder(Catalog.default(), Policy(), "tiny", model, registry)


class FakeEngine:
    """Plays ``script``; migration and abort end what waits in `held`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.aborted: list[str] = []
        self.hints: list[RequestHints] = []
        self.given_away = asyncio.Event()
        self.num_stops = 0
        self.failure: Exception | None = None

    async def start(self) -> EngineInfo:
        if self.failure is not None:
            raise self.failure
        return INFO

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.hints.append(request.hints)
        return self.script(request.id, request.params)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def num_unfinished(self) -> int:
        return 0

    def num_leased(self) -> int:
        return 0

    def transfers(self) -> dict[str, float]:
        return {}

    def migrate_all(self) -> int:
        self.given_away.set()
        return 0

    async def stop(self) -> None:
        self.num_stops += 1


class Publisher:
    def __init__(self) -> None:
        self.used: list[int] = []

    def publish(self, rank: int, snapshot: Any) -> None:
        assert rank == 0
        self.used.append(snapshot.kv_used_blocks)


async def two_tokens(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
    yield TokenDelta([5])
    yield TokenDelta()
    yield TokenDelta([6], finish_reason="length")


def raising(error: Exception, after: int = 0) -> Script:
    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        for _ in range(after):
            yield TokenDelta([5])
        raise error

    return script


class Left:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


async def started(script: Script = two_tokens) -> tuple[WorkerEngine, FakeEngine, Left]:
    engine, left = FakeEngine(script), Left()
    worker = WorkerEngine(engine, ARGUMENTS, shut_down=left, make_chains=chains)
    await worker.start(1)
    return worker, engine, left


def request(**values: Any) -> GenerateRequest:
    return {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 10}, **values}  # type: ignore[typeddict-item]


async def collect(worker: WorkerEngine, raw: GenerateRequest, request_id: str = "a") -> list[Any]:
    return [chunk async for chunk in worker.generate(raw, Context(request_id))]


def outcome(worker: WorkerEngine, name: str) -> float | None:
    return worker.server.metrics.registry.get_sample_value("dlw_requests_total", {"outcome": name})


def outcomes(worker: WorkerEngine) -> dict[str, float]:
    """Those that any request had."""
    counted = ((name, outcome(worker, name)) for name in OUTCOMES)
    return {name: number for name, number in counted if number}


async def test_a_request() -> None:
    worker, _, _ = await started()
    chunks = await collect(worker, request())
    assert [chunk["token_ids"] for chunk in chunks] == [[5], [6]]
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"]["total_tokens"] == 5
    assert len(worker.server.in_flight) == 0
    assert outcome(worker, "length") == 1


async def test_the_engine_hears_what_a_client_says_of_a_request() -> None:
    worker, engine, _ = await started()
    await collect(worker, request(), "a")
    await collect(worker, request(routing={"priority": 7.5}), "b")
    assert engine.hints == [RequestHints({"traceparent": "a"}, 0), RequestHints({"traceparent": "b"}, 7.5)]
    with pytest.raises(exceptions.InvalidArgument, match=r"routing\.priority: must be a number"):
        await collect(worker, request(routing={"priority": "high"}))


async def test_a_silent_engine_is_asked_to_keep_its_streams_alive() -> None:
    silent = asyncio.Event()

    class Engine(FakeEngine):
        def keep_alive(self) -> None:
            silent.set()

    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        await silent.wait()
        yield TokenDelta()
        yield TokenDelta([6], finish_reason="length")

    arguments = dataclasses.replace(ARGUMENTS, keepalive_s=0.001)
    worker = WorkerEngine(Engine(script), arguments, shut_down=Left(), make_chains=chains)
    await worker.start(1)
    assert [chunk["token_ids"] for chunk in await collect(worker, request())] == [[], [6]]
    await worker.cleanup()


async def test_load_follows_the_tokens() -> None:
    worker, _, _ = await started()
    publisher = Publisher()
    worker.attach_snapshot_publisher(publisher)
    await collect(worker, request())
    assert publisher.used == [0, 1, 2, 0]


async def test_a_bad_request_is_refused_before_the_engine_sees_it() -> None:
    async def unreachable(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        raise AssertionError("the engine was called")
        yield

    worker, _, _ = await started(unreachable)
    with pytest.raises(exceptions.InvalidArgument, match=r"^token_ids: token id 50 is not in the vocabulary of 50$"):
        await collect(worker, request(token_ids=[50]))
    assert outcome(worker, "refused") == 1
    assert len(worker.server.in_flight) == 0


@pytest.mark.parametrize(
    ("error", "raised", "name"),
    [
        (InvalidRequest("presence_penalty", "is not served"), exceptions.InvalidArgument, "refused"),
        (Overloaded("queue full"), exceptions.HttpError, "overloaded"),
        (Draining("given away"), exceptions.EngineShutdown, "migrated"),
    ],
)
@pytest.mark.parametrize("after", [0, 2])
async def test_errors_of_the_engine(error: Exception, raised: type[Exception], name: str, after: int) -> None:
    worker, _, left = await started(raising(error, after))
    with pytest.raises(raised, match=str(error)):
        await collect(worker, request())
    assert outcome(worker, name) == 1
    assert len(worker.server.in_flight) == 0
    assert left.times == 0


async def test_a_failed_request_is_an_error() -> None:
    async def fails(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5])
        yield TokenDelta([6], finish_reason="error", error="processor Bad raised")

    worker, _, _ = await started(fails)
    with pytest.raises(exceptions.InvalidArgument, match="processor Bad raised"):
        await collect(worker, request())
    assert outcome(worker, "failed") == 1


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2), (1, 2, 3)])
async def test_tokens_before_an_error_are_sent(cuts: tuple[int, ...]) -> None:
    """However many of them the engine hands over with it."""
    tokens = [5, 6, 7]

    async def fails(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        for start, end in pairwise([0, *cuts]):
            yield TokenDelta(tokens[start:end])
        yield TokenDelta(tokens[max(cuts, default=0) :], finish_reason="error", error="processor Bad raised")

    worker, _, _ = await started(fails)
    sent: list[int] = []

    async def read() -> None:
        async for chunk in worker.generate(request(), Context("a")):
            sent.extend(chunk["token_ids"])

    with pytest.raises(exceptions.InvalidArgument, match="processor Bad raised"):
        await read()
    assert sent == tokens


WANTED: dict[str, Any] = {"annotations": [WANTS_REFUSAL]}


async def test_a_refusal_is_data_where_it_is_asked_for() -> None:
    worker, _, _ = await started(raising(Overloaded("queue full")))
    (chunk,) = await collect(worker, request(token_ids=[50], **WANTED))
    message = "token_ids: token id 50 is not in the vocabulary of 50"
    assert chunk["engine_data"] == {REFUSAL: {"field": "token_ids", "message": message}}
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "stop")
    assert outcome(worker, "refused") == 1
    with pytest.raises(exceptions.HttpError, match="queue full"):  # may be tried elsewhere
        await collect(worker, request(**WANTED))


async def test_an_error_behind_the_first_chunk_is_data_too() -> None:
    worker, _, _ = await started(raising(InvalidRequest("top_p", "is bad"), 2))
    *begun, last = await collect(worker, request(**WANTED))
    assert sum(len(chunk["token_ids"]) for chunk in begun) > 0
    assert last["engine_data"] == {REFUSAL: {"field": "top_p", "message": "top_p: is bad"}}
    with pytest.raises(exceptions.InvalidArgument, match="top_p: is bad"):
        await collect(worker, request())


async def test_what_is_only_checked_is_not_computed() -> None:
    async def unreachable(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        raise AssertionError("the engine was called")
        yield

    worker, _, _ = await started(unreachable)
    (chunk,) = await collect(worker, request(annotations=[WANTS_REFUSAL, ONLY_CHECKED]))
    assert (chunk["token_ids"], "engine_data" in chunk) == ([], False)
    (chunk,) = await collect(worker, request(token_ids=[50], annotations=[WANTS_REFUSAL, ONLY_CHECKED]))
    assert chunk["engine_data"][REFUSAL]["field"] == "token_ids"
    assert len(worker.server.in_flight) == 0
    assert (outcome(worker, "stop"), outcome(worker, "refused")) == (1, 1)
    found = worker.server.metrics.registry.get_sample_value
    assert found("dlw_tokens_total", {"kind": "prompt"}) == found("dlw_request_duration_seconds_count") == 0


async def test_what_is_only_checked_needs_no_kv() -> None:
    """No prefill worker has computed its prompt, and the decode worker does not compute it."""
    given = ["--model-path", "/m", "--disaggregation-mode", "decode", "--max-local-prefills", "0"]
    worker = WorkerEngine(FakeEngine(two_tokens), parse_arguments(given, {}), seal=SEAL, make_chains=chains)
    await worker.start(1)
    (chunk,) = await collect(worker, request(annotations=[WANTS_REFUSAL, ONLY_CHECKED]))
    assert "engine_data" not in chunk
    assert not worker.server.disaggregation.counts


async def test_unknown_errors_hide_details_and_many_break_the_engine() -> None:
    worker, engine, left = await started(raising(RuntimeError("secret path")))
    for _ in range(7):
        with pytest.raises(exceptions.Unknown, match=r"^internal error$"):
            await collect(worker, request())
    assert (worker.server.broken, left.times) == (None, 0)
    with pytest.raises(exceptions.Unknown):
        await collect(worker, request())
    assert worker.server.broken == "8 unknown errors within 60 s"
    assert left.times == 1
    assert engine.given_away.is_set()
    with pytest.raises(exceptions.EngineShutdown):
        await collect(worker, request())


async def test_a_broken_engine_makes_the_worker_leave_once() -> None:
    worker, _, left = await started(raising(EngineBroken("device lost"), after=1))
    for _ in range(3):
        with pytest.raises(exceptions.EngineShutdown, match="device lost"):
            await collect(worker, request())
    assert left.times == 1
    assert worker.server.broken == "device lost"


async def test_abort_frees_at_once_even_if_the_stream_is_never_closed() -> None:
    worker, engine, _ = await started()
    stream = worker.generate(request(), Context("a"))
    await anext(stream)
    assert len(worker.server.in_flight) == 1
    await worker.abort(Context("a"))
    assert engine.aborted == ["a"]
    assert len(worker.server.in_flight) == 0
    await stream.aclose()


async def test_a_stream_that_the_garbage_collector_closes_is_no_error() -> None:
    """The runtime drops the stream of a client that left, and the collector runs in whichever
    thread it likes.
    """
    worker, _, _ = await started()
    stream = worker.generate(request(), Context("a"))
    await anext(stream)

    def close() -> None:
        with contextlib.suppress(StopIteration):
            stream.aclose().send(None)

    await asyncio.to_thread(close)
    await worker.server.in_flight.wait_empty(5.0)
    assert len(worker.server.in_flight) == 0
    assert outcomes(worker) == {"cancelled": 1}


async def test_a_dropped_stream_counts_as_cancelled() -> None:
    worker, _, _ = await started()
    stream = worker.generate(request(), Context("a"))
    await anext(stream)
    await stream.aclose()
    assert outcomes(worker) == {"cancelled": 1}


async def test_a_stream_dropped_after_its_last_chunk_counts_once() -> None:
    worker, _, _ = await started()
    stream = worker.generate(request(), Context("a"))
    while "finish_reason" not in await anext(stream):
        pass
    await stream.aclose()
    assert outcomes(worker) == {"length": 1}


async def test_the_same_id_twice() -> None:
    worker, _, _ = await started()
    first = worker.generate(request(), Context("a"))
    await anext(first)
    with pytest.raises(exceptions.InvalidArgument, match="'a' is being served already"):
        await collect(worker, request())
    assert [chunk["token_ids"] async for chunk in first] == [[6]]


async def test_cleanup_drains_hands_off_and_stops() -> None:
    async def held(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5])
        await engine.given_away.wait()
        raise Draining("given away")

    worker, engine, _ = await started(held)
    stream = worker.generate(request(), Context("a"))
    await anext(stream)
    rest = asyncio.create_task(anext(stream))
    await worker.cleanup()
    with pytest.raises(exceptions.EngineShutdown, match="given away"):
        await rest
    assert engine.num_stops == 1
    with pytest.raises(exceptions.EngineShutdown):
        await collect(worker, request(), "b")
    await worker.cleanup()
    assert worker.server.broken is None


async def test_the_second_signal_hands_off_at_once() -> None:
    async def held(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([5])
        await engine.given_away.wait()
        raise Draining("given away")

    engine = FakeEngine(held)
    patient = parse_arguments(["--model-path", "/models/tiny", "--drain-timeout-s", "1000"], {})
    worker = WorkerEngine(engine, patient, shut_down=Left(), make_chains=chains)
    await worker.start(1)
    stream = worker.generate(request(), Context("a"))
    await anext(stream)
    rest = asyncio.create_task(anext(stream))
    worker.server.signalled()
    cleaning = asyncio.create_task(worker.cleanup())
    await asyncio.sleep(0)
    assert not engine.given_away.is_set()
    worker.server.signalled()
    with pytest.raises(exceptions.EngineShutdown):
        await rest
    await cleaning


async def test_cleanup_after_a_failed_start() -> None:
    engine = FakeEngine(two_tokens)
    engine.failure = StartupError("no weights in\n/models/tiny")
    worker = WorkerEngine(engine, ARGUMENTS, shut_down=Left())
    with pytest.raises(StartupError):
        await worker.start(1)
    assert worker.server.startup_error == "no weights in /models/tiny"
    await worker.cleanup()
    assert engine.num_stops == 1


async def test_a_worker_that_is_told_to_stop_loads_nothing() -> None:
    """Before the engine has anything to stop: the runtime may wait for a server before it loads."""
    engine = FakeEngine(two_tokens)
    engine.failure = AssertionError("the engine was started")
    worker = WorkerEngine(engine, ARGUMENTS, shut_down=Left(), make_chains=chains)
    worker.server.signalled()
    with pytest.raises(StartupError, match="told to stop before the model was loaded"):
        await worker.start(1)
    await worker.cleanup()


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
async def test_only_decode_workers_receive_kv(role: str) -> None:
    arguments = parse_arguments(["--model-path", "/m", "--disaggregation-mode", role], {})
    worker = WorkerEngine(FakeEngine(two_tokens), arguments, seal=SEAL, make_chains=chains)
    await worker.start(1)
    with pytest.raises(exceptions.InvalidArgument, match=f"prefill_result: this is no decode worker, it is {role}"):
        await collect(worker, request(prefill_result={"disaggregated_params": {}}))


async def test_a_decode_worker_prefills_locally_unless_told_not_to() -> None:
    for most in ("1", "0"):
        given = ["--model-path", "/m", "--disaggregation-mode", "decode", "--max-local-prefills", most]
        worker = WorkerEngine(FakeEngine(two_tokens), parse_arguments(given, {}), seal=SEAL, make_chains=chains)
        await worker.start(1)
        if most == "0":
            with pytest.raises(exceptions.InvalidArgument, match=r"prefill_result\.disaggregated_params: is missing"):
                await collect(worker, request())
        else:
            for _ in range(3):  # one after the other: each is released
                assert await collect(worker, request())
            assert (
                worker.server.metrics.registry.get_sample_value("dlw_local_prefills_total", {"reason": "missing"}) == 3
            )
        with pytest.raises(exceptions.InvalidArgument, match=r"disaggregated_params: must be of format"):
            await collect(worker, request(prefill_result={"disaggregated_params": {"sample_handle": "b917"}}))
        assert await collect(worker, request(_HEALTH_CHECK=True))


@pytest.mark.parametrize("ending", ["first token", "abort", "dropped stream"])
async def test_a_local_prefill_is_counted_until_it_ends_and_once(ending: str) -> None:
    given = ["--model-path", "/m", "--disaggregation-mode", "decode", "--max-local-prefills", "1"]
    go_on = asyncio.Event()

    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        if ending != "first token":
            await go_on.wait()
        yield TokenDelta([5])
        await go_on.wait()
        yield TokenDelta([6], finish_reason="length")

    worker = WorkerEngine(FakeEngine(script), parse_arguments(given, {}), seal=SEAL, make_chains=chains)
    await worker.start(1)
    context = Context("first")
    stream = worker.generate(request(), context)
    first = asyncio.ensure_future(anext(stream))
    while worker.server.disaggregation.num_local_prefills == 0 and not first.done():
        await asyncio.sleep(0)
    if ending == "first token":
        await first
    else:
        with pytest.raises(
            exceptions.HttpError, match="1 prompts without a KV transfer are being computed here already"
        ):
            await collect(worker, request(), "second")
        if ending == "abort":
            await worker.abort(context)
        else:
            first.cancel()
            await asyncio.wait([first])
            await stream.aclose()
    assert worker.server.disaggregation.num_local_prefills == 0
    go_on.set()
    await asyncio.wait([first])
    await stream.aclose()
    assert await collect(worker, request(), "third")


async def test_the_health_probe_is_a_request_like_any_other() -> None:
    worker, _, _ = await started()
    payload = await worker.health_check_payload()
    assert payload is not None
    chunks = await collect(worker, payload)  # type: ignore[arg-type]
    assert chunks[-1]["finish_reason"] == "length"


async def test_info() -> None:
    worker, _, _ = await started()
    assert worker.supported_controls() == {"info", "logits_processors"}
    listed = await worker.engine_control("logits_processors", {})
    assert listed["status"] == "ok"
    assert "min_tokens" in {each["name"] for each in listed["processors"]}
    info = await worker.engine_control("info", {})
    assert (info["engine"], info["model"], info["in_flight"], info["draining"]) == ("fake", "tiny", 0, False)
    assert (await worker.engine_control("reset", {}))["status"] == "error"


class SelfReportingEngine(FakeEngine):
    """One whose work is done in another process."""

    def tell_broken(self, callback: Callable[[str], None]) -> None:
        self.broken = callback

    def tell_load(self, callback: Callable[[int, int], None]) -> None:
        self.load = callback


async def test_an_engine_that_reports_for_itself() -> None:
    left: list[bool] = []
    engine = SelfReportingEngine(two_tokens)
    worker = WorkerEngine(engine, ARGUMENTS, shut_down=lambda: left.append(True), make_chains=chains)
    await worker.start(0)
    publisher = Publisher()
    worker.attach_snapshot_publisher(publisher)
    engine.load(7, 20)
    assert publisher.used[-1] == 7
    engine.broken("the executor died")
    engine.broken("and again")
    assert (worker.server.broken, left) == ("the executor died", [True])


async def test_only_a_clients_seed_reaches_an_engine_that_pays_for_it() -> None:
    seeds: list[int | None] = []

    async def script(request_id: str, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        seeds.append(params.seed)
        yield TokenDelta([5], finish_reason="length")

    class Paying(FakeEngine):
        async def start(self) -> EngineInfo:
            return dataclasses.replace(INFO, draws_by_seed=False)

    for kind in (FakeEngine, Paying):
        worker = WorkerEngine(kind(script), ARGUMENTS, shut_down=lambda: None, make_chains=chains)
        await worker.start(0)
        for options in ({}, {"seed": 4}):
            request: Any = {"token_ids": [1, 2], "sampling_options": {"temperature": 1.0, **options}}
            _ = [chunk async for chunk in worker.generate(request, Context())]
    assert isinstance(seeds[0], int)
    assert seeds[1:] == [4, None, 4]
