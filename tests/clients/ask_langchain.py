"""langchain-openai's `ChatOpenAI`, by chat completions and by the Responses API."""

from __future__ import annotations

import sys
from functools import reduce
from operator import add
from typing import Any, Literal

from checks import ADA, OSLO, run, writing
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: Literal["Ada", "Bob"]
    age: int


@tool
def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Weather of a city."""
    return f"It is raining in {city}."


def connected(url: str, model: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=60, max_retries=0, **fields)


def cities(message: Any) -> list[str]:
    assert not message.invalid_tool_calls
    assert len({each["id"] for each in message.tool_calls}) == len(message.tool_calls)
    return [each["args"]["city"] for each in message.tool_calls]


def check_plain(url: str, model: str) -> None:
    assert connected(url, model).invoke("What is the capital of France?").content == "The capital of France is Paris."


async def check_plain_stream(url: str, model: str) -> None:
    parts = [part async for part in connected(url, model).astream("What is the capital of France?")]
    whole = reduce(add, parts)
    assert whole.content == "The capital of France is Paris."
    assert whole.response_metadata["finish_reason"] == "stop"


def check_structured(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        structured = connected(url, model).with_structured_output(Person, method=method)
        assert structured.invoke(ADA).name == "Ada", method


def check_tools(url: str, model: str) -> None:
    bound = connected(url, model).bind_tools([get_weather])
    assert bound.invoke(OSLO)
    assert connected(url, model).bind_tools([get_weather], strict=True).invoke(OSLO)
    assert cities(bound.invoke(OSLO, extra_body=writing("Oslo")))[0] == "Oslo"


def check_tools_streamed(url: str, model: str) -> None:
    bound = connected(url, model).bind_tools([get_weather])
    assert cities(reduce(add, bound.stream(OSLO, extra_body=writing("Oslo", "Paris"))))[:2] == ["Oslo", "Paris"]


def check_parallel(url: str, model: str) -> None:
    bound = connected(url, model).bind_tools([get_weather], parallel_tool_calls=True)
    assert cities(bound.invoke(OSLO, extra_body=writing("Oslo", "Paris")))[:2] == ["Oslo", "Paris"]


def check_required(url: str, model: str) -> None:
    for choice in ("any", "get_weather"):
        bound = connected(url, model).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        assert len(cities(bound.invoke(OSLO))) == 1, choice


def check_round_trip(url: str, model: str) -> None:
    messages: list[Any] = [HumanMessage(OSLO)]
    bound = connected(url, model).bind_tools([get_weather], parallel_tool_calls=False, tool_choice="any")
    messages.append(bound.invoke(messages))
    messages += [ToolMessage("It is raining.", tool_call_id=call["id"]) for call in messages[-1].tool_calls]
    assert connected(url, model).bind_tools([get_weather]).invoke(messages)


def check_responses(url: str, model: str) -> None:
    responses = connected(url, model, use_responses_api=True)
    assert "Paris" in responses.invoke("What is the capital of France?").text
    assert responses.with_structured_output(Person, method="json_schema").invoke(ADA) == Person(name="Ada", age=36)


def check_responses_tools(url: str, model: str) -> None:
    bound = connected(url, model, use_responses_api=True).bind_tools([get_weather], tool_choice="any")
    message = bound.invoke(OSLO, parallel_tool_calls=False)
    (call,) = message.tool_calls
    history = [HumanMessage(OSLO), message, ToolMessage("It is raining.", tool_call_id=call["id"])]
    assert connected(url, model, use_responses_api=True).invoke(history).text
    streamed = reduce(add, bound.stream(OSLO, parallel_tool_calls=False))
    assert len(cities(streamed)) == 1


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
