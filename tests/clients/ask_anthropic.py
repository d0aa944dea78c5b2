"""The anthropic package, as applications and coding agents use it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
from anthropic import types
from anthropic.types import beta, message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from checks import refusal, run, writing
from pydantic import BaseModel, ConfigDict

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
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
SHELL: Any = {
    "name": "bash",
    "description": "Runs a command and returns what it prints",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": ["echo one", "echo two"]}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
OSLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
SAID = "The capital of France is Paris."
DOCUMENT = Path(__file__).parents[2] / "docs" / "messages.md"


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str


@contextmanager
def connected(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120) as client:
        yield client


def comparable(message: Any) -> Any:
    """A message without what differs between two answers to one request."""
    found = message.to_dict()
    blocks = [{name: value for name, value in each.items() if name != "parsed_output"} for each in found["content"]]
    kept = ("model", "role", "type", "stop_reason", "stop_sequence")
    return [found[name] for name in kept], [{**each, "id": ""} for each in blocks], found["usage"]["output_tokens"]


def check_messages_every_field_has_a_row(url: str, model: str) -> None:
    rows = set(re.findall(r"^\| `(\S+)` \| (?:messages|both) \|", DOCUMENT.read_text(), re.MULTILINE))
    created = message_create_params.MessageCreateParamsBase.__annotations__
    counted = message_count_tokens_params.MessageCountTokensParams.__annotations__
    previews = beta_create_params.MessageCreateParamsBase.__annotations__
    assert {*created, *counted, *previews, "stream"} <= rows


def check_messages(url: str, model: str) -> None:
    with connected(url) as client:
        message = client.messages.create(model=model, max_tokens=24, messages=FRANCE)
    assert isinstance(message, types.Message)
    assert [(each.type, each.text) for each in message.content if each.type == "text"] == [("text", SAID)]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, model)
    assert message._request_id


def check_messages_stream_is_the_message(url: str, model: str) -> None:
    requests: list[dict[str, Any]] = [
        {"messages": FRANCE, "max_tokens": 24},
        {"messages": FRANCE, "max_tokens": 3},
        {"messages": FRANCE, "max_tokens": 24, "stop_sequences": ["Paris", "x"]},
        {"messages": OSLO, "max_tokens": 80, "tools": [WEATHER], "tool_choice": {"type": "any"}},
        {
            "messages": OSLO,
            "max_tokens": 80,
            "tools": [WEATHER],
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
        {"messages": OSLO, "max_tokens": 30, "tools": [WEATHER], "system": "Be brief."},
    ]
    with connected(url) as client:
        for fields in requests:
            whole = client.messages.create(model=model, **fields)
            with client.messages.stream(model=model, **fields) as stream:
                kinds = [event.type for event in stream]
                final = stream.get_final_message()
            assert comparable(final) == comparable(whole), fields
            assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def check_messages_raw_events(url: str, model: str) -> None:
    with connected(url) as client:
        events: list[Any] = list(client.messages.create(model=model, max_tokens=24, messages=FRANCE, stream=True))
    first, last = events[0], events[-2]
    assert first.type == "message_start"
    assert last.type == "message_delta"
    assert first.message.usage.input_tokens > 10
    assert last.usage.output_tokens > 3
    assert "".join(each.delta.text for each in events if each.type == "content_block_delta") == SAID


def check_messages_stop_sequences(url: str, model: str) -> None:
    with connected(url) as client:
        message = client.messages.create(
            model=model, max_tokens=24, messages=FRANCE, stop_sequences=["nowhere", "of France"]
        )
    assert message.content[0].type == "text"
    assert message.content[0].text == "The capital "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "of France")


def check_messages_system_and_turns(url: str, model: str) -> None:
    turns: Any = [*FRANCE, {"role": "assistant", "content": [{"type": "text", "text": SAID}]}]
    turns.append({"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "of Italy?"}]})
    cached: Any = [{"type": "text", "text": "Answer in one sentence.", "cache_control": {"type": "ephemeral"}}]
    with connected(url) as client:
        message = client.messages.create(model=model, max_tokens=24, messages=turns, system=cached)
        again = client.messages.create(model=model, max_tokens=24, messages=turns, system=cached)
    assert comparable(message) == comparable(again)
    used, cache = again.usage, again.usage.cache_read_input_tokens
    assert cache
    assert used.input_tokens + cache == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def check_messages_tools_there_and_back(url: str, model: str) -> None:
    turns: Any = list(OSLO)
    with connected(url) as client:
        called = client.messages.create(
            model=model,
            max_tokens=80,
            messages=turns,
            tools=[WEATHER],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert called.stop_reason == "tool_use"
        calls = [each for each in called.content if each.type == "tool_use"]
        assert calls
        for each in calls:
            assert (each.name, each.input["city"] in ("Paris", "Oslo")) == ("get_weather", True)
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": "3 degrees"} for each in calls]
        turns += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
        told = client.messages.create(
            model=model, max_tokens=40, messages=turns, tools=[WEATHER], tool_choice={"type": "none"}
        )
    assert [each.type for each in told.content] == ["text"]


def check_messages_parallel_calls(url: str, model: str) -> None:
    with connected(url) as client:
        message = client.messages.create(
            model=model, max_tokens=70, messages=OSLO, tools=[WEATHER], extra_body=writing("Oslo", "Paris")
        )
    calls = [each for each in message.content if each.type == "tool_use"]
    assert [each.input["city"] for each in calls][:2] == ["Oslo", "Paris"]
    assert len({each.id for each in calls}) == len(calls)


def check_messages_a_coding_agent(url: str, model: str) -> None:
    """The loop of a coding agent: it runs what it is told to, until the model's turn ends."""
    turns: Any = [{"role": "user", "content": "Print one with the tool, then say what it printed."}]
    ran: list[str] = []
    with connected(url) as client:
        for step in range(4):
            choice: Any = (
                {"type": "any", "disable_parallel_tool_use": True}
                if step == 0
                else {"type": "auto" if step < 3 else "none"}
            )
            with client.messages.stream(
                model=model,
                max_tokens=80,
                messages=turns,
                tools=[SHELL],
                tool_choice=choice,
                system="You are an agent.",
            ) as stream:
                message = stream.get_final_message()
            turns.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                break
            results = []
            for call in message.content:
                if call.type == "tool_use":
                    command = str(call.input["command"])
                    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
                    ran.append(done.stdout.strip())
                    results.append({"type": "tool_result", "tool_use_id": call.id, "content": done.stdout})
            turns.append({"role": "user", "content": results})
    assert set(ran) <= {"one", "two"}
    assert ran
    assert message.stop_reason in ("end_turn", "max_tokens")


