"""The quantised KV cache: how a request runs changes nothing with it either."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from effort import grid
from engine_doubles import Drafting
from model_runs import last_logits
from random_checkpoints import EVERY_TYPE
from speculation_runs import PLAIN, outcome

from worker.engines import EngineRequest, KeepKv, ReadKv, TokenDelta
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine, Engine, Request, native
from worker.engines.embedded.admission import admit
from worker.engines.embedded.kv_cache import budget as kv_budget
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.engines.embedded.step import make_stepper
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

FORMATS = ("int8", "int16")
EACH_FORMAT = pytest.mark.parametrize("kv", FORMATS)
OF_FLOAT32 = {"int8": 24, "int16": 40}
"""Bytes of a row of 16 elements: codes and a scale, in whole words of 8 bytes."""

# Models


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "PAGE_TOKENS", 32)


def load(path: Path, **given: Any) -> HfModel:
    settings = {"device": "cpu", "dtype": "float32", **given}
    model = load_model(EmbeddedConfig(model_path=path, **settings))
    model.allocate_kv(8, 32)
    return model


HELD_IN = [("int8", torch.float32), ("int8", torch.bfloat16), ("int16", torch.float32)]


@pytest.mark.parametrize(
    ("arch", "kv", "dtype"), grid(((arch, *each) for arch, each in product(EVERY_TYPE, HELD_IN)), fast=4), ids=str
)
@pytest.mark.usefixtures("one_thread")
def test_every_path_has_the_same_logits(
    arch: str, kv: str, dtype: torch.dtype, every_checkpoint: dict[str, Path]
) -> None:
    """`test_embedded_numerics` cuts and mixes batches. AMX sums bfloat16 in an order of its own."""
    expected: dict[bool, torch.Tensor] = {}
    name = str(dtype).removeprefix("torch.")
    for path in native.PATHS:
        if native.unavailable(dtype, path) is None:
            model = load(
                every_checkpoint[arch], kernels=f"native-{path}", dtype=name, numerics="exact", kv_cache_dtype=kv
            )
            assert model.numerics == "exact"
            assert model.made_by.endswith(f" kernels, {kv} KV cache")
            found = last_logits(model)
            as_others = expected.setdefault(native.sums_as_others(dtype, path), found)
            assert torch.equal(found, as_others)
            assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], found)
    for logits in expected.values():
        assert (logits - expected[True]).norm() / expected[True].norm() < 0.05


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=pytest.mark.native), "torch"])
@pytest.mark.parametrize(("kv", "most"), [("int8", 0.2), ("int16", 0.02)])
@pytest.mark.parametrize("arch", EVERY_TYPE)
@pytest.mark.usefixtures("one_thread")
def test_predictions_are_near_those_of_elements(
    arch: str, kv: str, most: float, kernels: str, every_checkpoint: dict[str, Path]
) -> None:
    """Random weights, whose attention is all or nothing, make some ten times of each error."""
    truth = last_logits(load(every_checkpoint[arch], kernels=kernels, kv_cache_dtype="none"))
    found = last_logits(load(every_checkpoint[arch], kernels=kernels, kv_cache_dtype=kv))
    assert not torch.equal(found, truth)
    assert (found - truth).norm() / truth.norm() < most


@pytest.mark.parametrize(("kv", "row_bytes"), [("none", 16 * 4), *OF_FLOAT32.items()])
def test_a_token_takes_the_bytes_of_its_rows(kv: str, row_bytes: int, checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["llama"], kv_cache_dtype=kv, numerics="fast")
    assert model.kv_bytes_per_token == 2 * 2 * 2 * row_bytes  # keys and values, layers, heads
    assert sum(each.nbytes for each in model.kv_store.tensors) == 8 * 32 * model.kv_bytes_per_token


# Ways to run


LENGTHS = (1, 7, 33, 64, 130)
NEW_TOKENS = 20
PROMPTS = [[(11 * which + 5 * at * at) % 290 + 3 for at in range(length)] for which, length in enumerate(LENGTHS)]


def answers(
    model: HfModel,
    *,
    budget: int = 4096,
    num_seqs: int = 8,
    num_pages: int = 32,
    rounds: int = 1,
    after_step: Callable[[Any], None] = lambda scheduler: None,
) -> list[list[int]]:
    """Seeded answers to prompts of several lengths, of the last of some rounds."""
    config = EmbeddedConfig(
        model_path="", max_num_seqs=num_seqs, max_num_batched_tokens=max(budget, num_seqs), max_mixed_chunk=64
    )
    driver = make_stepper(config, model, num_kv_blocks=num_pages * 2)
    requests: list[Request] = []
    for _ in range(rounds):
        requests = []
        for which, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=which)
            requests.append(admit(EngineRequest(str(which), prompt, params), which, model, 512))
            driver.add(requests[-1])
        while not driver.scheduler.is_idle:
            assert all(output.error is None for output in driver.step())
            driver.scheduler.check_integrity()
            after_step(driver.scheduler)
    return [one.tokens[one.prompt_length :] for one in requests]


def preempt_all(scheduler: Any) -> None:
    for one in (*scheduler.queues.decoding, *scheduler.queues.prefilling):
        scheduler.queues.preempt(one)
    if scheduler.queues.num_preemptions % 2:
        scheduler.cache.clear()


@pytest.fixture(scope="module", params=product(("llama", "gemma3_text"), FORMATS), ids=" in ".join)
def model(request: pytest.FixtureRequest, every_checkpoint: dict[str, Path]) -> HfModel:
    arch, kv = request.param
    config = EmbeddedConfig(
        model_path=every_checkpoint[arch],
        device="cpu",
        dtype="float32",
        numerics="exact",
        kv_cache_dtype=kv,
    )
    return load_model(config)


WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"budget": 9},
    "one by one": {"num_seqs": 1},
    "preempted at every step": {"after_step": preempt_all},
    "in a store that is too small": {"num_pages": 16},
    "with cached prefixes": {"rounds": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small_pages", "one_thread")
def test_answers_are_those_of_one_batch(model: HfModel, way: str) -> None:
    assert answers(model, **WAYS[way]) == answers(model)


@EACH_FORMAT
@pytest.mark.usefixtures("small_pages", "one_thread")
def test_drafts_change_nothing(kv: str, checkpoints: dict[str, Path]) -> None:
    """Rejected drafts leave their rows behind, and those that come are written over them."""
    engine = Engine(
        checkpoints["llama"],
        device="cpu",
        dtype="float32",
        numerics="exact",
        kv_cache_dtype=kv,
        context_length=256,
        max_num_seqs=4,
    )
    assert f", {kv} KV cache" in engine.info.computed_by
    params = [SamplingParams(max_tokens=60, seed=7, temperature=heat, logprobs=0) for heat in (0.0, 0.8)] * 2
    prompts = [PROMPTS[1], PROMPTS[1], PROMPTS[2], PROMPTS[2]]
    expected = outcome(engine, Speculator(SpeculativeConfig.parse(PLAIN)), prompts, params)
    proposed = 0

    def often_right(one: Request) -> list[int]:
        """The next tokens of the plain answer, and a wrong one behind them."""
        nonlocal proposed
        count = len(one.tokens) - one.prompt_length
        right = expected[one.number % len(expected)][0][count:][: count % 5]
        draft = [*right, (one.tokens[-1] + 1) % engine.info.vocab_size]
        proposed += len(draft)
        return draft

    drafting = Drafting(often_right)
    assert outcome(engine, drafting, prompts, params) == expected
    assert 0 < sum(drafting.accepted) < proposed


# Disaggregated


@pytest_asyncio.fixture
async def start(checkpoints: dict[str, Path]) -> AsyncIterator[Callable[..., Any]]:
    """Starts engines of a role and KV dtype."""
    started: list[EmbeddedEngine] = []

    async def make(role: str, kv_cache_dtype: str, dtype: str = "float32") -> EmbeddedEngine:
        settings = {"device": "cpu", "numerics": "exact", "role": role, "kv_cache_dtype": kv_cache_dtype}
        started.append(EmbeddedEngine(EmbeddedConfig(model_path=checkpoints["llama"], dtype=dtype, **settings)))  # type: ignore[arg-type]
        await started[-1].start()
        return started[-1]

    yield make
    for engine in reversed(started):
        await engine.stop()


async def whole(engine: EmbeddedEngine, *arguments: Any, **named: Any) -> TokenDelta:
    found = TokenDelta()
    async for delta in engine.generate(EngineRequest(*arguments, **named)):
        found = replace(delta, token_ids=found.token_ids + delta.token_ids)
    return found


@EACH_FORMAT
async def test_prefill_and_decode_make_the_aggregated_answer(kv: str, start: Callable[..., Any]) -> None:
    prompt = PROMPTS[-1] + PROMPTS[-2]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=3)
    expected = await whole(await start("aggregated", kv), "one", prompt, params)
    prefill, decode = await start("prefill", kv), await start("decode", kv)
    leased = await whole(prefill, "one", prompt, SamplingParams(), kv=KeepKv())
    assert leased.kv is not None
    assert leased.kv["layout"]["dtype"] == f"{kv} of float32"
    found = await whole(decode, "one", prompt, params, kv=ReadKv(leased.kv))
    assert decode.transfers()["received"] == 1
    assert decode.transfers()["bytes"] == (len(prompt) - 1) * 2 * 2 * 2 * OF_FLOAT32[kv]
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("prefills", "decodes", "names"),
    [
        (("int8", "float32"), ("auto", "float32"), ("'int8 of float32'", "'float32'")),
        (("auto", "float32"), ("int8", "float32"), ("'float32'", "'int8 of float32'")),
        (("int8", "bfloat16"), ("int8", "float32"), ("'int8 of bfloat16'", "'int8 of float32'")),
        (("int16", "float32"), ("int8", "float32"), ("'int16 of float32'", "'int8 of float32'")),
        (("none", "float32"), ("int16", "float32"), ("'float32'", "'int16 of float32'")),
    ],
)
async def test_kv_of_another_dtype_is_refused(
    start: Callable[..., Any], prefills: tuple[str, str], decodes: tuple[str, str], names: tuple[str, str]
) -> None:
    prefill, decode = await start("prefill", *prefills), await start("decode", *decodes)
    leased = await whole(prefill, "one", PROMPTS[-1], SamplingParams(), kv=KeepKv())
    assert leased.kv is not None
    with pytest.raises(InvalidRequest) as refused:
        await whole(decode, "one", PROMPTS[-1], SamplingParams(max_tokens=2), kv=ReadKv(leased.kv))
    said = f"dtype is {names[0]} on the prefill worker and {names[1]} on this decode worker"
    assert said in str(refused.value)
