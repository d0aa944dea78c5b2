"""litellm, as a library: the provider ``openai`` with a base URL, and ``hosted_vllm``, which many
use for servers of their own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from checks import OSLO, refusal, run, writing
from pydantic import BaseModel

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
ADA: Any = [{"role": "user", "content": "Ada is 36 years old. Give her name and age as JSON."}]
ASKED: Any = [{"role": "user", "content": OSLO}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PROVIDERS = ("openai", "hosted_vllm")

litellm.telemetry = False
litellm.num_retries = 0


class Person(BaseModel):
    name: str
    age: int


def fields(url: str, model: str, provider: str = "openai", **more: Any) -> dict[str, Any]:
    shared = {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 24, "timeout": 120}
    return {"model": f"{provider}/{model}", **shared, **more}


def check_plain(url: str, model: str) -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(messages=FRANCE, **fields(url, model, provider))
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens > 0


def check_plain_stream(url: str, model: str) -> None:
    for provider in PROVIDERS:
        stream = litellm.completion(
            messages=FRANCE,
            stream=True,
            stream_options={"include_usage": True},
            **fields(url, model, provider),
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "The capital of France is Paris."
        assert litellm.stream_chunk_builder(chunks, messages=FRANCE).usage.completion_tokens > 0


async def check_plain_many_at_once(url: str, model: str) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(messages=FRANCE, **fields(url, model)) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {"The capital of France is Paris."}


def check_plain_text_completion(url: str, model: str) -> None:
    given = fields(url, model)
    given["model"] = f"text-completion-openai/{model}"
    answer = litellm.text_completion(prompt="The capital of France is", **given)
    assert answer.choices[0].text


def check_structured(url: str, model: str) -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(
            messages=ADA, response_format=Person, **{**fields(url, model, provider), "max_tokens": 60}
        )
        assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Ada", age=36)


def check_required(url: str, model: str) -> None:
    given = {**fields(url, model), "max_tokens": 80}
    answer = litellm.completion(
        messages=ASKED, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **given
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def check_tools(url: str, model: str) -> None:
    for provider in PROVIDERS:
        given = {**fields(url, model, provider), "max_tokens": 70}
        asked: Any = {"messages": ASKED, "tools": [WEATHER], **given}
        assert litellm.completion(**asked).choices
        answer = litellm.completion(**asked, extra_body=writing("Oslo"))
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city":"Oslo"}'


def check_tools_streamed(url: str, model: str) -> None:
    for provider in PROVIDERS:
        given = {**fields(url, model, provider), "max_tokens": 70}
        asked: Any = {"messages": ASKED, "tools": [WEATHER], "extra_body": writing("Oslo", "Paris"), **given}
        built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)), messages=ASKED)
        calls = built.choices[0].message.tool_calls
        assert [call.function.arguments for call in calls[:2]] == ['{"city":"Oslo"}', '{"city":"Paris"}']


def check_parallel(url: str, model: str) -> None:
    given = {**fields(url, model), "max_tokens": 70}
    answer = litellm.completion(messages=ASKED, tools=[WEATHER], extra_body=writing("Oslo", "Paris"), **given)
    calls = answer.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls[:2]] == ['{"city":"Oslo"}', '{"city":"Paris"}']


def check_round_trip(url: str, model: str) -> None:
    given = {**fields(url, model), "tools": [WEATHER], "max_tokens": 60}
    message = (
        litellm.completion(messages=ASKED, tool_choice="required", parallel_tool_calls=False, **given)
        .choices[0]
        .message
    )
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    answer = litellm.completion(messages=[*ASKED, message, *results], tool_choice="none", **given)
    assert answer.choices[0].message.content


def check_responses(url: str, model: str) -> None:
    """``openai`` asks the Responses API; for ``hosted_vllm`` litellm makes a chat of it."""
    for provider in PROVIDERS:
        given = {"model": f"{provider}/{model}", "api_base": url, "api_key": "none", "max_output_tokens": 40}
        response = litellm.responses(input="What is the capital of France?", **given)
        assert "Paris" in response.output[0].content[0].text, provider
        events = list(litellm.responses(input="What is the capital of France?", stream=True, **given))
        assert events[-1].type == "response.completed", provider


def check_responses_tools(url: str, model: str) -> None:
    for provider in PROVIDERS:
        response = litellm.responses(
            model=f"{provider}/{model}",
            api_base=url,
            api_key="none",
            input=OSLO,
            tools=[{"type": "function", **WEATHER["function"]}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=60,
        )
        assert [item.type for item in response.output] == ["function_call"], provider


async def check_messages(url: str, model: str) -> None:
    """``anthropic`` asks the Messages API; for others litellm makes a chat of the request."""
    for provider, base in (("anthropic", url.removesuffix("/v1")), ("hosted_vllm", url)):
        answer = await litellm.anthropic.messages.acreate(
            model=f"{provider}/{model}", api_base=base, api_key="none", max_tokens=40, messages=FRANCE
        )
        assert "Paris" in answer["content"][0]["text"], provider


async def check_messages_tools(url: str, model: str) -> None:
    function = WEATHER["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    for provider, base in (("anthropic", url.removesuffix("/v1")), ("hosted_vllm", url)):
        answer = await litellm.anthropic.messages.acreate(
            model=f"{provider}/{model}",
            api_base=base,
            api_key="none",
            max_tokens=60,
            messages=ASKED,
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert {block["type"] for block in answer["content"]} == {"tool_use"}, provider


def check_messages_of_a_completion(url: str, model: str) -> None:
    """The provider ``anthropic``, which speaks the Messages API."""
    place = {"model": f"anthropic/{model}", "api_base": url.removesuffix("/v1"), "api_key": "none", "max_tokens": 24}
    answer = litellm.completion(messages=FRANCE, **place)
    streamed = litellm.completion(messages=FRANCE, stream=True, **place)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == answer.choices[0].message.content == "The capital of France is Paris."
    stopped = litellm.completion(messages=FRANCE, stop=["Paris"], **place)
    assert stopped.choices[0].message.content == "The capital of France is "


def check_plain_own_fields(url: str, model: str) -> None:
    forced = {"name": "forced_prefix", "args": {"text": "I say: "}}
    answer = litellm.completion(messages=FRANCE, extra_body={"logits_processors": [forced]}, **fields(url, model))
    assert answer.choices[0].message.content.startswith("I say: ")


def check_plain_errors(url: str, model: str) -> None:
    hot = {**fields(url, model), "temperature": 9}
    assert refusal(litellm.BadRequestError, litellm.completion, messages=FRANCE, **hot)
    assert refusal(litellm.NotFoundError, litellm.completion, messages=FRANCE, **fields(url, "no-such-model"))


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