def check_messages_the_tool_runner(url: str, model: str) -> None:
    """The package's own loop."""
    ran: list[str] = []

    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Name of the city.
        """
        ran.append(city)
        return "3 degrees"

    with connected(url) as client:
        runner = client.beta.messages.tool_runner(
            model=model,
            max_tokens=80,
            messages=OSLO,
            tools=[anthropic.beta_tool(get_weather)],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_iterations=2,
        )
        messages = list(runner)
    assert isinstance(messages[0], beta.BetaMessage)
    assert ran


def check_messages_parse(url: str, model: str) -> None:
    with connected(url) as client:
        message = client.messages.parse(model=model, max_tokens=60, messages=FRANCE, output_format=City)
    assert message.parsed_output is not None
    assert message.parsed_output.city


def check_messages_tokens_are_counted(url: str, model: str) -> None:
    requests: list[dict[str, Any]] = [{}, {"system": "Be brief."}, {"tools": [WEATHER]}]
    for fields in requests:
        with connected(url) as client:
            count = client.messages.count_tokens(model=model, messages=FRANCE, **fields)
            used = client.messages.create(model=model, messages=FRANCE, max_tokens=1, **fields).usage
        assert count.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def check_messages_processors_and_receipts(url: str, model: str) -> None:
    chosen = {"processors": [{"name": "choice", "args": {"choices": ["Rome", "Oslo"]}}], "receipt": True}
    body = {"logits_processors": chosen, "temperature": 1.0, "seed": 3}
    with connected(url) as client:
        message: Any = client.messages.create(model=model, max_tokens=8, messages=FRANCE, extra_body=body)
        stream = client.messages.create(model=model, max_tokens=8, messages=FRANCE, extra_body=body, stream=True)
        last: Any = [event for event in stream if event.type == "message_delta"][-1]
    assert message.content[0].type == "text"
    assert message.content[0].text in ("Rome", "Oslo")
    for each in (message, last):
        receipt = each.nvext["engine_data"]["logits_processors"]
        assert "choice" in [one["name"] for one in receipt["processors"]]


def check_messages_previews(url: str, model: str) -> None:
    with connected(url) as client:
        message = client.beta.messages.create(
            model=model, max_tokens=24, messages=FRANCE, betas=["context-1m-2025-08-07"]
        )
    assert message.content[0].type == "text"
    assert message.content[0].text == SAID


async def check_messages_async(url: str, model: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        message = await client.messages.create(model=model, max_tokens=24, messages=FRANCE)
        async with client.messages.stream(model=model, max_tokens=24, messages=FRANCE) as stream:
            texts = [text async for text in stream.text_stream]
    assert message.content[0].type == "text"
    assert message.content[0].text == "".join(texts) == SAID


def check_messages_errors_name_the_field(url: str, model: str) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    bad: list[tuple[type[Exception], dict[str, Any], str]] = [
        (anthropic.NotFoundError, {"model": "nowhere"}, "not_found_error"),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0]"),
        (anthropic.BadRequestError, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        (anthropic.BadRequestError, {"extra_body": {"logits_processors": [{"name": "chioce"}]}}, "did you mean choice"),
        (anthropic.BadRequestError, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (anthropic.BadRequestError, {"container": "c"}, "container: there are no containers"),
        (anthropic.BadRequestError, {"max_tokens": 0}, "max_tokens"),
    ]
    with connected(url) as client:
        for kind, fields, said in bad:
            for stream in (False, True):
                asked = {"model": model, "max_tokens": 24, "messages": FRANCE, "stream": stream, **fields}
                assert said in refusal(kind, client.messages.create, **asked)


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
