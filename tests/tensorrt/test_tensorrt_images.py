"""Pictures beside prompts, which TensorRT-LLM's own processor of the model puts into them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from colour_model import NUM_TOKENS, data_url, png, write_colour_model
from stand_in import collect, embedded, running
from trtllm_files import configured

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.forcing import ForcedPrefix
from adapters.vocabulary import Vocabulary
from worker.engines.embedded import EmbeddedEngine
from worker.engines.images import ImageInput
from worker.engines.trtllm import TrtllmEngine
from worker.errors import ConfigurationError, InvalidRequest, StartupError
from worker.sampling import SamplingParams

RED, BLUE = (252, 0, 0), (0, 0, 252)
PLACE = 2
PROMPT = [9, PLACE, 30, 41]
FIELD = "multi_modal_data.image_url[0].Url"


def seen(colour: tuple[int, int, int]) -> list[int]:
    """The prompt that the stand-in's processor makes of `PROMPT`."""
    tokens = [10 + 100 * i + value // 4 for i, value in enumerate(colour)]
    return [PROMPT[0], *tokens, *PROMPT[2:]]


def image(url: str) -> tuple[ImageInput]:
    return (ImageInput(FIELD, url),)


@pytest.fixture(scope="session")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_colour_model(tmp_path_factory.mktemp("sighted") / "model")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    (directory / "a blue.png").write_bytes(png(BLUE))
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(sighted: Path, files: Path) -> AsyncIterator[TrtllmEngine]:
    async with running(sighted, "--modality", "multimodal", "--allowed-local-media-path", str(files)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def blind(sighted: Path) -> AsyncIterator[EmbeddedEngine]:
    async with embedded(sighted) as started:
        yield started


PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_are_of_the_prompt_with_its_pictures(
    seeing: TrtllmEngine, blind: EmbeddedEngine, files: Path
) -> None:
    info = seeing._info
    assert info is not None
    assert info.takes_images
    urls = ((data_url(RED), RED), ((files / "a blue.png").as_uri(), BLUE))
    for number, (url, colour) in enumerate(urls):
        expected = await collect(blind, seen(colour), PARAMS, f"there-{number}")
        found = await collect(seeing, PROMPT, PARAMS, f"here-{number}", images=image(url))
        assert found.token_ids == expected.token_ids
    text = await collect(seeing, [9, 30, 41], PARAMS, "text")
    assert text.token_ids == (await collect(blind, [9, 30, 41], PARAMS, "text")).token_ids


@pytest.mark.asyncio(loop_scope="module")
async def test_the_prompt_is_counted_with_its_pictures(seeing: TrtllmEngine) -> None:
    from worker.engines import EngineRequest

    request = EngineRequest("counted", PROMPT, PARAMS, images=image(data_url(RED)))
    counts = {delta.num_prompt_tokens async for delta in seeing.generate(request)}
    assert counts == {len(PROMPT) - 1 + NUM_TOKENS}


@pytest.mark.asyncio(loop_scope="module")
async def test_controls_that_the_library_honours_itself(seeing: TrtllmEngine, blind: EmbeddedEngine) -> None:
    pictures = image(data_url(RED))
    natively: list[dict[str, Any]] = [{"bad_token_ids": [3, 40]}, {"logprobs": 2}, {"repetition_penalty": 1.5}]
    for number, fields in enumerate(natively):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **fields)
        expected = await collect(blind, seen(RED), params, f"there-{number}")
        found = await collect(seeing, PROMPT, params, f"here-{number}", images=pictures)
        assert found.token_ids == expected.token_ids
        assert (found.logprobs is None) == (expected.logprobs is None)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_needs_the_prompts_tokens_is_refused_by_name(seeing: TrtllmEngine) -> None:
    context = Context(Vocabulary(1024), frozenset(), 0)
    forced = ProcessorChain([ForcedPrefix(ForcedPrefix.Args(token_ids=[40]), context)], context)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"chain": forced}, "forced_prefix"),
        ({"seed": 3, "temperature": 1.0}, {}, "seeded_sampler"),
        ({"frequency_penalty": 0.5}, {}, "frequency_penalty"),
        ({"min_tokens": 2}, {}, "min_tokens"),
    ]
    for fields, given, name in cases:
        params = SamplingParams(max_tokens=3, **fields)
        with pytest.raises(InvalidRequest, match=rf"multi_modal_data: cannot be given beside .*{name}"):
            await collect(seeing, PROMPT, params, images=image(data_url(RED)), **given)
    with pytest.raises(InvalidRequest, match="multi_modal_data: cannot go on after a migration"):
        await collect(seeing, PROMPT, PARAMS, images=image(data_url(RED)), generated_token_ids=[5])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9/a.png", "is no host of --allowed-media-domains"),
        ("file:///etc/passwd", "is no file below --allowed-local-media-path"),
        ("data:image/png;base64,AAAA", "is no picture that can be read"),
        ("data:image/png,AAAA", "is no picture that can be read"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_no_picture_is_refused(seeing: TrtllmEngine, url: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        await collect(seeing, PROMPT, PARAMS, images=image(url))
    assert refused.value.field == FIELD


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_without_a_place_is_refused(seeing: TrtllmEngine) -> None:
    with pytest.raises(InvalidRequest, match="multi_modal_data: the model's processor refuses the prompt: 1 images"):
        await collect(seeing, [9, 30], PARAMS, images=image(data_url(RED)))


async def test_a_model_of_text_ends_the_start(model: Path) -> None:
    with pytest.raises(StartupError, match="--modality multimodal: the model takes text alone"):
        async with running(model, "--modality", "multimodal"):
            pass


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--disaggregation-mode", "prefill"], "--disaggregation-mode prefill"),
        (
            ["--override-engine-args", json.dumps({"speculative_config": {"decoding_type": "MTP"}})],
            "speculative_config",
        ),
        (["--allowed-media-domains", "a.example"], "--engine vllm"),
    ],
)
def test_what_pictures_do_not_go_with(tmp_path: Path, argv: list[str], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        configured(tmp_path, "", "--modality", "multimodal", *argv)
