"""Microsoft's Agent Framework: agents by the Responses API, its default, and by chats."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from agent_framework import ChatContext, chat_middleware
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from checks import ADA, OSLO, run, writing
from openai import AsyncOpenAI
from pydantic import BaseModel

CLIENTS: dict[str, Any] = {"chat": OpenAIChatCompletionClient, "responses": OpenAIChatClient}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int


class Weather:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_weather(self, city: Literal["Oslo", "Paris"]) -> str:
        """Weather of a city."""
        self.asked.append(city)
        return f"It is raining in {city}."


async def answer(url: str, model: str, api: str, prompt: str, tools: Any = (), **options: Any) -> Any:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        middleware = options.pop("middleware", ())
        agent = CLIENTS[api](model=model, async_client=client, middleware=middleware).as_agent(
            name="a", tools=list(tools)
        )
        return await agent.run(prompt, options={**GREEDY, **options})


async def streamed(url: str, model: str, api: str, prompt: str, tools: Any = (), **options: Any) -> str:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        agent = CLIENTS[api](model=model, async_client=client).as_agent(name="a", tools=list(tools))
        return "".join([part.text async for part in agent.run(prompt, stream=True, options={**GREEDY, **options})])


@chat_middleware
async def calls_at_first(context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
    """Make the model call for two cities before it has seen a result."""
    if all(message.role != "tool" for message in context.messages):
        context.options = {**(context.options or {}), "extra_body": writing("Oslo", "Paris")}
    await call_next()


async def parallel(url: str, model: str, api: str) -> None:
    weather = Weather()
    options = {"middleware": [calls_at_first], "allow_multiple_tool_calls": True, "max_tokens": 100}
    answered = await answer(url, model, api, OSLO, [weather.get_weather], **options)
    contents = [content for message in answered.messages for content in message.contents]
    called = [content.call_id for content in contents if content.type == "function_call"]
    assert weather.asked[:2] == ["Oslo", "Paris"]
    assert len(set(called)) == len(called) == len(weather.asked)
    assert [content.call_id for content in contents if content.type == "function_result"] == called


async def plain(url: str, model: str, api: str) -> None:
    assert "Paris" in (await answer(url, model, api, "What is the capital of France?")).text
    assert "Paris" in await streamed(url, model, api, "What is the capital of France?")


async def structured(url: str, model: str, api: str) -> None:
    found = await answer(url, model, api, ADA, response_format=Person)
    assert found.value == Person(name="Ada", age=36)


async def required(url: str, model: str, api: str) -> None:
    for choice in ("required", {"mode": "required", "required_function_name": "get_weather"}):
        weather = Weather()
        options = {"tool_choice": choice, "allow_multiple_tool_calls": False}
        await answer(url, model, api, OSLO, [weather.get_weather], **options)
        assert weather.asked, choice


async def check_plain(url: str, model: str) -> None:
    await plain(url, model, "chat")


async def check_structured(url: str, model: str) -> None:
    await structured(url, model, "chat")


async def check_tools(url: str, model: str) -> None:
    assert (await answer(url, model, "chat", OSLO, [Weather().get_weather])).text


async def check_tools_streamed(url: str, model: str) -> None:
    weather = Weather()
    options = {"tool_choice": "required", "allow_multiple_tool_calls": False}
    await streamed(url, model, "chat", OSLO, [weather.get_weather], **options)
    assert weather.asked


async def check_parallel(url: str, model: str) -> None:
    await parallel(url, model, "chat")


async def check_required(url: str, model: str) -> None:
    await required(url, model, "chat")


async def check_responses(url: str, model: str) -> None:
    await plain(url, model, "responses")


async def check_responses_structured(url: str, model: str) -> None:
    await structured(url, model, "responses")


async def check_responses_tools(url: str, model: str) -> None:
    assert (await answer(url, model, "responses", OSLO, [Weather().get_weather])).text


async def check_responses_parallel(url: str, model: str) -> None:
    await parallel(url, model, "responses")


async def check_responses_required(url: str, model: str) -> None:
    await required(url, model, "responses")


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
