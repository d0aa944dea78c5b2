"""Greedy tokens are transformers' own, whatever shares the batch and however prompts are cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import grid
from random_checkpoints import EVERY_TYPE
from transformers import AutoModelForCausalLM

from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine, Model, Request
from worker.engines.embedded.admission import admit
from worker.engines.embedded.kv_cache import budget as kv_budget
from worker.engines.embedded.model import load_model
from worker.engines.embedded.step import Stepper, make_stepper
from worker.sampling import SamplingParams
from worker.tiny_model import SLIDING_WINDOW

LENGTHS = (1, 7, 33, 64, 130)
NEW_TOKENS = 40
AFTER_CHUNKS = 12
"""Tokens that are enough where the prompt is what matters."""
assert SLIDING_WINDOW < max(LENGTHS)


@dataclass(frozen=True)
class Case:
    config: EmbeddedConfig
    model: Model
    prompts: list[list[int]]
    answers: list[list[int]]


def network_of(path: Path) -> Any:
    """transformers' network; its other implementations of attention know no soft cap."""
    named: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **named)


def reference(path: Path, device: str, prompt: list[int], never: tuple[int, ...]) -> list[int]:
    network = network_of(path).to(device)
    tokens = network.generate(
        torch.tensor([prompt], device=device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=list(never),
    )
    return [int(token) for token in tokens[0, len(prompt) :]]


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, str], Case]:
    return {}


@pytest.fixture
def case(arch: str, device: str, every_checkpoint: dict[str, Path], cases: dict[tuple[str, str], Case]) -> Case:
    if (arch, device) not in cases:
        config = EmbeddedConfig(model_path=every_checkpoint[arch], device=device, dtype="float32")
        model = load_model(config)
        source = random.Random(arch)
        prompts = [[source.randrange(model.vocab_size) for _ in range(length)] for length in LENGTHS]
        answers = [reference(every_checkpoint[arch], device, prompt, model.undecodable_ids) for prompt in prompts]
        cases[arch, device] = Case(config, model, prompts, answers)
    return cases[arch, device]


def params(count: int = NEW_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


pytestmark = [pytest.mark.parametrize("arch", EVERY_TYPE), pytest.mark.usefixtures("one_thread")]


async def test_alone(case: Case) -> None:
    engine = EmbeddedEngine(case.config)
    await engine.start()
    try:
        for prompt, answer in zip(case.prompts, case.answers, strict=True):
            tokens: list[int] = []
            async for delta in engine.generate(EngineRequest("one", prompt, params())):
                tokens += delta.token_ids
            assert tokens == answer
    finally:
        await engine.stop()


@pytest.mark.parametrize(("budget", "seed"), [(5, 0), (5, 1), (48, 2), (4096, 3)])
def test_mixed_batches_that_requests_join_at_random_steps(case: Case, budget: int, seed: int) -> None:
    config = EmbeddedConfig(model_path="", max_num_seqs=4, max_num_batched_tokens=budget, max_mixed_chunk=64)
    driver = make_stepper(config, case.model, num_kv_blocks=64)
    source = random.Random(seed)
    arrivals = sorted((source.randrange(30), which) for which in range(len(LENGTHS)))
    tokens: dict[str, list[int]] = {str(which): [] for which in range(len(LENGTHS))}
    step = 0
    while arrivals or not driver.scheduler.is_idle:
        while arrivals and arrivals[0][0] <= step:
            which = arrivals.pop(0)[1]
            driver.add(admit(EngineRequest(str(which), case.prompts[which], params()), which, case.model, 2048))
        for output in [] if driver.scheduler.is_idle else driver.step():
            assert output.token_id is not None
            tokens[output.request_id].append(output.token_id)
        step += 1
    assert [tokens[str(which)] for which in range(len(LENGTHS))] == case.answers


async def test_concurrent_streams(case: Case) -> None:
    engine = EmbeddedEngine(case.config)
    await engine.start()

    async def answer(which: int) -> list[int]:
        tokens: list[int] = []
        async for delta in engine.generate(EngineRequest(str(which), case.prompts[which], params())):
            tokens += delta.token_ids
        return tokens

    try:
        assert await asyncio.gather(*map(answer, range(len(LENGTHS)))) == case.answers
    finally:
        await engine.stop()


PAGE = 32
"""Tokens per page in what follows, so that every prompt but the shortest takes several."""


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "PAGE_TOKENS", PAGE)


