"""Log probabilities of a prompt's tokens: exact, whatever computes the prompt, and bounded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import engine_doubles
import pytest
import pytest_asyncio
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines import EngineRequest, KeepKv, ReadKv, TokenDelta, TokenLogprob
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.engines.embedded.logits_tap import UnusableRow
from worker.engines.embedded.offline import Engine
from worker.engines.embedded.plan import Output
from worker.engines.embedded.sampling.truncation import Controls
from worker.engines.embedded.training import _AnswerTap
from worker.errors import Draining, InvalidRequest
from worker.sampling import SamplingParams

Scores = list[list[TokenLogprob] | None]

PROMPT = [9 + place * place % 900 for place in range(150)]
TOP = 3

pytestmark = pytest.mark.usefixtures("one_thread")


def exact(path: Path, **changes: Any) -> dict[str, Any]:
    return {"model_path": path, "device": "cpu", "dtype": "float32", "numerics": "exact", **changes}


@pytest.fixture(scope="module")
def offline(checkpoints: dict[str, Path]) -> Engine:
    return Engine(**exact(checkpoints["llama"], max_num_seqs=4, max_num_batched_tokens=32))


@pytest.fixture(scope="module")
def expected(offline: Engine) -> Scores:
    return one_after_another(offline, PROMPT, TOP)


def one_after_another(engine: Engine, prompt: list[int], top: int) -> Scores:
    """The scores of a prompt whose tokens are decoded one by one, each of them forced."""
    forced = {"name": "forced_prefix", "args": {"token_ids": prompt[1:]}}
    params = SamplingParams(max_tokens=len(prompt) - 1, logprobs=top, end_id=-1)
    (result,) = engine.generate([prompt[:1]], params, processors=[forced], speculation=False)
    assert result.token_ids == prompt[1:]
    assert result.logprobs is not None
    return [None, *result.logprobs]


@settings(max_examples=examples(20))
@given(st.lists(st.integers(5, 999), min_size=2, max_size=40), st.integers(0, 20))
def test_equal_to_those_of_one_token_after_another(offline: Engine, prompt: list[int], top: int) -> None:
    (result,) = offline.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=top))
    assert result.prompt_logprobs == one_after_another(offline, prompt, top)


def scored(prompt: list[int] = PROMPT, number: str = "one", **changes: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=TOP)
    return EngineRequest(number, prompt, **({"params": params} | changes))


async def answer(engine: EmbeddedEngine, request: EngineRequest) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(request)]


def scores_of(deltas: list[TokenDelta]) -> Scores:
    """The scores of an answer, which come once: with its first token."""
    (found,) = [delta for delta in deltas if delta.prompt_logprobs is not None]
    assert found is next(delta for delta in deltas if delta.token_ids)
    assert found.prompt_logprobs is not None
    return found.prompt_logprobs


@pytest_asyncio.fixture
async def served(checkpoints: dict[str, Path]) -> AsyncIterator[Any]:
    started: list[EmbeddedEngine] = []

    async def start(**changes: Any) -> EmbeddedEngine:
        engine = EmbeddedEngine(EmbeddedConfig(**exact(checkpoints["llama"], **changes)))
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in reversed(started):
        await engine.stop()


@pytest.mark.parametrize("budget", [7, 64, 1024])
async def test_equal_however_the_prompt_is_computed(served: Any, expected: Scores, budget: int) -> None:
    """Chunks, requests beside it, and a prefix that is cached change no bit."""
    engine = await served(max_num_seqs=4, max_num_batched_tokens=budget)
    assert scores_of(await answer(engine, scored())) == expected
    again, *beside = await asyncio.gather(
        answer(engine, scored(number="again")),
        answer(engine, scored([*PROMPT[:90], 7, 8], "half")),
        answer(engine, EngineRequest("plain", PROMPT[20:60], SamplingParams(max_tokens=30, ignore_eos=True))),
    )
    assert scores_of(again) == expected
    assert scores_of(beside[0])[:90] == expected[:90]
    assert all(delta.prompt_logprobs is None for delta in beside[1])


async def test_equal_with_several_threads(served: Any, expected: Scores) -> None:
    engine = await served(max_num_batched_tokens=512)
    torch.set_num_threads(3)
    try:
        assert scores_of(await answer(engine, scored())) == expected
    finally:
        torch.set_num_threads(1)


async def test_tokens_are_those_without_scores(served: Any) -> None:
    """Also where the prefix is cached: it is computed again for the scores, and is cached after."""
    engine = await served()
    plain = SamplingParams(max_tokens=4, ignore_eos=True)
    texts = []
    for number, request in enumerate((scored(), scored(params=plain), scored(), scored(params=plain))):
        deltas = await answer(engine, request)
        texts.append([token for delta in deltas for token in delta.token_ids])
        cached = max(delta.num_cached_tokens for delta in deltas)
        assert (cached > 100) == (number % 2 == 1)
    assert texts == [texts[0]] * 4


async def test_controls_do_not_touch_them(served: Any, expected: Scores) -> None:
    engine = await served()
    params = SamplingParams(
        max_tokens=4, prompt_logprobs=TOP, temperature=0.5, top_k=2, seed=3, repetition_penalty=1.5, ignore_eos=True
    )
    assert scores_of(await answer(engine, scored(params=params))) == expected


async def test_an_aborted_request_leaves_no_scores(served: Any, expected: Scores) -> None:
    engine = await served(max_num_batched_tokens=7, max_num_seqs=4)
    request = scored(PROMPT * 8, "aborted")
    stream = asyncio.create_task(answer(engine, request))
    while engine.load().num_running == 0:
        await asyncio.sleep(0.001)
    engine.abort("aborted")
    deltas = await stream
    assert deltas[-1].finish_reason == "cancelled"
    assert all(delta.prompt_logprobs is None for delta in deltas)
    assert scores_of(await answer(engine, scored())) == expected


async def test_a_migrated_answer_brings_none_again(served: Any) -> None:
    """They came with its first token, from the worker before."""
    engine = await served()
    deltas = await answer(engine, scored(generated_token_ids=[5, 6]))
    assert all(delta.prompt_logprobs is None for delta in deltas)


async def test_a_decode_worker_computes_them_itself(served: Any, expected: Scores) -> None:
    """KV has no logits: the lease is released at once, and the prompt is computed where they are
    wanted.
    """
    prefill, decode = await served(role="prefill"), await served(role="decode")
    for number in range(2):
        leased = (await answer(prefill, scored(number=f"{number}", kv=KeepKv())))[-1]
        assert leased.kv is not None
        assert leased.prompt_logprobs is None
        deltas = await answer(decode, scored(number=f"{number}", kv=ReadKv(leased.kv)))
        assert scores_of(deltas) == expected
    while prefill.num_leased():
        await asyncio.sleep(0.001)


async def test_a_refused_request_ends_the_lease(served: Any) -> None:
    """The prompt's KV would be held until its time-out."""
    prefill, decode = await served(role="prefill"), await served(role="decode")
    for refused in ({"lora_name": "none"}, {"params": SamplingParams(max_tokens=4, allowed_token_ids=[10**6])}):
        leased = (await answer(prefill, scored(kv=KeepKv())))[-1]
        assert leased.kv is not None
        assert prefill.num_leased() == 1
        with pytest.raises(InvalidRequest):
            await answer(decode, scored(kv=ReadKv(leased.kv), **refused))
        while prefill.num_leased():
            await asyncio.sleep(0.001)
    assert prefill.transfers()["released"] == 2


