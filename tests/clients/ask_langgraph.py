"""langgraph: LangChain's agent, whose model is called in a loop with the tools' results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from checks import ADA, OSLO, run, writing
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
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


def connected(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=60, max_retries=0)


def first(**settings: Any) -> Any:
    """Middleware that gives the first request of a run further fields."""

    @wrap_model_call
    def given(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
        if len(request.messages) > 1:
            return handler(request)
        choice = {"tool_choice": settings["tool_choice"]} if "tool_choice" in settings else {}
        others = {name: value for name, value in settings.items() if name != "tool_choice"}
        return handler(request.override(model_settings={**request.model_settings, **others}, **choice))

    return given


def agent(url: str, model: str, **settings: Any) -> Any:
    return create_agent(connected(url, model), [get_weather], middleware=[first(**settings)])


def results(state: dict[str, Any]) -> list[str]:
    return [message.content for message in state["messages"] if message.type == "tool"]


def check_plain(url: str, model: str) -> None:
    state = create_agent(connected(url, model), []).invoke({"messages": [("user", "What is the capital of France?")]})
    assert state["messages"][-1].content == "The capital of France is Paris."


def check_structured(url: str, model: str) -> None:
    made = create_agent(connected(url, model), [], response_format=ProviderStrategy(Person))
    assert made.invoke({"messages": [("user", ADA)]})["structured_response"] == Person(name="Ada", age=36)


def check_structured_as_a_tool(url: str, model: str) -> None:
    made = create_agent(
        connected(url, model), [], response_format=ToolStrategy(Person), middleware=[first(parallel_tool_calls=False)]
    )
    assert isinstance(made.invoke({"messages": [("user", ADA)]})["structured_response"], Person)


def check_tools(url: str, model: str) -> None:
    state = agent(url, model).invoke({"messages": [("user", OSLO)]}, {"recursion_limit": 40})
    assert state["messages"][-1].content


def check_tools_streamed(url: str, model: str) -> None:
    made = agent(url, model, extra_body=writing("Oslo"))
    parts = list(made.stream({"messages": [("user", OSLO)]}, {"recursion_limit": 40}, stream_mode="messages"))
    assert any(message.type == "tool" and "Oslo" in message.content for message, _ in parts)


def check_parallel(url: str, model: str) -> None:
    made = agent(url, model, extra_body=writing("Oslo", "Paris"))
    found = results(made.invoke({"messages": [("user", OSLO)]}, {"recursion_limit": 40}))
    assert found[:2] == ["It is raining in Oslo.", "It is raining in Paris."]


def check_required(url: str, model: str) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        made = agent(url, model, tool_choice=choice, parallel_tool_calls=False)
        assert results(made.invoke({"messages": [("user", OSLO)]}, {"recursion_limit": 40})), choice


def check_round_trip(url: str, model: str) -> None:
    made = agent(url, model, extra_body=writing("Oslo"))
    state = made.invoke({"messages": [("user", OSLO)]}, {"recursion_limit": 40})
    assert results(state)[0] == "It is raining in Oslo."
    assert state["messages"][-1].type == "ai"
    state["messages"].append(("user", "And what should I wear?"))
    assert agent(url, model).invoke(state, {"recursion_limit": 40})["messages"][-1].content


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
