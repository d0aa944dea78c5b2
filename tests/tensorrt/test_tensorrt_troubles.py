"""What goes wrong on TensorRT-LLM stays with the request that it concerns, or is noticed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_processors import Faulty, Raw
from stand_in import collect, embedded, engine, running, stand_in

from adapters import create_trtllm_adapters
from adapters.chain import ProcessorChain
from adapters.contract import Context, Processor
from adapters.processors.forcing import ForcedPrefix, ForcedSequence
from adapters.processors.masks import BannedTokens
from adapters.processors.penalties import RepetitionPenalty
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest, TokenDelta
from worker.engines.trtllm import TrtllmEngine
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded, StartupError
from worker.sampling import SamplingParams

PROMPT = [9, 30, 41, 77]
CONTEXT = Context(Vocabulary(1024), frozenset({1, 4}))
pytestmark = pytest.mark.timeout(300)  # several processes start, each loads torch


def chain(kind: type[Processor], **args: Any) -> ProcessorChain:
    made = ProcessorChain(kind.build(kind.Args(**args), CONTEXT), CONTEXT, step_budget_s=60)
    made.start(PROMPT)
    return made


def params(processors: Any = None, max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, logits_processor=processors, **fields)


async def plain(model: Path, asked: SamplingParams, **arguments: Any) -> TokenDelta:
    async with embedded(model) as reference:
        return await collect(reference, PROMPT, asked, **arguments)


FAULTS = {"raises": "raised", "nan": "nan", "empty": "empty", "shape": "raised"}


async def test_a_faulty_processor_ends_its_request_alone(model: Path) -> None:
    async with running(model) as served:
        whole = await collect(served, PROMPT, params())
        assert whole.finish_reason == "length"
        faulty: list[Any] = [create_trtllm_adapters([Faulty(fault, 7)], end_id=4) for fault in FAULTS]
        faulty.append([Raw(7)])
        wanted = [params(each) for each in faulty]
        answers = await asyncio.gather(
            collect(served, PROMPT, params(), "stranger"),
            *(collect(served, PROMPT, each, f"faulty{i}") for i, each in enumerate(wanted)),
        )
        assert answers[0].token_ids == whole.token_ids
        for answer, reason in zip(answers[1:], [*FAULTS.values(), "raised"], strict=True):
            assert answer.finish_reason == "error"
            assert answer.failure is not None
            assert answer.failure.reason in (reason, "unsatisfiable")
            assert "prompt" not in str(answer.error)
            assert len(answer.token_ids) <= 3
        assert served.num_unfinished() == 0
        assert (await collect(served, PROMPT, params())).token_ids == whole.token_ids


async def test_open_processor_errors_are_dynamos(model: Path) -> None:
    async with running(model, "--processor-errors", "open") as served:
        whole = await collect(served, PROMPT, params())
        made = create_trtllm_adapters([Faulty("nan", 7)], end_id=4)
        answer = await collect(served, PROMPT, params(made))
    assert (answer.token_ids, answer.finish_reason) == (whole.token_ids, "length")
    assert answer.failure is not None
    assert answer.failure.reason == "nan"


async def test_open_errors_keep_log_probabilities(model: Path) -> None:
    """Those of the tokens that are sampled without the processor are the library's own."""
    async with running(model, "--processor-errors", "open") as served:
        whole = await collect(served, PROMPT, params(logprobs=2))
        made = create_trtllm_adapters([Faulty("nan", 7)], end_id=4)
        answer = await collect(served, PROMPT, params(made, logprobs=2))
    assert (answer.token_ids, answer.finish_reason) == (whole.token_ids, "length")
    found, expected = ([[entry.token_id for entry in each] for each in one.logprobs or ()] for one in (answer, whole))
    assert found == expected


