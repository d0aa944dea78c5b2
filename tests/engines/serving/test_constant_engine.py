"""The constant engine keeps its pace, and every control is applied to its logits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_doubles import collect
from tokenizers import Tokenizer

from worker.arguments import parse_arguments
from worker.build import make_engine
from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedEngine
from worker.errors import ConfigurationError, StartupError
from worker.sampling import SamplingParams
from worker.tiny_model import write_tiny_model

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("constant") / "tiny"
    write_tiny_model(path)
    return path


def made(model_path: Path, *arguments: str) -> EmbeddedEngine:
    chosen = ["--model-path", str(model_path), "--engine", "constant", *arguments]
    engine = make_engine(parse_arguments(chosen, {}))
    assert isinstance(engine, EmbeddedEngine)
    return engine


@pytest.fixture
async def engine(model_path: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = made(model_path, "--constant-step-s", "0.01")
    info = await engine.start()
    assert (info.name, info.computed_by) == ("constant", "constant, no model")
    yield engine
    await engine.stop()


@pytest.fixture(scope="module")
def token(model_path: Path) -> int:
    ids: list[int] = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode("a", add_special_tokens=False).ids
    return ids[0]


async def answer(engine: EmbeddedEngine, **params: object) -> list[int]:
    ids, last = await collect(engine, "r", PROMPT, SamplingParams(max_tokens=6, **params))  # type: ignore[arg-type]
    assert last.finish_reason == "length"
    return ids


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 2.0, "top_p": 0.9}])
async def test_it_says_one_token(engine: EmbeddedEngine, token: int, sampling: dict[str, float]) -> None:
    assert await answer(engine, **sampling) == [token] * 6


async def test_controls_are_applied(engine: EmbeddedEngine, token: int) -> None:
    banned = await answer(engine, bad_token_ids=[token])
    assert token not in banned
    ids, last = await collect(engine, "s", PROMPT, SamplingParams(max_tokens=9, stop_token_ids=[token]))
    assert (ids, last.finish_reason, last.stop_reason) == ([], "stop", token)


async def test_log_probabilities_are_those_of_the_logits(engine: EmbeddedEngine, token: int) -> None:
    request = EngineRequest("r", PROMPT, SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0))
    deltas = [delta async for delta in engine.generate(request)]
    found = [one for delta in deltas for one in delta.logprobs or ()]
    assert [(one[0].token_id, one[0].logprob, one[0].rank) for one in found] == [(token, 0.0, 1)] * 2
    (scored,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert [one and one[0].logprob for one in scored] == [None, -100.0, -100.0]


async def test_no_stream_is_faster_than_its_pace(engine: EmbeddedEngine, token: int) -> None:
    begun = time.monotonic()
    answers = await asyncio.gather(*(collect(engine, str(i), PROMPT, SamplingParams(max_tokens=20)) for i in range(5)))
    assert time.monotonic() - begun >= 19 * 0.01
    assert [ids for ids, _ in answers] == [[token] * 20] * 5


async def test_prompts_take_their_time(model_path: Path) -> None:
    engine = made(model_path, "--constant-step-s", "0", "--constant-prompt-rate", "500")
    await engine.start()
    begun = time.monotonic()
    await collect(engine, "r", PROMPT * 40, SamplingParams(max_tokens=1))
    await engine.stop()
    assert time.monotonic() - begun >= 120 / 500


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--engine", "constant", "--disaggregation-mode", "prefill"], "--engine constant has no KV"),
        (["--engine", "constant", "--numerics", "exact"], "--numerics exact needs --engine embedded"),
        (["--constant-step-s", "1"], "--constant-step-s 1.0 needs --engine constant"),
        (["--engine", "constant", "--constant-prompt-rate", "0"], "--constant-prompt-rate"),
    ],
)
def test_what_contradicts_it_is_refused(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse_arguments(["--model-path", "/model", *arguments], {})


async def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    engine = made(tmp_path)
    with pytest.raises(StartupError, match="no tokenizer"):
        await engine.start()
