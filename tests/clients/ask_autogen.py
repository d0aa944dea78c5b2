"""AutoGen: its client of OpenAI's API, and an `AssistantAgent` that looks at its tools' results."""

from __future__ import annotations

import sys
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import HandoffMessage
from autogen_agentchat.teams import Swarm
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import ADA, OSLO, beginning, run, writing, written_call
from pydantic import BaseModel

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
    "multiple_system_messages": True,
}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int


async def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Weather of a city."""
    return f"It is raining in {city}."


TOOL = FunctionTool(get_weather, description="Weather of a city", strict=True)


def connected(url: str, model: str, **fields: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=model,
        base_url=url,
        api_key="none",
        model_info=INFO,
        temperature=0,
        max_tokens=60,
        max_retries=0,
        timeout=120,
        **fields,
    )


async def ask(url: str, model: str, prompt: str, **fields: Any) -> Any:
    client = connected(url, model)
    result = await client.create([UserMessage(content=prompt, source="user")], **fields)
    await client.close()
    return result.content


async def check_plain(url: str, model: str) -> None:
    assert await ask(url, model, "What is the capital of France?") == "The capital of France is Paris."


async def check_structured(url: str, model: str) -> None:
    assert Person.model_validate_json(await ask(url, model, ADA, json_output=Person)) == Person(name="Ada", age=36)


async def check_tools(url: str, model: str) -> None:
    assert await ask(url, model, OSLO, tools=[TOOL])
    calls = await ask(url, model, OSLO, tools=[TOOL], extra_create_args={"extra_body": writing("Oslo")})
    assert calls[0].arguments == '{"city":"Oslo"}'


async def check_tools_streamed(url: str, model: str) -> None:
    client = connected(url, model)
    asked: Any = {"tools": [TOOL], "extra_create_args": {"extra_body": writing("Oslo", "Paris")}}
    parts = [part async for part in client.create_stream([UserMessage(content=OSLO, source="user")], **asked)]
    await client.close()
    assert isinstance(parts[-1], CreateResult)
    assert [call.arguments for call in parts[-1].content[:2]] == ['{"city":"Oslo"}', '{"city":"Paris"}']  # type: ignore[union-attr]


async def check_parallel(url: str, model: str) -> None:
    calls = await ask(url, model, OSLO, tools=[TOOL], extra_create_args={"extra_body": writing("Oslo", "Paris")})
    assert [call.arguments for call in calls[:2]] == ['{"city":"Oslo"}', '{"city":"Paris"}']
    assert len({call.id for call in calls}) == len(calls)


async def check_required(url: str, model: str) -> None:
    for choice in ("required", TOOL):
        one = {"parallel_tool_calls": False}
        (call,) = await ask(url, model, OSLO, tools=[TOOL], tool_choice=choice, extra_create_args=one)
        assert call.name == "get_weather"


async def check_round_trip(url: str, model: str) -> None:
    client = connected(url, model)
    asked: list[Any] = [UserMessage(content=OSLO, source="user")]
    one = {"parallel_tool_calls": False}
    result = await client.create(asked, tools=[TOOL], tool_choice="required", extra_create_args=one)
    (call,) = result.content
    done = FunctionExecutionResult(content="It is raining.", name=call.name, call_id=call.id, is_error=False)
    asked += [
        AssistantMessage(content=result.content, source="weather"),
        FunctionExecutionResultMessage(content=[done]),
    ]
    assert (await client.create(asked, tools=[TOOL], tool_choice="none")).content
    await client.close()


async def check_round_trip_agent(url: str, model: str) -> None:
    client = connected(url, model, parallel_tool_calls=False)
    agent = AssistantAgent("weather", client, tools=[TOOL], reflect_on_tool_use=True)
    result = await agent.run(task=OSLO)
    await client.close()
    assert result.messages[-1].source == "weather"


async def check_round_trip_handoff(url: str, model: str) -> None:
    """One agent calls the function that hands the task to another one, which answers."""
    handing = connected(url, model, extra_body=beginning(written_call("transfer_to_weather", "{}")))
    answering = connected(url, model)
    agents: Any = [AssistantAgent("triage", handing, handoffs=["weather"]), AssistantAgent("weather", answering)]
    result = await Swarm(agents, termination_condition=MaxMessageTermination(3)).run(task=OSLO)
    for client in (handing, answering):
        await client.close()
    (handoff,) = [message for message in result.messages if isinstance(message, HandoffMessage)]
    assert (handoff.source, handoff.target) == ("triage", "weather")
    assert (result.messages[-1].source, bool(result.messages[-1].content)) == ("weather", True)  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
