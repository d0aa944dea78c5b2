"""The vLLM engine on a double of ``AsyncLLM``: streams, processors, failures, receipts, its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import (
    CONTEXT,
    EOS,
    PICTURE_TOKENS,
    VOCAB_SIZE,
    Busy,
    Died,
    FakeLlm,
    collect,
    package,
    raw_logits,
    running,
)

from adapters.basic import ForcedSequenceProcessor
from adapters.chain import ProcessorChain
from adapters.contract import Context, Edit, Force, Processor, Reads, ShapingProcessor, Stage, SteeringProcessor
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.masks import BannedTokens
from adapters.processors.penalties import PresencePenalty, RepetitionPenalty
from adapters.processors.stochastic import Mirostat
from adapters.trtllm import create_trtllm_adapters
from adapters.vllm.reports import MAX_RECEIPTS, REPORTS, Reports
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest, KeepKv, RequestHints
from worker.engines.images import ImageInput
from worker.engines.vllm import VllmConfig, VllmEngine
from worker.engines.vllm.core_reports import CoreReports
from worker.engines.weights import WeightVersion
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded, RequestFailed, StartupError
from worker.sampling import SamplingParams

PROMPT = [9, 30, 41]


class Raises(ShapingProcessor):
    """A processor that fails at its third token."""

    name = "raises"
    stage = BannedTokens.stage

    def __init__(self) -> None:
        self.calls = 0

    def shape(self, logits: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("secret")


def chain(*processors: Processor, receipt: bool = False) -> ProcessorChain:
    made = ProcessorChain(processors, Context(Vocabulary(VOCAB_SIZE), frozenset({EOS})), step_budget_s=60.0)
    made.wants_receipt = receipt
    return made


def one(kind: type[Processor], **args: Any) -> Processor:
    (built,) = kind.build(kind.Args.model_validate(args), Context(Vocabulary(VOCAB_SIZE), frozenset({EOS})))
    return built


def request(
    *processors: Processor, generated: Sequence[int] = (), receipt: bool = False, **fields: Any
) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 6, **fields})
    made = chain(*processors, receipt=receipt) if processors or receipt else None
    return EngineRequest("r", PROMPT, params, made, generated_token_ids=generated, choice=0)


def greedy(count: int, tokens: Sequence[int] = PROMPT) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(int(raw_logits(found).argmax()))
    return found[len(tokens) :]


async def test_an_answer_without_processors() -> None:
    async with running() as (engine, llm):
        found = await collect(engine, request(logprobs=2, prompt_logprobs=1))
        assert (found.token_ids, found.finish_reason) == (greedy(6), "length")
        assert found.receipt is None
        assert found.logprobs is not None
        assert [[entry.rank for entry in entries] for entries in found.logprobs] == [[1, 1, 2]] * 6
        assert found.prompt_logprobs is not None
        assert [None if each is None else each[0].token_id for each in found.prompt_logprobs] == [None, *PROMPT[1:]]
        assert (found.num_cached_tokens, found.num_preemptions) == (3, 0)
    (params,) = llm.params
    assert params.temperature == 0.0
    assert params.extra_args is None
    assert params.stop_token_ids == [EOS]
    assert llm.aborted == []
    assert (llm.is_shut_down, llm.reads_at_end) == (True, False)


async def test_stop_tokens_are_shown_only_if_asked_for() -> None:
    third = greedy(3)[2]
    async with running() as (engine, _):
        hidden = await collect(engine, request(stop_token_ids=[third], logprobs=0))
        shown = await collect(engine, request(stop_token_ids=[third], include_stop_str_in_output=True))
    assert (hidden.token_ids, hidden.finish_reason, hidden.stop_reason) == (greedy(2), "stop", third)
    assert hidden.end_logprobs is not None
    assert hidden.end_logprobs[0].token_id == third
    assert len(hidden.logprobs or ()) == 2
    assert (shown.token_ids, shown.stop_reason) == (greedy(3), third)


async def test_processors_edit_tokens_and_receipts_count_each() -> None:
    async with running() as (engine, _):
        forced = one(ForcedPrefix, token_ids=[40, 41, 42])
        found = await collect(engine, request(forced, receipt=True, max_tokens=3))
    assert found.token_ids == [40, 41, 42]
    assert found.receipt is not None
    assert [record.tokens_forced for record in found.receipt.records] == [3]
    assert found.engine_data is not None
    assert found.engine_data["logits_processors"]["prompt_length"] == 3  # type: ignore[index]


@pytest.mark.parametrize("max_tokens", [2, 50])
async def test_an_answer_that_the_worker_ends_has_its_receipt(max_tokens: int) -> None:
    """At a stop string, which vLLM does not see: it goes on, or has ended by then."""
    async with running() as (engine, _):
        forced = one(ForcedPrefix, token_ids=[40, 41, 42])
        stream = engine.generate(request(forced, receipt=True, max_tokens=max_tokens))
        first = await anext(stream)
        await asyncio.sleep(0.05)
        await engine.add_receipt("r", first, len(PROMPT))
        assert first.receipt is not None
        assert [record.tokens_forced for record in first.receipt.before(len(PROMPT) + 1).records] == [1]
        assert first.engine_data is not None
        await stream.aclose()
        await engine.add_receipt("r", first, len(PROMPT))
        await asyncio.gather(*engine._drops)
        assert not REPORTS._chains


class ForceLast(SteeringProcessor):
    """Forces token 42 as the last of so many."""

    name = "force_last"
    stage = Stage.FORCE
    reads = Reads.GENERATED
    counts_down = True

    def __init__(self, most: int) -> None:
        self._most = most

    def edit(self) -> Edit | None:
        return Force(42) if self.num_generated == self._most - 1 else None


@pytest.mark.parametrize(("max_tokens", "fits"), [(CONTEXT - len(PROMPT) - PICTURE_TOKENS, True), (90, False)])
async def test_a_countdown_beside_pictures_has_its_room(max_tokens: int, fits: bool) -> None:
    """Pictures became tokens, and the context ended the answer before its last phrase."""
    plain = replace(request(max_tokens=max_tokens, ignore_eos=True), images=(ImageInput("here", "data:,"),))
    counted = replace(plain, chain=chain(ForceLast(max_tokens)))
    async with running() as (engine, _):
        engine._images = SimpleNamespace(load=loaded)  # type: ignore[assignment]
        assert (await collect(engine, plain)).num_prompt_tokens == len(PROMPT) + PICTURE_TOKENS
        if not fits:
            with pytest.raises(InvalidRequest, match=r"^stop_conditions\.max_tokens: must be at most 73: force_last "):
                await collect(engine, counted)
            return
        found = await collect(engine, counted)
    assert (len(found.token_ids), found.token_ids[-1]) == (max_tokens, 42)


async def loaded(images: Sequence[ImageInput]) -> list[str]:
    return [image.url for image in images]


async def test_a_seed_fixes_the_tokens_of_each_choice() -> None:
    async def ask(engine: VllmEngine, seed: int, choice: int = 0) -> list[int]:
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
        return (await collect(engine, EngineRequest("r", PROMPT, params, choice=choice))).token_ids

    async with running() as (engine, llm):
        first, again, other = await ask(engine, 1), await ask(engine, 1), await ask(engine, 1, choice=1)
    assert first == again != other
    assert all(params.temperature == 1.0 for params in llm.params)  # one token is left to sample


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}])
async def test_a_failing_processor_ends_its_request_with_an_error(fields: dict[str, Any]) -> None:
    async with running() as (engine, llm):
        found = await collect(engine, request(Raises(), max_tokens=40, **fields))
        assert found.finish_reason == "error"
        assert found.token_ids == greedy(2)
        assert found.failure is not None
        assert (found.failure.processor, found.failure.reason) == ("raises", "raised")
        assert str(found.failure) == found.error
        assert "secret" not in str(found.error)
        assert found.receipt is not None
        assert (await collect(engine, request())).token_ids == greedy(6)
        assert len(llm.aborted) == bool(fields)  # without an end token vLLM would go on
        assert engine.num_unfinished() == 0


class Unloadable(BannedTokens):
    """Exits where it is unpickled, as a module does that is imported then."""

    name = "acme/unloadable"

    def __setstate__(self, state: object) -> None:
        raise SystemExit(0)


async def test_a_processor_that_vllms_process_cannot_load_is_named() -> None:
    async with running() as (engine, _):
        found = await collect(engine, request(one(BannedTokens, token_ids=[5]), one(Unloadable, token_ids=[4])))
        assert found.error == "logits processor acme/unloadable: cannot be loaded in vLLM's process (SystemExit)"
        assert (await collect(engine, request())).token_ids == greedy(6)


async def test_the_smoke_test_runs_as_a_callable() -> None:
    forced = ForcedSequenceProcessor([5, 6, 7], EOS, prompt_length=len(PROMPT))
    async with running() as (engine, _):
        found = await collect(engine, request(logits_processor=create_trtllm_adapters([forced], end_id=EOS)))
    assert (found.token_ids, found.finish_reason) == ([5, 6, 7], "stop")


async def test_a_migrated_request_goes_on_as_one() -> None:
    penalties: dict[str, Any] = {"presence_penalty": 1.5, "repetition_penalty": 1.4, "min_tokens": 8}
    processors = [one(RepetitionPenalty, penalty=1.4), one(PresencePenalty, penalty=1.5)]
    async with running() as (engine, llm):
        whole = (await collect(engine, request(*processors, max_tokens=10, min_tokens=8))).token_ids
        rest = await collect(engine, request(generated=whole[:4], max_tokens=10, prompt_logprobs=1, **penalties))
    assert [*whole[:4], *rest.token_ids] == whole
    assert rest.prompt_logprobs is None  # which came with the first of the tokens, as on the embedded engine
    assert rest.receipt is not None
    assert (rest.receipt.mode, rest.receipt.replayed) == ("migrated", 4)
    assert llm.params[-1].max_tokens == 6


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: request(one(Mirostat, tau=3.0, eta=0.1), generated=[3], temperature=1.0), "cannot go on"),
        (lambda: request(logprobs_mode="processed"), "vLLM reports raw ones only"),
        (lambda: request(n=2, best_of=2, temperature=1.0), "each answer is a request of its own"),
        (lambda: request(use_beam_search=True), "this worker has no beam search"),
        (lambda: EngineRequest("r", [], SamplingParams()), "at least one token"),
        (lambda: EngineRequest("r", [VOCAB_SIZE], SamplingParams()), "token ids from 0 to 63"),
        (lambda: EngineRequest("r", [5] * 96, SamplingParams()), "must be shorter than the context"),
        (lambda: EngineRequest("r", PROMPT, SamplingParams(), kv=KeepKv()), "this is an aggregated worker"),
    ],
)
async def test_what_cannot_be_kept_is_refused(refused: Any, message: str) -> None:
    async with running() as (engine, llm):
        with pytest.raises(InvalidRequest, match=message):
            await collect(engine, refused())
        assert llm.params == []
        assert engine.num_unfinished() == 0


async def test_hints_and_salt_reach_vllm() -> None:
    hints = RequestHints({"traceparent": "00-1"}, priority=0.5)
    async with running() as (engine, llm):
        await collect(engine, EngineRequest("r", PROMPT, SamplingParams(max_tokens=1), cache_salt="s", hints=hints))
    assert llm.hints == [{"priority": -512, "trace_headers": {"traceparent": "00-1"}, "lora_request": None}]
    assert llm.prompts == [{"prompt_token_ids": PROMPT, "cache_salt": "s"}]


async def test_each_of_many_failed_requests_hears_of_it() -> None:
    """The first one that asks takes the failures of all others."""
    count = 3000
    failed = [{"report": str(n), "processor": "acme", "reason": "nan", "message": "m"} for n in range(count)]

    class Core:
        async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            taken = failed[:]
            failed.clear()
            return [taken]

    reports = CoreReports(Core(), count)
    assert all([await reports.failure(str(number)) for number in range(count)])
    failed += [{"report": f"gone-{n}", "processor": "acme", "reason": "nan", "message": "m"} for n in range(2 * count)]
    assert await reports.failure("another") is None
    assert len(reports._failures) < 2 * count  # those that nobody asks for are not kept for ever


async def test_a_request_that_leaves_takes_no_failure_of_others() -> None:
    """It has asked for its own, and with it got those of all: they are lost to the engine."""
    failed = [{"report": "another", "processor": "acme", "reason": "nan", "message": "m"}]
    answering = asyncio.Event()

    class Core:
        async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            taken = failed[:]
            failed.clear()
            await answering.wait()
            return [taken]

    reports = CoreReports(Core(), 8)
    leaving = asyncio.create_task(reports.failure("leaving"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    other = asyncio.create_task(reports.failure("another"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    answering.set()
    found = await other
    assert leaving.cancelled()
    assert found is not None
    assert found.reason == "nan"


def test_a_worker_keeps_the_receipts_of_all_requests() -> None:
    count = MAX_RECEIPTS + 10
    for reports, num_kept in ((Reports(), MAX_RECEIPTS), (Reports(), count)):
        if num_kept == count:
            reports.keep_all()
        for number in range(count):
            reports.began(str(number), chain())
        assert sum(reports.take_receipt(str(number)) is not None for number in range(count)) == num_kept


async def test_abort_frees_the_request_and_its_chain() -> None:
    async with running() as (engine, llm):
        stream = engine.generate(request(one(ForcedPrefix, token_ids=[40]), max_tokens=50))
        assert (await anext(stream)).token_ids == [40]
        llm.gate.clear()
        engine.abort("r")
        rest = [delta async for delta in stream]
        assert rest[-1].finish_reason == "cancelled"
        await asyncio.sleep(0.01)
        await asyncio.gather(*engine._drops)
        assert len(llm.aborted) == 1
        assert not REPORTS._chains
        assert engine.num_unfinished() == 0


async def test_a_dropped_stream_frees_the_request() -> None:
    async with running() as (engine, llm):
        stream = engine.generate(request(max_tokens=50))
        await anext(stream)
        llm.gate.clear()
        await stream.aclose()
        await asyncio.sleep(0.01)
        assert len(llm.aborted) == 1


async def test_a_full_queue_and_an_id_in_use() -> None:
    async with running(VllmConfig(model_path="fake", max_queue=0)) as (engine, llm):
        llm.gate.clear()
        streams = [engine.generate(EngineRequest(str(i), PROMPT, SamplingParams())) for i in range(4)]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await collect(engine, request())
        with pytest.raises(InvalidRequest, match="in use"):
            await collect(engine, EngineRequest("0", PROMPT, SamplingParams()))
        engine.keep_alive()
        engine.keep_alive()
        assert all(delta.is_empty for delta in await asyncio.gather(*waiting))
        assert engine.migrate_all() == 4
        for stream in streams:
            with pytest.raises(Draining):
                await anext(stream)
        with pytest.raises(Draining):
            await collect(engine, request())


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ValueError("too much"), InvalidRequest),
        (RuntimeError("odd"), RequestFailed),
        (Busy("cannot accept new requests"), Overloaded),
    ],
)
async def test_an_exception_of_vllms_ends_one_request(failure: Exception, expected: type[Exception]) -> None:
    async with running() as (engine, llm):
        llm.failure = failure
        with pytest.raises(expected, match=str(failure)):
            await collect(engine, request())
        llm.failure = None
        assert (await collect(engine, request())).finish_reason == "length"


async def test_an_exception_without_a_text_is_told_by_its_cause() -> None:
    """As vLLM's ``EngineGenerateError``, in which it wraps what it does not expect."""
    async with running() as (engine, llm):
        llm.failure = RuntimeError()
        llm.failure.__cause__ = KeyError("odd")
        with pytest.raises(RequestFailed, match=r"^vLLM: KeyError: 'odd'$"):
            await collect(engine, request())


