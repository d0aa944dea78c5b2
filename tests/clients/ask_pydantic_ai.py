"""pydantic-ai: agents with functions and with answers as pydantic models."""

from __future__ import annotations

import sys
from typing import Any, Literal

from checks import OSLO, beginning, run, writing
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 80}
ADA = "Ada is 36 years old. Give her name and age."


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int


def connected(url: str, model: str) -> OpenAIChatModel:
    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))


def first(**fields: Any) -> Any:
    """Settings of the first request of a run; later ones have none but those of every request."""
    return lambda context: GREEDY | fields if context.run_step <= 1 else GREEDY


def with_weather(model: Any, settings: Any) -> Agent[None, str]:
    agent = Agent(model, model_settings=settings, retries=4)

    @agent.tool_plain
    def get_weather(city: Literal["Oslo", "Paris"]) -> str:
        """Weather of a city."""
        return f"It is raining in {city}."

    return agent


def calls(result: Any) -> list[ToolCallPart]:
    return [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]


async def check_plain(url: str, model: str) -> None:
    result = await Agent(connected(url, model), model_settings=GREEDY).run("What is the capital of France?")
    assert result.output == "The capital of France is Paris."


async def check_plain_stream(url: str, model: str) -> None:
    agent = Agent(connected(url, model), model_settings=GREEDY)
    async with agent.run_stream("What is the capital of France?") as result:
        texts = [text async for text in result.stream_text(delta=True)]
    assert "".join(texts) == "The capital of France is Paris."


async def check_structured(url: str, model: str) -> None:
    agent = Agent(connected(url, model), output_type=NativeOutput(Person), model_settings=GREEDY, retries=0)
    assert (await agent.run(ADA)).output == Person(name="Ada", age=36)


async def prompted(model: Any) -> None:
    """The schema is in the instructions, and the API is asked for any object."""
    settings = GREEDY | {"extra_body": beginning('{"name":"Ada","age":36}')}
    agent = Agent(model, output_type=PromptedOutput(Person), model_settings=settings, retries=0)
    assert (await agent.run(ADA)).output == Person(name="Ada", age=36)


async def check_structured_prompted(url: str, model: str) -> None:
    await prompted(connected(url, model))


async def check_required_output_function(url: str, model: str) -> None:
    settings = GREEDY | {"parallel_tool_calls": False}
    agent = Agent(connected(url, model), output_type=ToolOutput(Person), model_settings=settings, retries=0)
    assert isinstance((await agent.run(ADA)).output, Person)


async def check_tools(url: str, model: str) -> None:
    result = await with_weather(connected(url, model), GREEDY).run(OSLO)
    assert result.output


async def check_tools_streamed(url: str, model: str) -> None:
    agent = with_weather(connected(url, model), first(extra_body=writing("Oslo")))
    async with agent.run_stream(OSLO) as result:
        texts = [text async for text in result.stream_text(delta=True)]
    assert "".join(texts)
    assert calls(result)[0].args_as_dict() == {"city": "Oslo"}


async def check_parallel(url: str, model: str) -> None:
    agent = with_weather(connected(url, model), first(extra_body=writing("Oslo", "Paris"), parallel_tool_calls=True))
    found = calls(await agent.run(OSLO))
    assert [each.args_as_dict()["city"] for each in found[:2]] == ["Oslo", "Paris"]
    assert len({each.tool_call_id for each in found}) == len(found)


async def check_round_trip(url: str, model: str) -> None:
    result = await with_weather(connected(url, model), first(extra_body=writing("Oslo"))).run(OSLO)
    assert result.output
    again = await with_weather(connected(url, model), GREEDY).run("And?", message_history=result.all_messages())
    assert again.output


async def check_responses(url: str, model: str) -> None:
    responses = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    assert (await Agent(responses, model_settings=GREEDY).run("What is the capital of France?")).output
    person = await Agent(responses, output_type=NativeOutput(Person), model_settings=GREEDY).run(ADA)
    assert person.output == Person(name="Ada", age=36)


async def check_responses_prompted(url: str, model: str) -> None:
    await prompted(OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=url, api_key="none")))


async def check_responses_round_trip(url: str, model: str) -> None:
    responses = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    result = await with_weather(responses, first(extra_body=writing("Oslo"))).run(OSLO)
    assert calls(result)
    assert result.output


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