@pytest.mark.parametrize("sampled", [{"temperature": 1e-310}, {"temperature": 0.9, "top_k": 5000, "top_p": 1e-9}])
async def test_odd_sampling_ends_no_executor(model: Path, sampled: dict[str, Any]) -> None:
    """Logits over a temperature may be infinite, and the library need not take every top-k."""
    async with running(model) as served:
        greedy = await collect(served, PROMPT, params())
        answer = await collect(served, PROMPT, params(**sampled))
        penalised = await collect(served, PROMPT, params(repetition_penalty=1.5))
        both = await collect(served, PROMPT, params(repetition_penalty=1.5, **sampled))
    assert (answer.token_ids, answer.finish_reason) == (greedy.token_ids, "length")
    assert (both.token_ids, both.finish_reason) == (penalised.token_ids, "length")


async def test_a_call_skipped_after_a_preemption_fails_the_request(model: Path) -> None:
    async with running(model, skips=[3]) as served:
        for max_tokens in (12, 4):  # noticed at the next call, or by the worker where there is none
            answer = await collect(
                served, PROMPT, params(max_tokens=max_tokens), chain=chain(BannedTokens, token_ids=[50])
            )
            assert answer.finish_reason == "error"
            assert answer.failure is not None
            assert answer.failure.reason == "skipped"
            assert len(answer.token_ids) <= 3
        assert (await collect(served, PROMPT, params())).finish_reason == "length"


async def test_an_unexpectedly_lagging_history_stops_the_start(model: Path) -> None:
    with stand_in(lagging=True):
        served = engine(model)
        with pytest.raises(StartupError, match="lacks the newest token"):
            await served.start()
        await served.stop()


async def test_lagged_history_serves_what_needs_none(model: Path) -> None:
    async with running(model, "--history", "lagged", "--max-num-batched-tokens", "64") as served:
        with pytest.raises(InvalidRequest, match="--history lagged"):
            await collect(served, PROMPT, params(), chain=chain(RepetitionPenalty, penalty=1.5))
        with pytest.raises(InvalidRequest, match="exceeds max_num_tokens"):
            await collect(served, [7] * 65, params())
        answers = [
            await collect(served, PROMPT, params(), chain=chain(BannedTokens, token_ids=[62, 858])),
            await collect(served, PROMPT, params(), chain=chain(ForcedPrefix, token_ids=[40, 41, 42])),
            await collect(served, PROMPT, params(repetition_penalty=1.7)),
            await collect(served, PROMPT, params(seed=3, temperature=1.0)),
        ]
    expected = [
        await plain(model, params(), chain=chain(BannedTokens, token_ids=[62, 858])),
        await plain(model, params(), chain=chain(ForcedPrefix, token_ids=[40, 41, 42])),
        await plain(model, params(repetition_penalty=1.7)),
        await plain(model, params(seed=3, temperature=1.0)),
    ]
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]


OLD_CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"bad_token_ids": [858, 62]},
    {"logprobs": 0},
    {"logprobs": 2, "bad_token_ids": [858]},
    {"temperature": 0.9, "min_p": 0.1, "seed": 4},
    {"embedding_bias": [0.0] * 600 + [9.0] * 4 + [0.0] * 420},
]


async def test_the_old_version_ignores_most_and_serves_all(model: Path) -> None:
    async with running(model, version="1.2.0") as served, embedded(model) as reference:
        assert served._served is not None
        assert served._served.honoured == {"embedding_bias"}
        info = served._info
        assert info is not None
        assert (info.version, info.total_kv_blocks > 0) == ("1.2.0", True)
        for controls in OLD_CONTROLS:
            ours = await collect(served, PROMPT, params(**controls))
            theirs = await collect(reference, PROMPT, params(**controls))
            assert ours.token_ids == theirs.token_ids, controls
            found = [[entry.token_id for entry in each] for each in ours.logprobs or ()]
            assert found == [[entry.token_id for entry in each] for each in theirs.logprobs or ()], controls
        unseeded = await collect(served, PROMPT, params(temperature=5.0, min_p=0.9999))
        assert unseeded.token_ids == (await collect(served, PROMPT, params())).token_ids


