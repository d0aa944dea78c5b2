"""Speculative decoding of ``--engine trtllm`` behind Dynamo's frontend, on the stand-in for
TensorRT-LLM: the library's own guides, and refusals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import STAND_IN, Stack, running_stack
from processor_requests import PATIENT

from adapters.client import logits_processors, processor

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

DRAFTS = '{"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3}}'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 10, "maximum": 12}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("drafting"), tiny_model) as stack:
        stack.start_frontend()
        options = ("--guided-decoding-backend", "llguidance", "--override-engine-args", DRAFTS)
        stack.start_worker("--engine", "trtllm", *options, *PATIENT, **STAND_IN)  # type: ignore[arg-type]
        yield stack


def chat(stack: Stack, **options: Any) -> tuple[int, Any]:
    messages = [{"role": "user", "content": "Hello there"}]
    status, text = stack.post("chat/completions", messages=messages, **{"max_tokens": 60, **options})
    return status, json.loads(text)


def test_guided_answers(drafting: Stack) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for options in ({"temperature": 0}, {"temperature": 2.0}):
        status, answer = chat(drafting, response_format=named, **options)
        assert status == 200, answer
        found = json.loads(answer["choices"][0]["message"]["content"])
        assert set(found) == {"name", "age"}
        assert 10 <= found["age"] <= 12
    for guide, texts in (
        ({"guided_regex": "(yes|no)!"}, {"yes!", "no!"}),
        ({"guided_choice": ["a b", "c"]}, {"a b", "c"}),
    ):
        status, answer = chat(drafting, **guide)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] in texts
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_what_needs_a_processor_is_a_400_that_names_it(drafting: Stack) -> None:
    forced = logits_processors(processor("forced_sequence", text="Hello"))
    for options, problem in (
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"seed": 3, "temperature": 1.0}, "seed"),
        ({"logprobs": True}, "logprobs"),
        (forced, "forced_sequence"),
        ({"guided_regex": "a+", "frequency_penalty": 1.0}, "frequency_penalty"),
    ):
        status, answer = chat(drafting, **options)
        assert status == 400, answer
        assert problem in answer["message"], answer
        assert "beside speculative decoding" in answer["message"]


def test_a_plain_request(drafting: Stack) -> None:
    status, answer = chat(drafting, max_tokens=7, ignore_eos=True)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 7)