async def test_a_draining_worker_ends_the_lease(served: Any) -> None:
    prefill, decode = await served(role="prefill"), await served(role="decode")
    leased = (await answer(prefill, scored(kv=KeepKv())))[-1]
    assert leased.kv is not None
    decode.migrate_all()
    with pytest.raises(Draining):
        await answer(decode, scored(kv=ReadKv(leased.kv)))
    while prefill.num_leased():
        await asyncio.sleep(0.001)
    assert prefill.transfers()["released"] == 1


def test_no_tap_is_left_of_a_request_that_ends_at_a_shut_gate() -> None:
    model = engine_doubles.ScriptedModel()
    engine = engine_doubles.stepper(model)
    engine.add(engine_doubles.request(model, "one", [5, 6], SamplingParams(prompt_logprobs=1)))
    engine.shut_gate()
    assert engine.abort("one") is not None
    assert not engine._tapped


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_no_number_ends_its_request_alone(value: float, caplog: pytest.LogCaptureFixture) -> None:
    """The rows that its answer is sampled from are finite."""
    model = engine_doubles.ScriptedModel()
    model.by_token[9, 40] = value
    wanted = SamplingParams(max_tokens=2, prompt_logprobs=1)
    engine = engine_doubles.stepper(model)
    for name, prompt in (("one", [5, 9, 7]), ("other", [5, 8, 7])):
        engine.add(engine_doubles.request(model, name, prompt, wanted))
    ends: dict[str, Output] = {}
    while not engine.scheduler.is_idle:
        ends |= {output.request_id: output for output in engine.step() if output.finish_reason is not None}
    assert ends["one"].error == "token 2 has no log probability: the row of logits holds NaN or +inf"
    assert ends["other"].error is None
    assert not caplog.records


def test_a_rollouts_row_that_is_no_number_is_an_error() -> None:
    rows = torch.zeros(3, 8)
    rows[1, 7] = math.inf
    for controls in (None, Controls(temperature=0.5)):
        with pytest.raises(UnusableRow, match="token 2 has no log probability"):
            _AnswerTap(1, [3, 4, 5], (7,), controls).see_prompt(0, rows)
