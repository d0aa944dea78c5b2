"""smolagents: a `ToolCallingAgent`, which requires a call at each step and ends by a tool."""

from __future__ import annotations

import sys
from typing import Any, Literal

from checks import OSLO, run, writing
from smolagents import ChatMessage, OpenAIServerModel, ToolCallingAgent, tool

ASKED: Any = [{"role": "user", "content": [{"type": "text", "text": OSLO}]}]


@tool
def get_weather(city: Literal["Oslo", "Paris"]) -> str:
    """Weather of a city.

    Args:
        city: The city.
    """
    return f"It is raining in {city}."


def connected(url: str, model: str, **fields: Any) -> OpenAIServerModel:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "client_kwargs": {"max_retries": 0, "timeout": 120}}
    return OpenAIServerModel(model, api_base=url, api_key="none", **{**settings, **fields})


def cities(message: ChatMessage) -> list[str]:
    return [dict(call.function.arguments)["city"] for call in message.tool_calls or []]  # type: ignore[call-overload]


def check_plain(url: str, model: str) -> None:
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    assert connected(url, model).generate(asked).content == "The capital of France is Paris."
    parts = list(connected(url, model).generate_stream(asked))
    assert "".join(part.content or "" for part in parts) == "The capital of France is Paris."


def check_structured(url: str, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}}
    assert "Oslo" in str(connected(url, model).generate(ASKED, response_format=wanted).content)


def check_required(url: str, model: str) -> None:
    answer = connected(url, model, parallel_tool_calls=False).generate(ASKED, tools_to_call_from=[get_weather])
    assert answer.tool_calls
    assert len(answer.tool_calls) == 1


def check_parallel(url: str, model: str) -> None:
    answer = connected(url, model, extra_body=writing("Oslo", "Paris")).generate(
        ASKED, tools_to_call_from=[get_weather]
    )
    assert len(answer.tool_calls or []) >= 2


def check_tools_streamed(url: str, model: str) -> None:
    made = connected(url, model, extra_body=writing("Oslo"), parallel_tool_calls=False)
    names, arguments = "", ""
    for part in made.generate_stream(ASKED, tools_to_call_from=[get_weather]):
        for call in part.tool_calls or []:
            names += call.function.name or "" if call.function else ""
            arguments += str(call.function.arguments or "") if call.function else ""
    assert (names, arguments) == ("get_weather", '{"city":"Oslo"}')


def agent(url: str, model: str, **fields: Any) -> ToolCallingAgent:
    """An agent that gets the weather of Oslo at its first step, and answers at its second."""
    made = connected(url, model, extra_body=writing("Oslo"), parallel_tool_calls=False)
    answer = '<tool_call>{"name": "final_answer", "arguments": {"answer":"rain"}}</tool_call>'

    def then_answer(step: object, agent: Any) -> None:
        forced = {"name": "forced_prefix", "args": {"text": answer}}
        agent.model.kwargs["extra_body"] = {"logits_processors": [forced]}

    return ToolCallingAgent(
        tools=[get_weather], model=made, max_steps=3, step_callbacks=[then_answer], verbosity_level=0, **fields
    )


def check_round_trip(url: str, model: str) -> None:
    for stream in (False, True):
        made = agent(url, model, stream_outputs=stream)
        assert made.run(OSLO) == "rain"
        first = made.memory.steps[1]
        assert first.observations == "It is raining in Oslo."  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
