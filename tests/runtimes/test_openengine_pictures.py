"""Pictures on the stand-in for TensorRT-LLM, over OpenEngine, and from the front door before it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from colour_model import NUM_TOKENS, data_url, png, write_colour_model
from engine_doors import ask, door, refusal
from openengine_workers import OpenEngineClient, connected
from running_workers import taking_requests

from worker.arguments import parse_arguments
from worker.build import Built, make_engine
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.runtime import OpenEngineWorker

RED, BLUE = (252, 0, 0), (0, 0, 252)
in_module_loop = pytest.mark.asyncio(loop_scope="module")
PROMPT = [9, 2, 30, 41]


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Makes ``tensorrt_llm`` importable, and forgets it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTLLM_STANDIN_FORKS", "yes")
        patch.syspath_prepend(str(Path(__file__).parents[1] / "trtllm_standin"))
        yield
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


Served = tuple[OpenEngineClient, httpx.AsyncClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A client of a worker behind OpenEngine, and one of a front door before it."""
    model = write_colour_model(tmp_path_factory.mktemp("served") / "model")
    given = ["--engine", "trtllm", "--runtime", "openengine", "--grpc-port", "0", "--served-model-name", "tiny"]
    given += ["--model-path", str(model), "--modality", "multimodal", "--max-num-seqs", "8"]
    arguments = parse_arguments(given, {})
    with stand_in():
        worker = OpenEngineWorker(Built(make_engine(arguments), arguments, None, smoke=False))
        async with (
            taking_requests(worker),
            connected(worker.port) as client,
            door(model, f"grpc://127.0.0.1:{worker.port}") as front,
        ):
            yield client, front


def item(**source: Any) -> dict[str, Any]:
    return {"modality": wire.MODALITY_IMAGE, **source}


@in_module_loop
async def test_pictures_of_the_protocol(served: Served) -> None:
    client, _ = served
    asked: dict[str, Any] = {"token_ids": {"ids": PROMPT}, "stopping": {"max_tokens": 6, "ignore_eos": True}}
    red, blue = [await client.answer(**asked, media=[item(data_uri=data_url(each))]) for each in (RED, BLUE)]
    raw = await client.answer(**asked, media=[item(raw_bytes=png(BLUE), mime_type="image/png", uuid="blue")])
    assert red.ids() != blue.ids() == raw.ids()
    assert red.usage.prompt_tokens == len(PROMPT) - 1 + NUM_TOKENS
    info = await client.call("Control.GetModelInfo", wire.GetModelInfoRequest())
    assert info.supports_multimodal


@in_module_loop
async def test_refusals_of_pictures_name_the_protocols_field(served: Served) -> None:
    client, _ = served
    asked: dict[str, Any] = {"token_ids": {"ids": PROMPT}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"media": [item(url="http://a.example/b.png")]}, "media[0]: 'a.example' is no host"),
        ({"media": [item(raw_bytes=b"none")]}, "media[0]: is no picture that can be read"),
        ({"media": [item(data_uri=data_url(RED))] * 2}, "media: the model's processor refuses the prompt: 2 images"),
        ({"media": [item(data_uri=data_url(RED))], "guided": {"regex": "a"}}, "media: cannot be given beside regex"),
    ]
    for fields, problem in cases:
        error = await client.refusal(**asked, **fields)
        assert problem in str(error.details()), error


def chat(*colours: tuple[int, int, int], text: str = "What is it?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in colours]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@in_module_loop
async def test_chats_of_the_front_door(served: Served) -> None:
    _, front = served
    fields: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    none, red, blue, both = [
        await ask(front, messages=chat(*colours), **fields) for colours in ((), (RED,), (BLUE,), (RED, BLUE))
    ]
    texts = [each["choices"][0]["message"]["content"] for each in (none, red, blue, both)]
    assert len(set(texts)) == len(texts)
    counts = [each["usage"]["prompt_tokens"] for each in (none, red, both)]
    assert counts == [counts[0] + NUM_TOKENS * number for number in range(3)]
    again = await asyncio.gather(*(ask(front, messages=chat(each), **fields) for each in (RED, BLUE)))
    assert [each["choices"][0]["message"]["content"] for each in again] == texts[1:3]


@in_module_loop
async def test_refusals_of_the_front_door(served: Served) -> None:
    _, front = served
    status, error = await refusal(front, messages=chat(RED), guided_regex="a+")
    assert status == 400
    assert "multi_modal_data: cannot be given beside regex" in error["message"]
    wrong = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    status, error = await refusal(front, messages=wrong)
    assert status == 400
    assert "multi_modal_data.image_url[0].Url: is no picture that can be read" in error["message"]