def small_driver(case: Case, *, budget: int = 4096, num_seqs: int = 8, num_pages: int = 32) -> Stepper:
    config = EmbeddedConfig(
        model_path="", max_num_seqs=num_seqs, max_num_batched_tokens=max(budget, num_seqs), max_mixed_chunk=64
    )
    driver = make_stepper(config, case.model, num_kv_blocks=num_pages * PAGE // 16)
    assert driver.scheduler.cache.page_size == PAGE
    assert driver.scheduler.cache.num_pages == num_pages
    return driver


def add(driver: Stepper, case: Case, which: int, name: str | None = None, count: int = NEW_TOKENS) -> Request:
    one = admit(EngineRequest(name or str(which), case.prompts[which], params(count)), which, case.model, 2048)
    driver.add(one)
    return one


def finish(driver: Stepper, after_step: Callable[[], None] = lambda: None) -> None:
    while not driver.scheduler.is_idle:
        driver.step()
        driver.scheduler.check_integrity()
        driver.scheduler.cache.check_blocks()
        after_step()


def generated(requests: list[Request]) -> list[list[int]]:
    return [one.tokens[one.prompt_length :] for one in requests]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("size", grid(range(1, 18), fast=4))
def test_chunks_of_every_size(case: Case, size: int) -> None:
    driver = small_driver(case, budget=size, num_seqs=1)
    one = add(driver, case, 3, count=AFTER_CHUNKS)
    finish(driver)
    assert generated([one]) == [case.answers[3][:AFTER_CHUNKS]]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("forgets", [False, True], ids=["kv is found again", "kv is computed again"])
def test_preempted_at_every_step(case: Case, forgets: bool) -> None:
    driver = small_driver(case)
    requests = [add(driver, case, which) for which in range(len(LENGTHS))]

    def preempt() -> None:
        for one in (*driver.scheduler.queues.decoding, *driver.scheduler.queues.prefilling):
            driver.scheduler.queues.preempt(one)
        if forgets:
            driver.scheduler.cache.clear()

    finish(driver, preempt)
    assert generated(requests) == case.answers
    assert driver.scheduler.queues.num_preemptions >= NEW_TOKENS - 1


@pytest.mark.usefixtures("small_pages")
def test_driven_out_of_a_store_that_is_too_small(case: Case) -> None:
    driver = small_driver(case, num_pages=12)
    requests = [add(driver, case, which, f"{which} {copy}") for copy in range(4) for which in range(len(LENGTHS))]
    finish(driver)
    assert generated(requests) == case.answers * 4
    assert driver.scheduler.queues.num_preemptions > 0


@pytest.mark.usefixtures("small_pages")
def test_beginnings_that_are_known(case: Case) -> None:
    driver = small_driver(case)
    for count in range(3):
        requests = [add(driver, case, which) for which in range(len(LENGTHS))]
        finish(driver)
        assert generated(requests) == case.answers
        cached = [one.num_cached_tokens for one in requests]
        assert cached == ([(length - 1) // 16 * 16 for length in LENGTHS] if count else [0] * len(LENGTHS))


@pytest.mark.usefixtures("small_pages")
def test_three_answers_share_their_prompt(case: Case) -> None:
    driver = small_driver(case)
    requests = [add(driver, case, 4, str(choice)) for choice in range(3)]
    shared: list[bool] = []

    def look() -> None:
        if len(driver.scheduler.queues.decoding) == 3:
            shared.append(len({tuple(one.pages[:4]) for one in requests}) == 1)

    finish(driver, look)
    assert generated(requests) == [case.answers[4]] * 3
    assert shared
    assert all(shared)


def test_logits_of_a_prompt_in_pieces(case: Case, every_checkpoint: dict[str, Path], arch: str) -> None:
    prompt = case.prompts[-1]
    network = network_of(every_checkpoint[arch])
    with torch.inference_mode():
        expected = network(torch.tensor([prompt])).logits[0, -1]
    for budget in (1, 17, 130):
        config = EmbeddedConfig(model_path="", max_num_seqs=1, max_num_batched_tokens=budget, max_mixed_chunk=64)
        driver = make_stepper(config, case.model, num_kv_blocks=64)
        driver.add(admit(EngineRequest("one", prompt, params()), 0, case.model, 2048))
        plan = driver.scheduler.schedule()
        logits = case.model.forward(plan)
        while not plan.sampled:
            for chunk in plan.chunks:
                chunk.request.num_computed = chunk.stop
            plan = driver.scheduler.schedule()
            logits = case.model.forward(plan)
        torch.testing.assert_close(logits[0].cpu(), expected, atol=2e-4, rtol=0)
