"""Streams over the step thread: joining, leaving, refusing, and ends of all kinds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from engine_doubles import END, ScriptedModel, StartEngine, collect, config

from worker.engines import EngineRequest, RequestHints, StopsLoading, TokenDelta
from worker.engines.embedded import EmbeddedEngine, Plan
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.serving import pacing
from worker.engines.embedded.serving.outbox import RUN_AHEAD
from worker.engines.embedded.serving.step_thread import Call
from worker.engines.embedded.step import Stepper
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded, StartupError
from worker.sampling import SamplingParams

PROMPT = [5, 6, 7]


def params(max_tokens: int | None = 20) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


class Gate:
    """Lets `free` forward passes through, then holds the step thread in the next one until it is
    opened.
    """

    def __init__(self) -> None:
        self.free = 0
        self.held = threading.Event()
        self._open = threading.Event()

    def __call__(self, plan: Plan, logits: torch.Tensor) -> None:
        if self.free > 0:
            self.free -= 1
            return
        self.held.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> AsyncIterator[Gate]:  # type: ignore[misc]
    gate = Gate()
    yield gate
    gate.open()  # whatever a test left behind can end


def kv_cache(engine: EmbeddedEngine) -> KvCache:
    assert engine._thread is not None
    return engine._thread._stepper.scheduler.cache


async def begin(
    engine: EmbeddedEngine, name: str, count: int | None = None
) -> asyncio.Task[tuple[list[int], TokenDelta]]:
    """A request that has been admitted."""
    before = engine.num_unfinished()
    task = asyncio.create_task(collect(engine, name, PROMPT, params(count)))
    await asyncio.sleep(0)
    assert engine.num_unfinished() == before + 1
    return task


async def test_an_answer(start_engine: StartEngine) -> None:
    model = ScriptedModel()
    engine = await start_engine(model)
    deltas = [delta async for delta in engine.generate(EngineRequest("one", PROMPT, params()))]
    assert [token for delta in deltas for token in delta.token_ids] == model.greedy(PROMPT, 20)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert all(delta.num_preemptions == 0 and delta.queue_times is not None for delta in deltas)
    assert engine.num_unfinished() == 0


async def test_many_at_once(start_engine: StartEngine) -> None:
    model = ScriptedModel()
    engine = await start_engine(model, max_num_seqs=8, max_queue=64)
    prompts = [[3 + number % 50] * (1 + number) for number in range(64)]
    answers = await asyncio.gather(
        *(collect(engine, str(number), prompt, params()) for number, prompt in enumerate(prompts))
    )
    assert [tokens for tokens, _ in answers] == [model.greedy(prompt, 20) for prompt in prompts]
    assert max(len(plan.decode) for plan in model.plans) == 8


async def test_a_consumer_that_is_behind_gets_several_tokens_at_once(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    gate.free = 1
    engine = await start_engine(model)
    slow = engine.generate(EngineRequest("slow", PROMPT, SamplingParams(max_tokens=10, ignore_eos=True, logprobs=0)))
    first = await anext(slow)
    gate.open()
    await collect(engine, "quick", PROMPT, params(30))  # ends after the slow one's last token
    rest = await anext(slow)
    assert (len(first.token_ids), len(rest.token_ids)) == (1, 9)
    assert first.token_ids + rest.token_ids == model.greedy(PROMPT, 10)
    assert rest.finish_reason == "length"
    assert rest.logprobs is not None
    assert [entries[0].token_id for entries in rest.logprobs] == rest.token_ids
    assert [delta async for delta in slow] == []


async def test_a_stream_from_which_nothing_comes_is_kept_alive(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    engine = await start_engine(model)
    stream = engine.generate(EngineRequest("one", PROMPT, params(3)))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    engine.keep_alive()
    await asyncio.sleep(0)
    assert not first.done()  # it is not silent yet
    engine.keep_alive()
    assert (await first).is_empty
    gate.open()
    deltas = [delta async for delta in stream]
    assert [token for delta in deltas for token in delta.token_ids] == model.greedy(PROMPT, 3)
    engine.keep_alive()  # nobody is left


async def test_a_consumer_that_keeps_up_gets_each_token_by_itself(start_engine: StartEngine) -> None:
    taken = threading.Semaphore(1)

    def wait_for_the_consumer(plan: Plan, logits: torch.Tensor) -> None:
        assert taken.acquire(timeout=60)

    model = ScriptedModel(wait_for_the_consumer)
    engine = await start_engine(model)
    deltas = []
    async for delta in engine.generate(EngineRequest("one", PROMPT, params())):
        deltas.append(delta.token_ids)
        taken.release()
    assert deltas == [[token] for token in model.greedy(PROMPT, 20)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers are waited for as long as it takes."""
    monkeypatch.setattr(pacing, "MAX_PAUSE_S", 600.0)