async def test_a_version_that_hides_the_end_token(model: Path) -> None:
    stops = list(range(0, 1000, 7))
    async with running(model, hides_end_token=True) as served, embedded(model) as reference:
        for asked, forced in (
            (params(stop_token_ids=stops), None),
            (params(stop_token_ids=stops, include_stop_str_in_output=True), None),
            (params(stop_token_ids=[1, 4]), [40, 41]),
            (params(include_stop_str_in_output=True, stop_token_ids=[1, 4]), [40]),
        ):
            made = [None if forced is None else chain(ForcedSequence, token_ids=forced) for _ in range(2)]
            ours = await collect(served, PROMPT, asked, chain=made[0])
            theirs = await collect(reference, PROMPT, asked, chain=made[1])
            assert (ours.token_ids, ours.stop_reason) == (theirs.token_ids, theirs.stop_reason)


async def several(served: TrtllmEngine, asked: SamplingParams) -> list[TokenDelta]:
    """Each choice as one delta."""
    found = [TokenDelta(index=index) for index in range(asked.n)]
    async for delta in served.generate(EngineRequest("n", PROMPT, asked)):
        whole = found[delta.index]
        assert whole.finish_reason is None
        whole.token_ids += delta.token_ids
        whole.finish_reason, whole.stop_reason, whole.error = delta.finish_reason, delta.stop_reason, delta.error
    return found


async def test_several_choices(model: Path) -> None:
    stops = list(range(0, 1000, 9))
    async with running(model) as served:
        for each in await several(served, params(n=3, temperature=1.0)):
            assert (len(each.token_ids), each.finish_reason) == (12, "length")
        found = await several(served, params(n=8, temperature=1.0, stop_token_ids=stops))
        assert {each.finish_reason for each in found} == {"stop", "length"}
        assert len({len(each.token_ids) for each in found}) > 2
        for each in found:
            assert (each.stop_reason in stops) is (each.finish_reason == "stop")
            assert not set(each.token_ids) & set(stops)
        with pytest.raises(InvalidRequest, match="n: must be 1"):
            await collect(served, PROMPT, params(n=2, temperature=1.0, seed=4))


async def test_several_choices_of_a_version_that_hides_the_end_token(model: Path) -> None:
    bias = [0.0] * 1024
    bias[4] = 5.0
    async with running(model, hides_end_token=True) as served:
        found = await several(served, params(n=8, temperature=1.0, embedding_bias=bias))
    assert {each.finish_reason for each in found} == {"stop", "length"}
    for each in found:
        assert each.stop_reason == (4 if each.finish_reason == "stop" else None)
        assert (len(each.token_ids) == 12) is (each.finish_reason == "length")
        assert 4 not in each.token_ids


async def test_the_context_ends_an_answer(model: Path) -> None:
    async with running(model, "--context-length", "32") as served:
        for wanted in (100, None):
            asked = SamplingParams(n=3, temperature=1.0, max_tokens=wanted, ignore_eos=True)
            for each in await several(served, asked):
                assert (len(each.token_ids), each.finish_reason) == (28, "length")


async def test_more_log_probabilities_than_the_version_takes(model: Path) -> None:
    async with running(model, max_logprobs=20) as served:
        reasons: list[str] = []
        served.tell_broken(reasons.append)
        for _ in range(9):
            with pytest.raises(InvalidRequest, match="invalid logprobs: 25") as refused:
                await collect(served, PROMPT, params(logprobs=25))
            assert refused.value.field == "sampling_params.logprobs"
        assert (served.num_unfinished(), reasons) == (0, [])
        answer = await collect(served, PROMPT, params(logprobs=25), chain=chain(BannedTokens, token_ids=[50]))
        assert [len(each) for each in answer.logprobs or ()] == [26] * 12


CLIENT_SIDE: list[tuple[dict[str, Any], str]] = [
    ({"loses_logprobs": True}, "AssertionError"),
    ({"odd_reason": "unheard_of"}, "ValueError: Unknown finish reason: unheard_of"),
    ({"loses_logprobs": True, "version": "1.2.0"}, "AssertionError"),
]


