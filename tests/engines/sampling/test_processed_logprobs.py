"""A receipt with attribution says how probable each token was in what it was sampled from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worker.engines.embedded import Engine
from worker.engines.embedded.offline.results import Completion
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["the quick brown fox", "a b a b a c a b"]
CONTROLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"name": "logit_bias", "args": {"bias": {"40": 5}}}),
    "sampled": ({"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"name": "banned_tokens", "args": {"token_ids": [3]}}),
    "forced": ({"temperature": 0.8}, {"name": "forced_prefix", "args": {"text": "the fox"}}),
    "taken back": ({"temperature": 1.0}, {"name": "phrase_ban", "args": {"phrases": ["e", "a", "th"]}}),
}
BIAS = CONTROLS["greedy"][1]


@pytest.fixture(scope="module")
def loaded_engine(checkpoints: dict[str, Path]) -> Engine:
    return Engine(checkpoints["llama"], max_num_seqs=4, dtype="float32", numerics="exact", kv_blocks=128)


@pytest.fixture(params=["plain", "speculated"])
def engine(request: pytest.FixtureRequest, loaded_engine: Engine) -> Iterator[Engine]:
    stepper = loaded_engine.session.stepper
    speculator = stepper.speculator
    if request.param == "speculated":
        stepper.speculator = Speculator(SpeculativeConfig(method="ngram", prompt_lookup_min=1), clock=lambda: 0.0)
    yield loaded_engine
    stepper.speculator = speculator


def answers(engine: Engine, processor: dict[str, Any], attribution: bool = True, **given: Any) -> list[Completion]:
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=3, **given)
    groups = engine.session.prepare(PROMPTS, [params, params], [[processor], [processor]])
    for group in groups:
        chain = group.answers[0].request.chain
        assert chain is not None
        chain.receipt.attribution = attribution
        engine.session.add(group)
    results = {}  # type: ignore[var-annotated]
    while len(results) < len(groups):
        results |= {result.request_id: result.outputs[0] for result in engine.step()}
    return [results[group.id] for group in groups]


def logprobs_of(answer: Completion) -> list[float]:
    assert answer.logprobs is not None
    return [found[0].logprob for found in answer.logprobs]  # type: ignore[index]


def report_of(answer: Completion) -> dict[str, Any]:
    assert answer.receipt is not None
    return answer.receipt.as_json()


@pytest.mark.parametrize("controls", CONTROLS)
def test_it_is_what_processed_log_probabilities_say(engine: Engine, controls: str) -> None:
    given, processor = CONTROLS[controls]
    raw = answers(engine, processor, logprobs=2, **given)
    processed = answers(engine, processor, logprobs=2, logprobs_mode="processed", **given)
    for one, other in zip(raw, processed, strict=True):
        assert one.token_ids == other.token_ids
        report = report_of(one)
        places = range(report["prompt_length"], report["prompt_length"] + 16)
        assert [each["position"] for each in report["processed_logprobs"]] == [*places]
        assert [each["logprob"] for each in report["processed_logprobs"]] == logprobs_of(other)
        assert logprobs_of(one) != logprobs_of(other)
        assert "processed_logprobs" not in report_of(other)  # they are the answer's own


def test_processed_logprobs_need_attribution_and_logprobs(engine: Engine) -> None:
    for answer in answers(engine, BIAS, attribution=False, logprobs=1) + answers(engine, BIAS):
        assert "processed_logprobs" not in report_of(answer)
