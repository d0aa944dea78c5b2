"""OpenAI's Agents SDK, by chat completions and by its default, the Responses API."""

from __future__ import annotations

import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import OSLO, run, writing
from openai import AsyncOpenAI
from pydantic import BaseModel

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Weather of a city."""
    return f"It is raining in {city}."


def settings(**fields: Any) -> ModelSettings:
    return ModelSettings(**{"temperature": 0, "max_tokens": 60, **fields})


async def answer(agent: Agent[Any], url: str, model: str, api: str, prompt: Any = OSLO, *, turns: int = 4) -> Any:
    """The result of a run."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        config = RunConfig(model=MODELS[api](model, client))
        return await Runner.run(agent, prompt, run_config=config, max_turns=turns)


async def streamed(agent: Agent[Any], url: str, model: str, api: str) -> tuple[Any, list[Any]]:
    """The result of a streamed run, and its events."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        result = Runner.run_streamed(agent, OSLO, run_config=RunConfig(model=MODELS[api](model, client)), max_turns=4)
        events = [event async for event in result.stream_events()]
    return result, events


def calls(result: Any) -> list[Any]:
    return [item.raw_item for item in result.new_items if item.type == "tool_call_item"]


def caller(**fields: Any) -> Agent[Any]:
    """An agent that ends with what its tool returns."""
    return Agent(
        name="w", tools=[get_weather], model_settings=settings(**fields), tool_use_behavior="stop_on_first_tool"
    )


async def plain(url: str, model: str, api: str) -> None:
    result = await answer(Agent(name="a", model_settings=settings()), url, model, api, "What is the capital of France?")
    assert "Paris" in result.final_output


async def structured(url: str, model: str, api: str) -> None:
    agent = Agent(name="a", model_settings=settings(), output_type=Person)
    result = await answer(agent, url, model, api, "Ada is 36 years old. Give her name and age as JSON.")
    assert result.final_output == Person(name="Ada", age=36)


async def tools(url: str, model: str, api: str) -> None:
    result = await answer(caller(extra_body=writing("Oslo")), url, model, api)
    assert result.final_output.startswith("It is raining in Oslo.")
    result = await answer(Agent(name="w", tools=[get_weather], model_settings=settings()), url, model, api, turns=10)
    assert result.final_output


async def parallel(url: str, model: str, api: str) -> None:
    result = await answer(caller(extra_body=writing("Oslo", "Paris"), parallel_tool_calls=True), url, model, api)
    assert len(calls(result)) >= 2
    assert len({call.call_id for call in calls(result)}) == len(calls(result))


async def required(url: str, model: str, api: str) -> None:
    for choice in ("required", "get_weather"):
        result = await answer(caller(tool_choice=choice, parallel_tool_calls=False), url, model, api)
        assert len(calls(result)) == 1


async def stream_tools(url: str, model: str, api: str) -> None:
    result, events = await streamed(caller(extra_body=writing("Oslo")), url, model, api)
    assert result.final_output.startswith("It is raining in Oslo.")
    assert {"raw_response_event", "run_item_stream_event"} <= {event.type for event in events}


async def round_trip(url: str, model: str, api: str) -> None:
    """After the required call the SDK asks again, with the result and ``auto``."""
    agent = Agent(
        name="w", tools=[get_weather], model_settings=settings(tool_choice="required", parallel_tool_calls=False)
    )
    result = await answer(agent, url, model, api, turns=10)
    assert calls(result)
    assert result.final_output


async def handoff(url: str, model: str, api: str) -> None:
    other = Agent(name="weather", model_settings=settings())
    agent = Agent(
        name="a",
        handoffs=[other],
        model_settings=settings(tool_choice="transfer_to_weather", parallel_tool_calls=False),
    )
    result = await answer(agent, url, model, api)
    assert result.last_agent.name == "weather"
    assert result.final_output


async def check_plain(url: str, model: str) -> None:
    await plain(url, model, "chat")


async def check_structured(url: str, model: str) -> None:
    await structured(url, model, "chat")


async def check_tools(url: str, model: str) -> None:
    await tools(url, model, "chat")


async def check_tools_streamed(url: str, model: str) -> None:
    await stream_tools(url, model, "chat")


async def check_parallel(url: str, model: str) -> None:
    await parallel(url, model, "chat")


async def check_required(url: str, model: str) -> None:
    await required(url, model, "chat")


async def check_round_trip(url: str, model: str) -> None:
    await round_trip(url, model, "chat")


async def check_round_trip_handoff(url: str, model: str) -> None:
    await handoff(url, model, "chat")


async def check_responses(url: str, model: str) -> None:
    await plain(url, model, "responses")


async def check_responses_structured(url: str, model: str) -> None:
    await structured(url, model, "responses")


async def check_responses_tools(url: str, model: str) -> None:
    await tools(url, model, "responses")


async def check_responses_tools_streamed(url: str, model: str) -> None:
    await stream_tools(url, model, "responses")


async def check_responses_parallel(url: str, model: str) -> None:
    await parallel(url, model, "responses")


async def check_responses_required(url: str, model: str) -> None:
    await required(url, model, "responses")


async def check_responses_round_trip(url: str, model: str) -> None:
    await round_trip(url, model, "responses")


async def check_responses_handoff(url: str, model: str) -> None:
    await handoff(url, model, "responses")


if __name__ == "__main__":
    set_tracing_disabled(True)
    sys.exit(run(sys.modules[__name__]))
