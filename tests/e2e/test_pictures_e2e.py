"""Pictures in chats of Dynamo's frontend and of the front door before it, on ``--engine trtllm``
with the stand-in for TensorRT-LLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from colour_model import NUM_TOKENS, data_url, png, write_colour_model
from e2e_stack import STAND_IN, Stack, running_stack
from processor_requests import PATIENT

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

RED, BLUE = (252, 0, 0), (0, 0, 252)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    model = write_colour_model(tmp_path_factory.mktemp("colours") / "llava-1.5")  # a name that the frontend knows
    files = tmp_path_factory.mktemp("pictures")
    (files / "blue.png").write_bytes(png(BLUE))
    with running_stack(tmp_path_factory.mktemp("seeing"), model) as stack:
        stack.start_frontend()
        options = ("--modality", "multimodal", "--allowed-local-media-path", str(files))
        stack.start_worker("--engine", "trtllm", *options, *PATIENT, **STAND_IN)  # type: ignore[arg-type]
        yield stack, files


def chat(stack: Stack, *urls: str, **options: Any) -> tuple[int, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    fields = {"max_tokens": 6, "ignore_eos": True, "temperature": 0, **options}
    status, text = stack.post("chat/completions", messages=messages, **fields)
    return status, json.loads(text)


def test_answers_depend_on_the_pictures(seeing: tuple[Stack, Path]) -> None:
    stack, files = seeing
    texts, counts = [], []
    for urls in ((), (data_url(RED),), (data_url(BLUE),), ((files / "blue.png").as_uri(),)):
        status, answer = chat(stack, *urls)
        assert status == 200, answer
        texts.append(answer["choices"][0]["message"]["content"])
        counts.append(answer["usage"]["prompt_tokens"])
    assert "MM-aware KV routing enabled" in stack.frontend.log  # it sends what its router has counted, too
    assert texts[2] == texts[3]
    assert len(set(texts)) == 3
    assert [count - counts[0] for count in counts] == [0, *[NUM_TOKENS] * 3]


def test_what_they_do_not_go_with_is_a_400(seeing: tuple[Stack, Path]) -> None:
    stack, _ = seeing
    for url, options, problem in (
        (data_url(RED), {"guided_regex": "a+", "ignore_eos": False}, "multi_modal_data: cannot be given beside regex"),
        (data_url(RED), {"seed": 3, "temperature": 1.0}, "multi_modal_data: cannot be given beside"),
        ("file:///etc/passwd", {}, "multi_modal_data.image_url[0].Url: is no file below"),
        ("http://127.0.0.1:9/a.png", {}, "multi_modal_data.image_url[0].Url: '127.0.0.1' is no host"),
    ):
        status, answer = chat(stack, url, **options)
        assert status == 400, answer
        assert problem in answer["message"], answer
