"""Semantic Kernel: its chat completion with plugins, whose functions it calls itself."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from checks import ADA, OSLO, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int


class Weather:
    def __init__(self) -> None:
        self.asked: list[str] = []

    @kernel_function(description="Weather of a city")
    def get_weather(self, city: Annotated[str, "the city"]) -> str:
        self.asked.append(city)
        return f"It is raining in {city}."


def settings(**fields: Any) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=60, **fields)


async def answers(url: str, model: str, prompt: str, plugin: Weather | None = None, **fields: Any) -> list[Any]:
    """Messages of an answer."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        service = OpenAIChatCompletion(ai_model_id=model, async_client=client)
        kernel = Kernel()
        if plugin is not None:
            kernel.add_plugin(plugin, "Weather")
        history = ChatHistory()
        history.add_user_message(prompt)
        return await service.get_chat_message_contents(history, settings(**fields), kernel=kernel)


async def check_plain(url: str, model: str) -> None:
    (message,) = await answers(url, model, "What is the capital of France?")
    assert message.content == "The capital of France is Paris."


async def check_structured(url: str, model: str) -> None:
    (message,) = await answers(url, model, ADA, response_format=Person)
    assert Person.model_validate_json(message.content) == Person(name="Ada", age=36)


async def check_tools(url: str, model: str) -> None:
    assert await answers(url, model, OSLO, Weather(), function_choice_behavior=FunctionChoiceBehavior.Auto())


async def check_tools_streamed(url: str, model: str) -> None:
    plugin = Weather()
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        service = OpenAIChatCompletion(ai_model_id=model, async_client=client)
        kernel = Kernel()
        kernel.add_plugin(plugin, "Weather")
        history = ChatHistory()
        history.add_user_message(OSLO)
        wanted = settings(
            function_choice_behavior=FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1),
            parallel_tool_calls=False,
        )
        async for _ in service.get_streaming_chat_message_contents(history, wanted, kernel=kernel):
            pass
    assert len(plugin.asked) == 1


async def check_required(url: str, model: str) -> None:
    wanted = FunctionChoiceBehavior.Required(auto_invoke=False, filters={"included_functions": ["Weather-get_weather"]})
    (message,) = await answers(url, model, OSLO, Weather(), function_choice_behavior=wanted, parallel_tool_calls=False)
    assert [item.name for item in message.items if item.content_type == "function_call"] == ["Weather-get_weather"]


async def check_round_trip(url: str, model: str) -> None:
    """It calls the function itself, and asks again without tools."""
    plugin = Weather()
    wanted = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    found = await answers(url, model, OSLO, plugin, function_choice_behavior=wanted, parallel_tool_calls=False)
    assert len(plugin.asked) == 1
    assert found[0].content


async def check_round_trip_agent(url: str, model: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        service = OpenAIChatCompletion(ai_model_id=model, async_client=client)
        agent = ChatCompletionAgent(service=service, name="weather", plugins=[Weather()])
        assert str(await agent.get_response("What is the capital of France?"))


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
