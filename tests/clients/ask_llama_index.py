"""llama-index: `OpenAILike` with tools and structured answers."""

import sys
from typing import Any, Literal

from checks import ADA, OSLO, run, writing
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: Literal["Ada", "Bob"]
    age: int


def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Weather of a city."""
    return f"It is raining in {city}."


TOOL = FunctionTool.from_defaults(get_weather)


def connected(url: str, model: str, **fields: Any) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=60,
        max_retries=0,
        timeout=120,
        **fields,
    )


def cities(llm: OpenAILike, answer: Any) -> list[str]:
    found = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    assert len({each.tool_id for each in found}) == len(found)
    return [each.tool_kwargs["city"] for each in found]


def check_plain(url: str, model: str) -> None:
    llm = connected(url, model)
    assert "Paris" in llm.chat([ChatMessage("What is the capital of France?")]).message.content
    assert llm.complete("What is the capital of France?").text


def check_plain_stream(url: str, model: str) -> None:
    parts = list(connected(url, model).stream_chat([ChatMessage("What is the capital of France?")]))
    assert "".join(part.delta or "" for part in parts) == "The capital of France is Paris."


def check_structured(url: str, model: str) -> None:
    llm = connected(url, model, should_use_structured_outputs=True)
    answer = llm.as_structured_llm(Person).chat([ChatMessage(ADA)])
    assert answer.raw == Person(name="Ada", age=36)


def check_tools(url: str, model: str) -> None:
    llm = connected(url, model)
    assert llm.chat_with_tools([TOOL], user_msg=OSLO)
    assert cities(llm, llm.chat_with_tools([TOOL], user_msg=OSLO, extra_body=writing("Oslo"))) == ["Oslo"]


def check_tools_streamed(url: str, model: str) -> None:
    llm = connected(url, model)
    *_, last = llm.stream_chat_with_tools([TOOL], user_msg=OSLO, extra_body=writing("Oslo"))
    assert cities(llm, last) == ["Oslo"]


def check_parallel(url: str, model: str) -> None:
    llm = connected(url, model)
    asked: dict[str, Any] = {"allow_parallel_tool_calls": True, "extra_body": writing("Oslo", "Paris")}
    assert cities(llm, llm.chat_with_tools([TOOL], user_msg=OSLO, **asked))[:2] == ["Oslo", "Paris"]


def check_required(url: str, model: str) -> None:
    llm = connected(url, model)
    assert len(cities(llm, llm.chat_with_tools([TOOL], user_msg=OSLO, tool_required=True))) == 1
    named = llm.chat_with_tools([TOOL], user_msg=OSLO, tool_choice="get_weather")
    assert len(cities(llm, named)) == 1


def check_round_trip(url: str, model: str) -> None:
    llm = connected(url, model)
    history = [ChatMessage(OSLO)]
    answer = llm.chat_with_tools([TOOL], chat_history=history, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    history += [
        answer.message,
        ChatMessage(
            role="tool", content=get_weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}
        ),
    ]
    assert llm.chat_with_tools([TOOL], chat_history=history).message


async def check_round_trip_agent(url: str, model: str) -> None:
    agent = FunctionAgent(tools=[TOOL], llm=connected(url, model), initial_tool_choice="get_weather", streaming=True)
    assert str(await agent.run(OSLO))


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