async def test_a_dead_engine_ends_every_request() -> None:
    async with running() as (engine, llm):
        told: list[str] = []
        engine.tell_broken(told.append)
        llm.failure = Died("its process is gone")
        with pytest.raises(EngineBroken, match="its process is gone"):
            await collect(engine, request())
        with pytest.raises(EngineBroken):
            await collect(engine, request())
        assert len(told) == 1


@pytest.mark.parametrize("ending", ["dies", "stops"])
async def test_a_receipt_is_not_waited_for_for_ever(ending: str) -> None:
    """At a stop string the worker itself waits for it, and vLLM leaves calls of a dead engine
    waiting.
    """
    async with running() as (engine, llm):
        stream = engine.generate(request(one(ForcedPrefix, token_ids=[40, 41]), receipt=True, max_tokens=50))
        first = await anext(stream)
        llm.gate.clear()
        llm.answers.clear()
        adding = asyncio.create_task(engine.add_receipt("r", first, len(PROMPT)))
        await asyncio.sleep(0.01)
        assert not adding.done()
        if ending == "dies":
            engine._break("vLLM's engine died")
        else:
            await engine.stop()
        await asyncio.wait_for(adding, 5)
        with pytest.raises(EngineBroken if ending == "dies" else Draining):
            await anext(stream)


