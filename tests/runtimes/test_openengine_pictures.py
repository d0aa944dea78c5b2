"""Pictures on the stand-in for TensorRT-LLM, over OpenEngine, and from the front door before it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from colour_model import NUM_TOKENS, data_url, png, write_colour_model
from engine_doors import ask, door, refusal
from openengine_workers import OpenEngineClient, connected, running
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
    assert error["param"] == "messages[0].content[0]"
    assert error["message"].startswith("messages[0].content[0]: cannot be given beside regex")
    wrong = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    status, error = await refusal(front, messages=wrong)
    assert status == 400
    assert error["message"].startswith("messages[0].content[0].image_url.url: is no picture that can be read")


ASKED: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}


def of_sdk(front: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0)


def as_input(*urls: str, text: str = "What is it?") -> Any:
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]


@in_module_loop
async def test_pictures_of_responses_are_those_of_chats(served: Served) -> None:
    _, front = served
    asked: dict[str, Any] = {"max_output_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with of_sdk(front) as client:
        for colours in ((RED,), (BLUE,), (RED, BLUE)):
            expected = await ask(front, messages=chat(*colours), **ASKED)
            given = as_input(*map(data_url, colours))
            found = await client.responses.create(model="tiny", input=given, **asked)
            assert found.output_text == expected["choices"][0]["message"]["content"]
            assert found.usage is not None
            assert found.usage.input_tokens == expected["usage"]["prompt_tokens"]
            counted = await client.responses.input_tokens.count(model="tiny", input=given)
            assert counted.input_tokens == found.usage.input_tokens
        again = {"model": "tiny", "input": "And now?", "previous_response_id": found.id}
        told = await client.responses.create(**again, **asked)
        assert told.usage.input_tokens > found.usage.input_tokens + 2
        items = await client.responses.input_items.list(told.id, order="asc", include=["message.input_image.image_url"])
        (first, *_) = items.data
        assert [part.image_url for part in first.content if part.type == "input_image"] == [  # type: ignore[union-attr]
            data_url(RED),
            data_url(BLUE),
        ]


@in_module_loop
async def test_refusals_of_responses_name_the_clients_field(served: Served) -> None:
    _, front = served
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (as_input(data_url(RED), "data:image/png;base64,AAAA"), {}, "input[0].content[1].image_url: is no picture"),
        (as_input("data:text/plain;base64,AAAA"), {}, "input[0].content[0].image_url: is no picture"),
        (as_input("data:image/png;base64,!"), {}, "input[0].content[0].image_url: is no picture"),
        (as_input("http://a.example/b.png"), {}, "input[0].content[0].image_url: 'a.example' is no host"),
        (as_input(data_url(RED)), {"guided_regex": "a+"}, "input[0].content[0]: cannot be given beside regex"),
    ]
    async with of_sdk(front) as client:
        for given, more, problem in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="tiny", input=given, extra_body=more)
            assert problem in str(caught.value)
            assert caught.value.param == problem.partition(": ")[0]


def as_blocks(*colours: tuple[int, int, int]) -> list[dict[str, Any]]:
    files = [base64.b64encode(png(each)).decode() for each in colours]
    sources = [{"type": "base64", "media_type": "image/png", "data": data} for data in files]
    blocks = [{"type": "image", "source": source} for source in sources]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "What is it?"}]}]


async def message(front: httpx.AsyncClient, path: str = "/v1/messages", **fields: Any) -> tuple[int, Any]:
    answer = await front.post(path, json={"model": "tiny", **fields})
    return answer.status_code, answer.json()


@in_module_loop
async def test_pictures_of_messages_are_those_of_chats(served: Served) -> None:
    _, front = served
    for colours in ((RED,), (BLUE,), (RED, BLUE)):
        expected = await ask(front, messages=chat(*colours), **ASKED)
        status, found = await message(front, messages=as_blocks(*colours), **ASKED)
        assert status == 200, found
        assert found["content"][0]["text"] == expected["choices"][0]["message"]["content"]
        status, counted = await message(front, "/v1/messages/count_tokens", messages=as_blocks(*colours))
        assert (status, counted) == (200, {"input_tokens": expected["usage"]["prompt_tokens"]})


@in_module_loop
async def test_refusals_of_messages_name_the_clients_field(served: Served) -> None:
    _, front = served
    no_picture = base64.b64encode(b"a text").decode()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"type": "base64", "media_type": "image/png", "data": no_picture}, "source.data: is no picture"),
        (
            {"type": "base64", "media_type": "image/png", "data": "!"},
            "source.data: must be the picture's file in base64",
        ),
        ({"type": "base64", "media_type": "image/bmp", "data": no_picture}, "source.media_type: must be one of"),
        ({"type": "url", "url": "http://a.example/b.png"}, "source.url: 'a.example' is no host"),
        ({"type": "url", "url": "file:///etc/passwd"}, "source.url: is no file below"),
    ]
    for source, problem in cases:
        block = {"type": "image", "source": source}
        status, found = await message(front, messages=[{"role": "user", "content": [block]}], **ASKED)
        assert status == 400
        assert found["error"]["message"].startswith(f"messages[0].content[0].{problem}")


@in_module_loop
async def test_an_engine_of_text_refuses_each_picture_by_name(tiny_model: Path) -> None:
    """The embedded engine: its workers say so before a chat template is asked for places."""
    async with running(tiny_model) as worker, door(tiny_model, f"grpc://127.0.0.1:{worker.port}") as front:
        status, error = await refusal(front, messages=chat(RED))
        assert (status, error["param"]) == (400, "messages[0].content[0]")
        assert "serve text only" in error["message"]
        status, found = await message(front, messages=as_blocks(RED), max_tokens=3)
        assert (status, found["error"]["message"].partition(": ")[0]) == (400, "messages[0].content[0].source.data")
        async with of_sdk(front) as client:
            with pytest.raises(openai.BadRequestError, match="serve text only") as caught:
                await client.responses.create(model="tiny", input=as_input(data_url(RED)))
            assert caught.value.param == "input[0].content[0]"
