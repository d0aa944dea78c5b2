"""litellm, as a library: the provider ``openai`` with a base URL, and ``hosted_vllm``, which many
use for servers of their own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from checks import refusal, run
from pydantic import BaseModel

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
ADA: Any = [{"role": "user", "content": "Ada is 36 years old. Give her name and age as JSON."}]
PROVIDERS = ("openai", "hosted_vllm")

litellm.telemetry = False
litellm.num_retries = 0


class Person(BaseModel):
    name: str
    age: int


def fields(url: str, model: str, provider: str = "openai", **more: Any) -> dict[str, Any]:
    shared = {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 24, "timeout": 120}
    return {"model": f"{provider}/{model}", **shared, **more}


def check_chat(url: str, model: str) -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(messages=FRANCE, **fields(url, model, provider))
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens > 0


def check_stream(url: str, model: str) -> None:
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


async def check_many_at_once(url: str, model: str) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(messages=FRANCE, **fields(url, model)) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {"The capital of France is Paris."}


def check_text_completion(url: str, model: str) -> None:
    given = fields(url, model)
    given["model"] = f"text-completion-openai/{model}"
    answer = litellm.text_completion(prompt="The capital of France is", **given)
    assert answer.choices[0].text


def check_response_format(url: str, model: str) -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(
            messages=ADA, response_format=Person, **{**fields(url, model, provider), "max_tokens": 60}
        )
        assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Ada", age=36)


def check_tools(url: str, model: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answer = litellm.completion(
        messages=messages, tools=[tool], tool_choice="required", **{**fields(url, model), "max_tokens": 80}
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def check_messages_of_anthropic(url: str, model: str) -> None:
    """The provider ``anthropic``, which speaks the Messages API."""
    place = {"model": f"anthropic/{model}", "api_base": url.removesuffix("/v1"), "api_key": "none", "max_tokens": 24}
    answer = litellm.completion(messages=FRANCE, **place)
    streamed = litellm.completion(messages=FRANCE, stream=True, **place)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == answer.choices[0].message.content == "The capital of France is Paris."
    stopped = litellm.completion(messages=FRANCE, stop=["Paris"], **place)
    assert stopped.choices[0].message.content == "The capital of France is "


def check_own_fields(url: str, model: str) -> None:
    forced = {"name": "forced_prefix", "args": {"text": "I say: "}}
    answer = litellm.completion(messages=FRANCE, extra_body={"logits_processors": [forced]}, **fields(url, model))
    assert answer.choices[0].message.content.startswith("I say: ")


def check_errors(url: str, model: str) -> None:
    hot = {**fields(url, model), "temperature": 9}
    assert refusal(litellm.BadRequestError, litellm.completion, messages=FRANCE, **hot)
    assert refusal(litellm.NotFoundError, litellm.completion, messages=FRANCE, **fields(url, "no-such-model"))


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