async def test_vllm_gets_a_request_when_it_may_begin() -> None:
    async with running() as (engine, llm):
        may_begin = asyncio.Event()
        weights = SimpleNamespace(is_busy=False, weight_version=WeightVersion(), fail=lambda failure: None)
        engine.weights = weights  # type: ignore[assignment]
        weights.admit = lambda request: may_begin.wait()
        asked = asyncio.create_task(collect(engine, request()))
        await asyncio.sleep(0.01)
        assert llm.params == []
        may_begin.set()
        assert ((await asked).finish_reason, len(llm.params)) == ("length", 1)


async def test_time_in_which_the_worker_was_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.vllm.engine.WATCH_S", 0.01)
    async with running(VllmConfig(model_path="fake", step_timeout_s=0.2)) as (engine, llm):
        llm.gate.clear()
        answering = asyncio.create_task(collect(engine, request()))
        await asyncio.sleep(0.03)
        time.sleep(0.3)  # as SIGSTOP, or a frozen container
        await asyncio.sleep(0.03)
        llm.gate.set()
        assert (await answering).finish_reason == "length"


async def test_one_that_is_silent_for_too_long_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.vllm.engine.WATCH_S", 0.01)
    async with running(VllmConfig(model_path="fake", step_timeout_s=0.05)) as (engine, llm):
        llm.gate.clear()
        with pytest.raises(EngineBroken, match=r"no output for 0\.05 s"):
            await collect(engine, request())


