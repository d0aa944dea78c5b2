"""Sampling controls that a request leaves unset: the model's values, and what receipts say."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from served_worker import Answer, Client, serving

from adapters.client import processor
from worker.__main__ import main
from worker.arguments import parse_arguments
from worker.build import build
from worker.errors import StartupError
from worker.requests.sampling_defaults import FROM_MODEL, SamplingDefaults, model_values
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, 500]
QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5]}
VALUES = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
GREEDY = ({"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"min_p": 1})


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        (QWEN3, VALUES),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({**QWEN3, "do_sample": False, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({**QWEN3, "do_sample": None, "min_p": 0.1}, {}),
        ({"do_sample": True, "top_k": -1, "max_new_tokens": 9}, {"temperature": 1.0, "top_k": 0}),
    ],
)
def test_what_a_model_says(config: dict[str, Any], values: dict[str, Any]) -> None:
    assert model_values(config) == values


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"do_sample": True, "temperature": -1}, "temperature must be at least 0 and at most 100, got -1"),
        ({"do_sample": True, "temperature": "0.6"}, "temperature must be a number, got '0.6'"),
        ({"do_sample": True, "top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"do_sample": True, "top_p": 2}, "top_p must be at least 0 and at most 1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.01 and at most 100, got 0"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
    ],
)
def test_a_value_that_no_request_could_have(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(config))
    given_options = ["--model-path", str(model), "--device", "cpu", "--event-plane", "zmq"]
    with pytest.raises(StartupError, match=rf"generation_config\.json: {problem}; --default-sampling greedy"):
        build(given_options)
    defaults = SamplingDefaults.load(parse_arguments([*given_options, "--default-sampling", "greedy"], {}))
    assert defaults == SamplingDefaults()


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    values = {
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.integers(2, 9),
        "top_p": st.sampled_from([0.2, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
    }
    return draw(st.fixed_dictionaries({}, optional=values))


@given(requests(), requests(), st.sets(st.sampled_from([*FROM_MODEL, "dynamic_temperature", "choice"])))
def test_a_value_is_the_requests_or_else_the_models(
    asked: dict[str, Any], of_model: dict[str, Any], processors: set[str]
) -> None:
    params = SamplingParams(**asked)
    filled, defaulted = SamplingDefaults(of_model).fill(params, processors)
    for name in FROM_MODEL:
        replaced = name in processors or (name == "temperature" and "dynamic_temperature" in processors)
        if name in asked:
            expected = asked[name]
        elif not replaced:
            expected = of_model.get(name)
        else:
            expected = 1.0 if name == "temperature" and name in of_model else None  # neutral, and sampled
        assert getattr(filled, name) == expected, name
        assert (name in defaulted) == (name in of_model and name not in asked and not replaced)
    assert filled.max_tokens == params.max_tokens


@pytest.mark.parametrize("asked", GREEDY)
def test_a_request_that_says_greedy_is_greedy(asked: dict[str, Any]) -> None:
    defaults = SamplingDefaults({**VALUES, "repetition_penalty": 1.2})
    filled, defaulted = defaults.fill(SamplingParams(**asked), ())
    assert filled.is_greedy
    assert filled == SamplingParams(**asked, repetition_penalty=1.2)
    assert defaulted == {"repetition_penalty"}


def test_unset_truncation_of_a_sampled_request_is_the_models() -> None:
    filled, defaulted = SamplingDefaults(VALUES).fill(SamplingParams(min_p=0.0, top_p=0.5), ())
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (0.6, 0.5, 20, 0.0)
    assert defaulted == {"temperature", "top_k"}
    assert not filled.is_greedy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    config = path / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **QWEN3, "eos_token_id": None}))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model: Path) -> AsyncIterator[Client]:
    async with serving(model) as client:
        yield client


async def ask(client: Client, *processors: Any, **options: Any) -> Answer:
    return await client.ask(PROMPT, *processors, sampling_options=options, stop_conditions={"max_tokens": 24})


def sources(answer: Answer) -> dict[str, tuple[float, str]]:
    return {name: (each["value"], each["from"]) for name, each in answer.receipt["sampling"].items()}


MODEL = {name: (value, "model") for name, value in VALUES.items()}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("processors", "options", "found"),
    [
        ([], {}, MODEL),
        ([], {"temperature": None, "top_k": None}, MODEL),
        ([], {"top_p": 0.5}, {**MODEL, "top_p": (0.5, "request")}),
        ([], {"temperature": 0}, {"temperature": (0, "request")}),
        ([], {"repetition_penalty": 1.5}, {**MODEL, "repetition_penalty": (1.5, "request")}),
        ([processor("top_k", k=3)], {}, {name: MODEL[name] for name in ("temperature", "top_p")}),
        ([processor("dynamic_temperature", low=0.5, high=2)], {}, {name: MODEL[name] for name in ("top_k", "top_p")}),
    ],
)
async def test_the_receipt_says_where_a_value_came_from(
    served: Client, processors: Any, options: dict[str, Any], found: dict[str, Any]
) -> None:
    assert sources(await ask(served, *processors, **options)) == found


@pytest.mark.asyncio(loop_scope="module")
async def test_the_tokens_are_those_of_the_values(served: Client, model: Path) -> None:
    """And with a seed those of a worker that is asked for them."""
    unset = await ask(served, seed=7)
    asked = await ask(served, seed=7, **VALUES)
    assert unset.token_ids == asked.token_ids
    assert set(sources(asked).values()) == {(value, "request") for value in VALUES.values()}
    assert len({tuple((await ask(served)).token_ids) for _ in range(6)}) > 1
    async with serving(model, "--default-sampling", "greedy") as client:
        greedy = await ask(client)
        assert sources(greedy) == {"temperature": (0, "default")}
        assert greedy.token_ids == (await ask(served, temperature=0)).token_ids
        named = await ask(client, processor("top_k", k=3))
        assert sources(named) == {"temperature": (1, "default")}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("default", ["model", "greedy"])
async def test_a_replay_needs_neither_the_file_nor_the_option(
    served: Client, model: Path, default: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await ask(served, processor("dynamic_temperature", low=0.5, high=2))
    other = shutil.copytree(model, tmp_path / "model")
    for name, content in (("receipt.json", answer.receipt), ("prompt.json", PROMPT)):
        (tmp_path / name).write_text(json.dumps(content))
    command = ["replay", str(tmp_path / "receipt.json"), "--prompt-file", str(tmp_path / "prompt.json")]
    options = ["--model-path", str(other), "--device", "cpu", "--default-sampling", default]
    assert await asyncio.to_thread(main, [*command, *options]) == 0, capsys.readouterr()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_operators_default_is_nearer_than_the_models(model: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("models:\n  model:\n    default:\n      - {name: temperature, args: {value: 1.5}}\n")
    async with serving(model, "--processor-policy", str(policy)) as client:
        answer = await ask(client, seed=7)
        explicit = await ask(client, seed=7, **{**VALUES, "temperature": 1.5})
    assert answer.token_ids == explicit.token_ids
    assert sources(answer) == {name: MODEL[name] for name in ("top_k", "top_p")}
    assert [each["name"] for each in answer.receipt["processors"]] == ["temperature", "top_k", "top_p"]