async def held(engine: EmbeddedEngine) -> None:
    while not (engine._thread and engine._thread._pacing.is_held):
        await asyncio.sleep(0)


async def start_with_a_slow_consumer(
    start_engine: StartEngine,
) -> tuple[ScriptedModel, EmbeddedEngine, AsyncGenerator[TokenDelta, None], list[int]]:
    """A model, its engine, which is held back for a stream that nobody takes any more from, and the
    tokens taken so far: more than one where the loop is slower than the model.
    """
    model = ScriptedModel()
    engine = await start_engine(model, context_length=256)
    slow = engine.generate(EngineRequest("slow", PROMPT, params(200)))
    taken = (await anext(slow)).token_ids
    await held(engine)
    return model, engine, slow, list(taken)


@pytest.mark.usefixtures("patient")
async def test_a_model_does_not_run_away_from_its_consumer(start_engine: StartEngine) -> None:
    model = ScriptedModel()
    engine = await start_engine(model, context_length=256)
    stream = engine.generate(EngineRequest("one", PROMPT, params(200)))
    tokens = (await anext(stream)).token_ids
    while len(tokens) < 200:
        if len(tokens) < 100:
            await held(engine)
        more = (await anext(stream)).token_ids
        assert len(more) <= 2 * RUN_AHEAD + 1  # those that wait, and the steps on their way to the loop
        tokens += more
    assert tokens == model.greedy(PROMPT, 200)


@pytest.mark.usefixtures("patient")
async def test_prompts_are_computed_while_consumers_are_waited_for(start_engine: StartEngine) -> None:
    _, engine, slow, tokens = await start_with_a_slow_consumer(start_engine)
    other = engine.generate(EngineRequest("other", PROMPT, params(200)))
    assert len((await anext(other)).token_ids) >= 1
    tokens += [token async for delta in slow for token in delta.token_ids]
    assert len(tokens) == 200


@pytest.mark.usefixtures("patient")
async def test_a_slow_consumer_does_not_slow_the_others(start_engine: StartEngine) -> None:
    model, engine, slow, _ = await start_with_a_slow_consumer(start_engine)
    answers = await asyncio.gather(*(collect(engine, str(number), PROMPT, params(100)) for number in range(3)))
    assert [tokens for tokens, _ in answers] == [model.greedy(PROMPT, 100)] * 3
    await slow.aclose()
    tokens, _ = await collect(engine, "last", PROMPT, params(50))
    assert tokens == model.greedy(PROMPT, 50)


async def test_an_answer_that_has_ended_holds_nobody_back(start_engine: StartEngine) -> None:
    """Though its consumer hangs."""
    engine = await start_engine(ScriptedModel())
    slow = engine.generate(EngineRequest("slow", PROMPT, params(40)))
    await anext(slow)
    await held(engine)
    while engine.num_unfinished():
        await asyncio.sleep(0.001)
    assert engine._thread is not None
    assert not engine._thread._pacing.is_held
    await slow.aclose()


async def test_stop_tokens_reach_the_last_delta(start_engine: StartEngine) -> None:
    model = ScriptedModel()
    model.by_position[6, END] = 100.0
    engine = await start_engine(model)
    tokens, last = await collect(engine, "one", PROMPT, SamplingParams())
    assert (len(tokens), last.finish_reason, last.stop_reason) == (4, "stop", END)