async def test_a_consumer_that_is_behind_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has ended the request, and nothing of it is to come; one that begins is not late."""
    monkeypatch.setattr("worker.engines.vllm.engine.WATCH_S", 0.01)
    async with running(VllmConfig(model_path="fake", step_timeout_s=0.4)) as (engine, llm):
        stream = engine.generate(request(max_tokens=2))
        assert (await anext(stream)).token_ids == greedy(1)
        await asyncio.sleep(0.6)
        llm.gate.clear()
        params = SamplingParams(max_tokens=1)
        answering = asyncio.create_task(collect(engine, EngineRequest("other", PROMPT, params)))
        await asyncio.sleep(0.1)
        llm.gate.set()
        assert (await answering).finish_reason == "length"
        assert [delta.token_ids async for delta in stream] == [greedy(2)[1:]]


class _Deaf(FakeLlm):
    """Does not apply processors."""

    def _output(self, params: Any, raw: Any, given: Any, output: list[int], reason: str | None) -> Any:
        if params.extra_args is not None:
            output[-1] = 2
        return super()._output(params, raw, given, output, reason)


class _Mute(FakeLlm):
    """Reports no receipts."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [] if "receipt" in method else await super().collective_rpc(method, args)


class _Broken(FakeLlm):
    """Does not load."""

    @classmethod
    def from_engine_args(cls, arguments: Any, stat_loggers: list[Any]) -> FakeLlm:
        raise RuntimeError("out of\nmemory")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Deaf, "edits of logits processors do not reach vLLM 0.0's sampler"),
        (_Mute, "receipts of logits processors do not come back from vLLM 0.0"),
        (_Broken, "vLLM 0.0: out of memory"),
    ],
)
async def test_what_keeps_it_from_starting_is_one_line(kind: type[FakeLlm], message: str) -> None:
    from dataclasses import replace

    engine = VllmEngine(VllmConfig(model_path="fake"), lambda: replace(package(), async_llm=kind))
    with pytest.raises(StartupError, match=message):
        await engine.start()
    await engine.stop()