@pytest.mark.parametrize(("switches", "problem"), CLIENT_SIDE, ids=str)
async def test_an_exception_on_the_clients_side_ends_one_request(
    model: Path, switches: dict[str, Any], problem: str
) -> None:
    """Of the library's two sides; the executor answers a canary, so it lives."""
    async with running(model, **switches) as served:
        reasons: list[str] = []
        served.tell_broken(reasons.append)
        stranger = served.generate(EngineRequest("stranger", PROMPT, params(max_tokens=1500, ignore_eos=True)))
        await anext(stranger)
        answers = await asyncio.gather(
            *(collect(served, PROMPT, params(logprobs=1), f"guilty{number}") for number in range(9))
        )
        for answer in answers:
            assert answer.finish_reason == "error"
            assert problem in str(answer.error)
        assert reasons == []
        assert served.num_unfinished() == 1
        assert (await anext(stranger)).finish_reason is None
        await stranger.aclose()


async def test_a_version_that_does_not_tell_how_much_kv_there_is(model: Path) -> None:
    async with running(model, "--kv-block-size", "16", tells_capacity=False) as served:
        info = served._info
        assert info is not None
        assert info.kv_block_size == 16
        assert info.total_kv_blocks > 0


async def test_the_executor_dies_under_a_processor(model: Path) -> None:
    async with running(model) as served:
        reasons: list[str] = []
        served.tell_broken(reasons.append)
        stranger = asyncio.create_task(collect(served, PROMPT, params(max_tokens=1000), "stranger"))
        with pytest.raises(EngineBroken):
            await collect(served, PROMPT, params(create_trtllm_adapters([Faulty("dies", 6)], end_id=4)))
        with pytest.raises(EngineBroken):
            await stranger
        assert len(reasons) >= 1
        with pytest.raises(EngineBroken):
            await collect(served, PROMPT, params())


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0rc29"])
async def test_an_idle_executor_that_dies_is_noticed(model: Path, version: str) -> None:
    with stand_in(version=version):
        served = TrtllmEngine(replace(engine(model).config, canary_interval_s=0.2))
        try:
            await served.start()
            noticed = asyncio.get_running_loop().create_future()
            served.tell_broken(noticed.set_result)
            served._llm._process.kill()
            assert "TensorRT-LLM" in await asyncio.wait_for(noticed, 30)
        finally:
            await served.stop()


async def test_a_health_check_that_blocks_delays_no_request(model: Path) -> None:
    with stand_in(health_blocks_s=30.0):
        served = TrtllmEngine(replace(engine(model).config, canary_interval_s=0.01))
        try:
            await served.start()
            reasons: list[str] = []
            served.tell_broken(reasons.append)
            await asyncio.sleep(0.2)  # the check has begun
            answer = await asyncio.wait_for(collect(served, PROMPT, params()), 20)
            assert (answer.finish_reason, reasons) == ("length", [])
        finally:
            await served.stop()


async def test_refusals_aborts_and_the_drain(model: Path) -> None:
    async with running(model, "--max-num-seqs", "1", "--max-queue", "0") as served:
        for prompt, problem in (([], "at least one"), ([1024], "token ids from 0"), ([5] * 2048, "shorter than")):
            with pytest.raises(InvalidRequest, match=problem):
                await collect(served, prompt, params())
        with pytest.raises(InvalidRequest, match="beam"):
            await collect(served, PROMPT, params(use_beam_search=True))
        with pytest.raises(InvalidRequest, match="sent to the engine's process"):
            await collect(served, PROMPT, params([lambda *a: None]))
        long = served.generate(EngineRequest("long", PROMPT, params(max_tokens=1500, ignore_eos=True)))
        await anext(long)
        with pytest.raises(InvalidRequest, match="in use"):
            await collect(served, PROMPT, params(), "long")
        with pytest.raises(Overloaded):
            await collect(served, PROMPT, params(), "other")
        served.abort("long")
        served.abort("unknown")
        assert [delta.finish_reason async for delta in long][-1] == "cancelled"
        again = served.generate(EngineRequest("again", PROMPT, params(max_tokens=1500, ignore_eos=True)))
        await anext(again)
        assert served.migrate_all() == 1
        with pytest.raises(Draining):
            async for _ in again:
                pass
        with pytest.raises(Draining):
            await collect(served, PROMPT, params())
