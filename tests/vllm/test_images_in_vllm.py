"""Pictures beside prompts, in vLLM behind Dynamo's frontend and the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import REPOSITORY, Stack, running_stack
from processor_requests import of
from tiny_vision import NUM_IMAGE_TOKENS, PLACEHOLDER, data_url, picture, png, write_tiny_vision
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm_stack import start_vllm_worker

from adapters.client import processor

pytestmark = pytest.mark.timeout(900)

RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))
NUM_TOKENS = 12


@dataclass
class Served:
    """A worker of the tiny model behind a frontend, which may read files of a directory."""

    stack: Stack
    files: Path

    def ask(self, *urls: str, **fields: Any) -> tuple[int, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
        asked = {"messages": [message], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
        status, text = self.stack.post("chat/completions", **asked)
        return status, json.loads(text)

    def answer(self, *urls: str, **fields: Any) -> Any:
        status, answer = self.ask(*urls, **fields)
        assert status == 200, answer
        return answer

    def text(self, *urls: str, **fields: Any) -> str:
        return str(self.answer(*urls, **fields)["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    files = tmp_path_factory.mktemp("pictures")
    (files / "blue.png").write_bytes(png(BLUE))
    with running_stack(tmp_path_factory.mktemp("stack") / "stack", model) as stack:
        ours = {key: value for key, value in stack.environ.items() if not key.startswith(("VLLM_", "DLW_PROCESSOR"))}
        stack.environ = {**ours, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'e2e'}"}
        stack.start_frontend()
        start_vllm_worker(stack, "--modality", "multimodal", "--allowed-local-media-path", str(files))
        yield Served(stack, files)


def expected(model: Path, *pictures: Any) -> list[str]:
    """The answers of ``LLM.generate`` of the same vLLM."""
    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=2**28)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    messages = [{"role": "user", "content": f"{PLACEHOLDER}What is it?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"image": [each]}} for each in pictures]
    found = llm.generate(prompts, params, use_tqdm=False)
    return [tokenizer.decode(each.outputs[0].token_ids, skip_special_tokens=True) for each in found]


def test_an_answer_is_that_of_vllm_itself(served: Served, model: Path) -> None:
    red, blue = served.text(data_url(RED)), served.text(data_url(BLUE))
    assert red != blue
    assert [red, blue] == expected(model, RED, BLUE)
    assert served.text((served.files / "blue.png").as_uri()) == blue
    assert served.text(data_url(RED), data_url(BLUE)) not in (red, blue)


def test_the_prompt_is_counted_with_its_pictures(served: Served) -> None:
    none, one, two = (
        served.answer(*[data_url(RED)] * count, max_tokens=1)["usage"]["prompt_tokens"] for count in range(3)
    )
    assert (one - none, two - one) == (NUM_IMAGE_TOKENS, NUM_IMAGE_TOKENS)


def test_processors_work_beside_a_picture(served: Served) -> None:
    plain = served.text(data_url(RED))
    penalised = of(processor("no_repeat_ngram", n=1), receipt=True)
    answer = served.answer(data_url(RED), **penalised)
    assert answer["choices"][0]["message"]["content"] != plain
    receipt = answer["nvext"]["engine_data"]["logits_processors"]
    assert receipt["images"] == 1
    assert receipt["processors"][0]["last_position"] == receipt["prompt_length"] + NUM_TOKENS - 1
    schema = {"type": "integer", "minimum": 10, "maximum": 12}
    guided = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    assert 10 <= json.loads(served.text(data_url(RED), ignore_eos=False, **guided)) <= 12
    drawn = [served.text(data_url(each), temperature=1.0, seed=3) for each in (RED, RED, BLUE)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9/a.png", "'127.0.0.1' is no host of --allowed-media-domains"),
        ("file:///etc/passwd", "is no file below --allowed-local-media-path"),
        ("data:image/png;base64,AAAA", "is no picture that can be read"),
    ],
)
def test_what_is_no_picture_is_refused(served: Served, url: str, problem: str) -> None:
    status, answer = served.ask(url)
    assert status == 400, answer
    assert f"multi_modal_data.image_url[0].Url: {problem}" in answer["message"], answer
    status, answer = served.ask(data_url(RED), nvext={"annotations": []}, prompt_logprobs=1)
    assert status == 200 or "prompt_logprobs" in json.dumps(answer)
