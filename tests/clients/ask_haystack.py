"""haystack: its chat generator for OpenAI's API, and its agent."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from checks import ADA, OSLO, run, writing
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int


@tool
def get_weather(city: Annotated[Literal["Oslo", "Paris"], "the city"]) -> str:
    """Weather of a city."""
    return f"It is raining in {city}."


def connected(url: str, model: str, **fields: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model=model,
        api_base_url=url,
        timeout=120,
        max_retries=0,
        generation_kwargs={"temperature": 0, "max_tokens": 60, **fields},
    )


def ask(generator: OpenAIChatGenerator, prompt: str, **more: Any) -> Any:
    return generator.run([ChatMessage.from_user(prompt)], **more)["replies"][0]


def cities(reply: Any) -> list[str]:
    return [call.arguments["city"] for call in reply.tool_calls]


def check_plain(url: str, model: str) -> None:
    assert ask(connected(url, model), "What is the capital of France?").text == "The capital of France is Paris."


def check_plain_stream(url: str, model: str) -> None:
    parts: list[str] = []
    ask(
        connected(url, model),
        "What is the capital of France?",
        streaming_callback=lambda part: parts.append(part.content),
    )
    assert "".join(parts) == "The capital of France is Paris."


def check_structured(url: str, model: str) -> None:
    reply = ask(connected(url, model, response_format=Person), ADA)
    assert Person.model_validate_json(reply.text) == Person(name="Ada", age=36)


def check_tools(url: str, model: str) -> None:
    assert ask(connected(url, model), OSLO, tools=[get_weather])
    assert cities(ask(connected(url, model, extra_body=writing("Oslo")), OSLO, tools=[get_weather]))[0] == "Oslo"


def check_tools_streamed(url: str, model: str) -> None:
    made = connected(url, model, extra_body=writing("Oslo"))
    assert cities(ask(made, OSLO, tools=[get_weather], streaming_callback=lambda part: None))[0] == "Oslo"


def check_parallel(url: str, model: str) -> None:
    made = connected(url, model, extra_body=writing("Oslo", "Paris"))
    assert cities(ask(made, OSLO, tools=[get_weather]))[:2] == ["Oslo", "Paris"]


def check_required(url: str, model: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        made = connected(url, model, tool_choice=choice, parallel_tool_calls=False)
        assert len(cities(ask(made, OSLO, tools=[get_weather]))) == 1, choice


def check_round_trip(url: str, model: str) -> None:
    reply = ask(connected(url, model, tool_choice="required", parallel_tool_calls=False), OSLO, tools=[get_weather])
    history = [
        ChatMessage.from_user(OSLO),
        reply,
        ChatMessage.from_tool("It is raining.", origin=reply.tool_calls[0]),
    ]
    assert connected(url, model).run(history, tools=[get_weather])["replies"][0]


def check_round_trip_agent(url: str, model: str) -> None:
    agent = Agent(
        chat_generator=connected(url, model, extra_body=writing("Oslo")), tools=[get_weather], max_agent_steps=2
    )
    messages = agent.run([ChatMessage.from_user(OSLO)])["messages"]
    assert any(message.tool_call_results for message in messages)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
