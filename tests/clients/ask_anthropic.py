"""The anthropic package: Messages, with tools, streams, and tokens counted."""

from __future__ import annotations

import sys
from typing import Any, Literal

import anthropic
from checks import ADA, OSLO, refusal, run, writing
from pydantic import BaseModel

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: Any = [{"role": "user", "content": OSLO}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: int


def connected(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120)


def ask(url: str, model: str, messages: Any, **fields: Any) -> Any:
    with connected(url) as client:
        return client.messages.create(**{"model": model, "messages": messages, "max_tokens": 60, **fields})


def calls(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def check_messages(url: str, model: str) -> None:
    message = ask(url, model, FRANCE, system="You are brief.")
    assert (message.role, message.type, message.stop_reason) == ("assistant", "message", "end_turn")
    assert "Paris" in message.content[0].text
    assert message.usage.output_tokens > 0


def check_messages_cut(url: str, model: str) -> None:
    assert ask(url, model, FRANCE, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(url, model, FRANCE, stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert stopped.content[0].text == "The capital of France"


def check_messages_stream(url: str, model: str) -> None:
    with connected(url) as client, client.messages.stream(model=model, messages=FRANCE, max_tokens=60) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "The capital of France is Paris."  # type: ignore[union-attr]
    assert final.usage.output_tokens > 0


def check_messages_structured(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.messages.parse(
            model=model, max_tokens=60, messages=[{"role": "user", "content": ADA}], output_format=Person
        )
    assert answer.parsed_output == Person(name="Ada", age=36)


def check_messages_tools(url: str, model: str) -> None:
    assert ask(url, model, ASKED, tools=[WEATHER]).content
    message = ask(url, model, ASKED, tools=[WEATHER], extra_body=writing("Oslo", "Paris"))
    assert [block.input["city"] for block in calls(message)][:2] == ["Oslo", "Paris"]
    assert len({block.id for block in calls(message)}) == len(calls(message))


def check_messages_required(url: str, model: str) -> None:
    named = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    for choice in (ONE, named):
        message = ask(url, model, ASKED, tools=[WEATHER], tool_choice=choice)
        assert message.stop_reason == "tool_use"
        (call,) = calls(message)
        assert call.input["city"] in ("Oslo", "Paris")


def check_messages_tools_streamed(url: str, model: str) -> None:
    with (
        connected(url) as client,
        client.messages.stream(
            model=model, messages=ASKED, max_tokens=60, tools=[WEATHER], extra_body=writing("Oslo")
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"content_block_start", "content_block_delta", "input_json", "content_block_stop"} <= kinds
    assert calls(final)[0].input == {"city": "Oslo"}


def check_messages_round_trip(url: str, model: str) -> None:
    message = ask(url, model, ASKED, tools=[WEATHER], tool_choice=ONE)
    (call,) = calls(message)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is raining."}
    history = [
        *ASKED,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert ask(url, model, history, tools=[WEATHER], tool_choice={"type": "none"}).content[0].text


def check_messages_count(url: str, model: str) -> None:
    with connected(url) as client:
        counted = client.messages.count_tokens(model=model, messages=FRANCE).input_tokens
        used = client.messages.create(model=model, messages=FRANCE, max_tokens=4).usage.input_tokens
        assert counted == used
        assert client.messages.count_tokens(model=model, messages=FRANCE, tools=[WEATHER]).input_tokens > counted


def check_messages_errors(url: str, model: str) -> None:
    assert refusal(anthropic.BadRequestError, ask, url=url, model=model, messages=FRANCE, temperature=9)
    assert refusal(anthropic.BadRequestError, ask, url=url, model=model, messages=FRANCE, extra_body={"nothing": 1})
    assert refusal(anthropic.NotFoundError, ask, url=url, model="no-such-model", messages=FRANCE)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
