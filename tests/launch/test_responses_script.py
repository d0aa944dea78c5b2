"""The Responses API behind the launch script, with OpenAI's client and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from launched_script import LaunchedScript, launched
from pydantic import BaseModel, ConfigDict

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
NAMED: Any = {"type": "function", "name": "get_weather"}
PREFIX = {"name": "forced_prefix", "args": {"text": "I say: "}}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_old: bool


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedScript]:
    arguments = ("--dyn-tool-call-parser", "hermes")
    with launched(tmp_path_factory.mktemp("responses"), *arguments) as running:
        running.wait_until_ready()
        yield running
        running.press_ctrl_c()
        assert running.finish() == 0, running.output


@pytest.fixture
def client(script: LaunchedScript) -> Iterator[openai.OpenAI]:
    with script.client() as made:
        yield made


def test_a_response_is_the_chat_streamed_or_not(script: LaunchedScript, client: openai.OpenAI) -> None:
    asked: Any = {"model": script.model, "temperature": 1, "extra_body": {"seed": 7}}
    whole = client.responses.create(input="Hello", instructions="Be kind.", max_output_tokens=12, **asked)
    with client.responses.stream(input="Hello", instructions="Be kind.", max_output_tokens=12, **asked) as stream:
        deltas = [each.delta for each in stream if each.type == "response.output_text.delta"]
    messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(messages=messages, max_tokens=12, **asked)
    assert whole.output_text == "".join(deltas) == chat.choices[0].message.content != ""
    assert whole.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    counted = client.responses.input_tokens.count(model=script.model, input="Hello", instructions="Be kind.")
    assert counted.input_tokens == whole.usage.input_tokens


def test_controls_receipts_and_log_probabilities(script: LaunchedScript, client: openai.OpenAI) -> None:
    response: Any = client.responses.create(
        model=script.model,
        input="Hello",
        max_output_tokens=12,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body={"logits_processors": {"processors": [PREFIX], "receipt": True}},
    )
    assert response.output_text.startswith("I say: ")
    (receipt,) = response.nvext["engine_data"]["logits_processors"]["processors"]
    assert receipt["name"] == "forced_prefix"
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens
    assert {len(each.top_logprobs) for each in logprobs} == {2}


def test_a_schema_holds(script: LaunchedScript, client: openai.OpenAI) -> None:
    response = client.responses.parse(model=script.model, input="Who?", text_format=Person, max_output_tokens=200)
    assert isinstance(response.output_parsed, Person)


def test_a_call_goes_round(script: LaunchedScript, client: openai.OpenAI) -> None:
    asked: Any = {"model": script.model, "tools": [TOOL], "parallel_tool_calls": False, "max_output_tokens": 200}
    with client.responses.stream(input="Oslo?", tool_choice=NAMED, **asked) as stream:
        deltas = "".join(each.delta for each in stream if each.type == "response.function_call_arguments.delta")
        first: Any = stream.get_final_response()
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.arguments == deltas
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked |= {"max_output_tokens": 8, "tool_choice": "none"}
    stored = client.responses.create(previous_response_id=first.id, input=[result], **asked)
    given: Any = [{"role": "user", "content": "Oslo?"}, *(item.to_dict() for item in first.output), result]
    for item in given:
        item.pop("parsed_arguments", None)
    again = client.responses.create(input=given, store=False, **asked)
    assert stored.output_text == again.output_text
    assert stored.usage is not None
    assert again.usage is not None
    assert stored.usage.input_tokens == again.usage.input_tokens
    listed = client.responses.input_items.list(stored.id, order="asc")
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]


def test_background_responses_and_the_store(script: LaunchedScript, client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model=script.model,
        input="Hello",
        max_output_tokens=1900,
        background=True,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
        if event.type == "response.created":
            response_id = event.response.id
    assert client.responses.cancel(response_id).status == "cancelled"
    assert client.responses.retrieve(response_id).status == "cancelled"
    client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 9}, "temperature"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "odd"}}}}, "text.format.schema"),
    (
        {"extra_body": {"logits_processors": [{"name": "min_tokens", "args": {"n": "a"}}]}},
        "logits_processors[0].args.n",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field(
    fields: dict[str, Any], param: str, stream: bool, script: LaunchedScript, client: openai.OpenAI
) -> None:
    asked: Any = {"model": script.model, "input": "Hello", "max_output_tokens": 4, "stream": stream, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked)
    assert caught.value.param == param