async def test_abort_frees_the_place_at_the_next_step(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    engine = await start_engine(model, max_num_seqs=1)
    first = await begin(engine, "first")
    second = await begin(engine, "second", 5)
    await asyncio.to_thread(gate.held.wait)
    engine.abort("first")
    gate.open()
    tokens, last = await first
    assert last.finish_reason == "cancelled"
    assert tokens == model.greedy(PROMPT, len(tokens))
    assert len(tokens) < 100
    assert (await second)[0] == model.greedy(PROMPT, 5)
    assert engine.num_unfinished() == 0
    cache = kv_cache(engine)
    assert cache.num_available == cache.num_pages


async def test_abort_of_a_waiting_request(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    engine = await start_engine(model, max_num_seqs=1)
    first, second = await begin(engine, "first", 5), await begin(engine, "second", 5)
    engine.abort("second")
    gate.open()
    tokens, last = await second
    assert (tokens, last.finish_reason) == ([], "cancelled")
    assert (await first)[0] == model.greedy(PROMPT, 5)


async def test_abort_of_the_unknown_and_of_the_finished_does_nothing(start_engine: StartEngine) -> None:
    model = ScriptedModel()
    engine = await start_engine(model)
    await collect(engine, "one", PROMPT, params())
    engine.abort("one")
    engine.abort("nobody")
    assert (await collect(engine, "one", PROMPT, params()))[0] == model.greedy(PROMPT, 20)


async def test_an_abandoned_stream_is_aborted(start_engine: StartEngine) -> None:
    model = ScriptedModel()
    engine = await start_engine(model, max_num_seqs=1)
    stream = engine.generate(EngineRequest("left", PROMPT, params(None)))
    await anext(stream)
    await stream.aclose()
    assert (await collect(engine, "next", PROMPT, params()))[0] == model.greedy(PROMPT, 20)
    assert engine.num_unfinished() == 0


async def test_an_abandoned_stream_is_computed_no_further(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    gate.free = 1
    engine = await start_engine(model)
    stream = engine.generate(EngineRequest("left", PROMPT, params(None)))
    await anext(stream)
    await asyncio.to_thread(gate.held.wait)
    await stream.aclose()
    gate.open()
    while engine.num_unfinished():
        await asyncio.sleep(0.001)
    assert len(model.plans) == 2  # the first one, and that under way


async def test_a_late_release_spares_the_next_request_of_its_id(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    gate.free = 1
    engine = await start_engine(model)
    first = engine.generate(EngineRequest("one", PROMPT, params(1)))
    assert (await anext(first)).finish_reason == "length"
    second = await begin(engine, "one", 5)
    await first.aclose()
    gate.open()
    assert (await second)[0] == model.greedy(PROMPT, 5)


async def test_a_cancelled_consumer_aborts_its_request(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    engine = await start_engine(model, max_num_seqs=1)
    task = await begin(engine, "one")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    assert (await collect(engine, "next", PROMPT, params()))[0] == model.greedy(PROMPT, 20)
    assert engine.num_unfinished() == 0


async def test_a_full_queue_refuses_at_once(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    engine = await start_engine(model, max_num_seqs=1, max_queue=2)
    admitted = [await begin(engine, str(number), 5) for number in range(3)]
    with pytest.raises(Overloaded, match="the queue is full"):
        await collect(engine, "more", PROMPT, params())
    gate.open()
    assert [tokens for tokens, _ in await asyncio.gather(*admitted)] == [model.greedy(PROMPT, 5)] * 3
    assert (await collect(engine, "more", PROMPT, params()))[1].finish_reason == "length"


async def test_a_full_queue_of_one_client_does_not_keep_another_out(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    engine = await start_engine(model, max_num_seqs=1, max_queue=2)

    async def ask(name: str, client: str | None) -> list[int]:
        stream = engine.generate(EngineRequest(name, PROMPT, params(5), hints=RequestHints(client=client)))
        return [token async for delta in stream for token in delta.token_ids]

    admitted = [asyncio.create_task(ask(str(number), "large")) for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await ask("more", None)  # who has no label is no client of its own
    admitted.append(asyncio.create_task(ask("small", "small")))
    while engine.num_unfinished() < 4:
        await asyncio.sleep(0.001)
    for client in ("large", "small", None):  # nor are as many clients' as may run exceeded
        with pytest.raises(Overloaded):
            await ask("more", client)
    with pytest.raises(Overloaded):
        await ask("more", "another")
    gate.open()
    assert await asyncio.gather(*admitted) == [model.greedy(PROMPT, 5)] * 4


async def test_an_id_in_use_is_refused_and_its_owner_untouched(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    engine = await start_engine(model)
    owner = await begin(engine, "one", 5)
    with pytest.raises(InvalidRequest, match="'one' is in use"):
        await collect(engine, "one", PROMPT, params())
    gate.open()
    assert (await owner)[0] == model.greedy(PROMPT, 5)


async def test_a_refused_request_leaves_nothing_behind(start_engine: StartEngine) -> None:
    engine = await start_engine(ScriptedModel())
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        await collect(engine, "one", [], params())
    assert engine.num_unfinished() == 0


async def test_migrate_all_ends_all_and_refuses_new_ones(start_engine: StartEngine, gate: Gate) -> None:
    engine = await start_engine(ScriptedModel(gate), max_num_seqs=2)
    tasks = [await begin(engine, str(number)) for number in range(3)]
    assert engine.migrate_all() == 3
    assert engine.num_unfinished() == 0
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, Draining)
    with pytest.raises(Draining):
        await collect(engine, "late", PROMPT, params())
    assert engine.migrate_all() == 0
    cache = kv_cache(engine)
    gate.open()
    await engine.stop()
    assert cache.num_available == cache.num_pages


async def test_migrate_all_delivers_what_was_sampled_before(start_engine: StartEngine, gate: Gate) -> None:
    model = ScriptedModel(gate)
    gate.free = 6
    engine = await start_engine(model)
    stream = engine.generate(EngineRequest("one", PROMPT, params(None)))
    tokens = (await anext(stream)).token_ids
    await asyncio.to_thread(gate.held.wait)
    engine.migrate_all()
    if len(tokens) < 6:
        tokens += (await anext(stream)).token_ids
    assert tokens == model.greedy(PROMPT, 6)
    with pytest.raises(Draining):
        await anext(stream)


@pytest.mark.parametrize("error", [RuntimeError("the device fell off"), SystemExit(3)])
async def test_a_dead_step_thread_breaks_the_engine(start_engine: StartEngine, error: BaseException) -> None:
    def die(plan: Plan, logits: torch.Tensor) -> None:
        if len(plan.decode) == 3:
            raise error

    engine = await start_engine(ScriptedModel(die))
    outcomes = await asyncio.gather(
        *(collect(engine, str(number), PROMPT, params(None)) for number in range(3)), return_exceptions=True
    )
    for outcome in outcomes:
        assert isinstance(outcome, EngineBroken)
        assert "step thread" in str(outcome)
    if isinstance(error, RuntimeError):
        assert "RuntimeError: the device fell off" in str(outcomes[0])
    with pytest.raises(EngineBroken):
        await collect(engine, "late", PROMPT, params())
    assert engine.migrate_all() == 0
    assert engine.num_unfinished() == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    ],
)
async def test_out_of_memory_in_a_step_breaks_the_engine(start_engine: StartEngine, error: Exception) -> None:
    def run_out(plan: Plan, logits: torch.Tensor) -> None:
        raise error

    engine = await start_engine(ScriptedModel(run_out))
    with pytest.raises(EngineBroken, match="out of memory"):
        await collect(engine, "one", PROMPT, params())


async def test_requests_that_a_pause_holds_back_wait(start_engine: StartEngine, gate: Gate) -> None:
    """They are in flight, and run as little as those in the queue."""
    engine = await start_engine(ScriptedModel(gate), max_num_seqs=1)
    tasks = [await begin(engine, "running", 3), await begin(engine, "waiting", 3)]
    await asyncio.to_thread(gate.held.wait)
    assert engine.load().num_running == 1  # its prompt is being computed
    thread, stepper = engine._thread, engine._stepper
    assert thread is not None
    assert stepper is not None
    shut = asyncio.get_running_loop().create_future()
    thread.tell(Call(Stepper.shut_gate, shut))
    tasks.append(await begin(engine, "later", 3))
    gate.open()
    await asyncio.gather(shut, tasks[0])
    assert (engine.load().num_running, engine.load().num_waiting) == (0, 2)
    opened = asyncio.get_running_loop().create_future()
    thread.tell(Call(Stepper.open_gate, opened))
    await asyncio.gather(opened, *tasks)
    assert engine.load().num_waiting == 0


async def test_a_call_whose_caller_has_left_is_not_made(start_engine: StartEngine, gate: Gate) -> None:
    """A pause that waits for the end of requests, and is given up, would come with their end."""
    engine = await start_engine(ScriptedModel(gate))
    task = await begin(engine, "one", 5)
    await asyncio.to_thread(gate.held.wait)
    thread, made = engine._thread, list[Stepper]()
    assert thread is not None
    left, last = (asyncio.get_running_loop().create_future() for _ in range(2))
    for done in (left, last):
        thread.tell(Call(made.append, done, when_drained=True))
    left.cancel()
    gate.open()
    await asyncio.gather(task, last)
    assert len(made) == 1


async def test_usage_tells_what_was_found_in_the_cache(start_engine: StartEngine) -> None:
    engine = await start_engine(ScriptedModel())
    prompt = [5 + position % 50 for position in range(100)]
    cached = []
    for name in ("first", "second"):
        deltas = [delta async for delta in engine.generate(EngineRequest(name, prompt, params(5)))]
        cached.append([delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens])
    assert cached == [[], [96]]


async def test_stop_ends_streams_and_is_idempotent(start_engine: StartEngine, gate: Gate) -> None:
    engine = await start_engine(ScriptedModel(gate))
    task = await begin(engine, "one")
    gate.open()
    await engine.stop()
    await engine.stop()
    with pytest.raises(Draining):
        await task
    with pytest.raises(Draining):
        await collect(engine, "late", PROMPT, params())


async def test_stop_ends_all_kv_transfers(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Stepper, "close", lambda _: closed.append(threading.current_thread().name))
    engine = await start_engine(ScriptedModel())
    await engine.stop()
    assert closed == ["embedded-step"]


async def test_stop_without_start() -> None:
    engine = EmbeddedEngine(config(), ScriptedModel())  # type: ignore[arg-type]
    await engine.stop()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_start_under_way_is_ended(is_cancelled: bool) -> None:
    """By a signal, or as the runtime cancels it; nobody waits for the thread that loads."""
    loading, goes_on = threading.Event(), threading.Event()

    def load(*_: object) -> Any:
        loading.set()
        assert goes_on.wait(60)
        raise AssertionError("nobody hears this")

    engine = EmbeddedEngine(config(), load=load)
    assert isinstance(engine, StopsLoading)
    start = asyncio.ensure_future(engine.start())
    await asyncio.to_thread(loading.wait)
    if is_cancelled:
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    else:
        engine.stop_loading()
        with pytest.raises(StartupError, match="told to stop while the model was loading"):
            await start
    await engine.stop()
    goes_on.set()
    engine.stop_loading()  # nothing is under way


async def test_generate_without_start() -> None:
    with pytest.raises(EngineBroken, match="not been started"):
        await collect(EmbeddedEngine(config(), ScriptedModel()), "one", PROMPT, params())  # type: ignore[arg-type]


async def test_start_twice(start_engine: StartEngine) -> None:
    engine = await start_engine(ScriptedModel())
    with pytest.raises(StartupError, match="twice"):
        await engine.start()


async def test_what_the_engine_says_of_itself() -> None:
    engine = EmbeddedEngine(config(context_length=100, kv_block_size=8), ScriptedModel())  # type: ignore[arg-type]
    info = await engine.start()
    try:
        assert (info.name, info.version) == ("embedded", torch.__version__)
        assert (info.context_length, info.vocab_size, info.eos_token_ids) == (100, ScriptedModel.vocab_size, (END,))
        assert (info.kv_block_size, info.total_kv_blocks) == (8, 4 * 13)
        assert len((await collect(engine, "one", PROMPT, params(None)))[0]) == 97
    finally:
        await engine.stop()


def test_importing_the_engine_needs_neither_runtime_nor_tensorrt() -> None:
    program = (
        "import sys, worker.engines.embedded\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('dynamo', 'tensorrt_llm')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


async def test_only_requests_of_one_salt_share_kv(start_engine: StartEngine) -> None:
    engine = await start_engine(ScriptedModel())
    cached = []
    for number, salt in enumerate((None, "a", "a", None, "b")):
        prompt = list(range(5, 5 + 50))
        deltas = [
            delta async for delta in engine.generate(EngineRequest(str(number), prompt, params(2), cache_salt=salt))
        ]
        cached.append(max(delta.num_cached_tokens for delta in deltas))
    assert cached == [0, 0, 48, 48, 0]


class Router:
    """What an event sink has heard, for the event loop."""

    def __init__(self) -> None:
        self.known: dict[int, list[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[None] = asyncio.Queue()

    def stored(
        self,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        assert parent_hash is None or parent_hash in self.known
        size = len(token_ids) // len(block_hashes)
        for place, each in enumerate(block_hashes):
            self.known[each] = list(token_ids[place * size : (place + 1) * size])
        self._loop.call_soon_threadsafe(self._heard.put_nowait, None)

    def removed(self, block_hashes: Sequence[int]) -> None:
        raise AssertionError("nothing is removed here")

    async def hears(self, count: int) -> None:
        while len(self.known) < count:
            await asyncio.wait_for(self._heard.get(), 60)


async def test_a_late_router_hears_of_known_blocks_at_once(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(ScriptedModel())
    prompt = list(range(5, 5 + 50))
    await collect(engine, "one", prompt, params(2))
    assert kv_cache(engine)._index.events is None
    router = Router()
    engine.report_blocks(router)
    await router.hears(3)  # at once, not with the next step: there is none
    assert sorted(router.known.values()) == sorted(prompt[start : start + 16] for start in (0, 16, 32))
    await collect(engine, "two", [*prompt, *range(60, 80)], params(2))
    await router.hears(4)
    assert len(router.known) == 4
