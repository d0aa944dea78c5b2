"""The openai package, as applications use it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from checks import OSLO, refusal, run, writing
from pydantic import BaseModel, ConfigDict

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: Any = [{"role": "user", "content": OSLO}]
ADA: Any = [{"role": "user", "content": "Ada is 36 years old. Give her name and age as JSON."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    age: int


def connected(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def check_plain_models(url: str, model: str) -> None:
    with connected(url) as client:
        assert [each.id for each in client.models.list()] == [model]


def check_plain_model(url: str, model: str) -> None:
    with connected(url) as client:
        assert client.models.retrieve(model).id == model


def check_plain(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.chat.completions.create(model=model, messages=FRANCE, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("The capital of France is Paris.", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_plain_stream(url: str, model: str) -> None:
    with connected(url) as client:
        stream = client.chat.completions.create(
            model=model, messages=FRANCE, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == 1
    assert not chunks[-1].choices
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


def check_plain_stream_helper(url: str, model: str) -> None:
    with connected(url) as client, client.chat.completions.stream(model=model, messages=FRANCE, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "The capital of France is Paris."


def check_plain_completion(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=6)
        stream = client.completions.create(
            model=model, prompt="The capital of France is", temperature=0, max_tokens=6, stream=True
        )
        streamed = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert answer.choices[0].text == streamed != ""


def check_structured(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.chat.completions.parse(
            model=model, messages=ADA, response_format=Person, temperature=0, max_tokens=60
        )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


def check_structured_streamed(url: str, model: str) -> None:
    with (
        connected(url) as client,
        client.chat.completions.stream(
            model=model, messages=ADA, response_format=Person, temperature=0, max_tokens=60
        ) as stream,
    ):
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ada", age=36)


def check_required(url: str, model: str) -> None:
    asked: Any = {"messages": ASKED, "tools": [WEATHER], "parallel_tool_calls": False}
    for choice in ("required", NAMED):
        with connected(url) as client:
            answer = client.chat.completions.create(
                model=model, tool_choice=choice, temperature=0, max_tokens=80, **asked
            )
        message = answer.choices[0].message
        assert message.tool_calls
        for call in message.tool_calls:
            assert call.type == "function"
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
        assert answer.choices[0].finish_reason == "tool_calls"


def check_round_trip(url: str, model: str) -> None:
    """The assistant's message goes back as it came: with calls, and without content."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    with connected(url) as client:

        def ask(**fields: Any) -> Any:
            return client.chat.completions.create(
                model=model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=80, **fields
            )

        message = ask(tool_choice=NAMED).choices[0].message
        assert not message.content
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
        assert ask(tool_choice="none").choices[0].message.content


def check_tools_streamed_named(url: str, model: str) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    with (
        connected(url) as client,
        client.chat.completions.stream(
            model=model, messages=messages, tools=[WEATHER], tool_choice=NAMED, temperature=0, max_tokens=80
        ) as stream,
    ):
        stream.until_done()
        (call, *_) = stream.get_final_completion().choices[0].message.tool_calls or ()  # type: ignore[misc]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def check_tools(url: str, model: str) -> None:
    """Tools as frameworks send them, of which the model may call none, one or several."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with connected(url) as client:
        for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}, {"tools": [strict]}):
            given: dict[str, Any] = {"tools": [WEATHER], **fields}
            answer = client.chat.completions.create(model=model, messages=ASKED, temperature=0, max_tokens=60, **given)
            message = answer.choices[0].message
            assert message.content or message.tool_calls, fields


def check_tools_streamed(url: str, model: str) -> None:
    """Deltas of a stream together are what comes at once."""
    given: dict[str, Any] = {"model": model, "messages": ASKED, "tools": [WEATHER], "temperature": 0, "max_tokens": 70}
    for cities in (("Oslo",), ("Oslo", "Paris")):
        with connected(url) as client:
            whole = client.chat.completions.create(**given, extra_body=writing(*cities)).choices[0]
            with client.chat.completions.stream(**given, extra_body=writing(*cities)) as stream:
                stream.until_done()
                put = stream.get_final_completion().choices[0]
        assert [call.function.arguments for call in whole.message.tool_calls or ()][:1] == ['{"city":"Oslo"}']
        assert _spoken(put) == _spoken(whole)


def _spoken(choice: Any) -> Any:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def check_parallel(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=ASKED,
            tools=[WEATHER],
            parallel_tool_calls=True,
            temperature=0,
            max_tokens=70,
            extra_body=writing("Oslo", "Paris"),
        )
    calls = answer.choices[0].message.tool_calls or []
    assert [json.loads(call.function.arguments)["city"] for call in calls][:2] == ["Oslo", "Paris"]
    assert len({call.id for call in calls}) == len(calls)


def check_plain_logprobs(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.chat.completions.create(model=model, messages=FRANCE, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert "".join(each.token for each in content).startswith("The capital")
    for each in content:
        assert len(each.top_logprobs) == 3
        assert each.logprob <= 0
        assert each.logprob == max(top.logprob for top in each.top_logprobs)


def check_plain_seeds(url: str, model: str) -> None:
    with connected(url) as client:

        def text(seed: int) -> str | None:
            answer = client.chat.completions.create(
                model=model, messages=FRANCE, seed=seed, temperature=1.5, max_tokens=24
            )
            return answer.choices[0].message.content

        assert text(7) == text(7) != text(8)


def check_plain_choices(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.chat.completions.create(
            model=model, messages=FRANCE, n=3, seed=7, temperature=1.5, max_tokens=24
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


def check_plain_controls(url: str, model: str) -> None:
    """Stop strings, penalties, logit_bias, and a processor by `extra_body`."""
    with connected(url) as client:

        def text(**fields: Any) -> str | None:
            return (
                client.chat.completions.create(model=model, messages=FRANCE, **{**GREEDY, **fields})
                .choices[0]
                .message.content
            )

        assert text(stop=[" is"]) == "The capital of France"
        assert text(frequency_penalty=0.5, presence_penalty=0.5)
        assert text(logit_bias={"504": -100}) != "The capital of France is Paris."
        forced = {"name": "forced_prefix", "args": {"text": "I say: "}}
        answer = text(extra_body={"logits_processors": [forced]})
        assert answer is not None
        assert answer.startswith("I say: ")


def check_plain_errors(url: str, model: str) -> None:
    wrong: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
        (openai.BadRequestError, {"model": model, "temperature": 9}),
        (openai.BadRequestError, {"model": model, "n": 129}),
        (openai.BadRequestError, {"model": model, "extra_body": {"no_such_field": 1}}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ]
    with connected(url) as client:
        for kind, fields in wrong:
            assert refusal(kind, client.chat.completions.create, messages=FRANCE, max_tokens=4, **fields)


async def check_plain_many_at_once(url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:

        async def ask() -> str | None:
            answer = await client.chat.completions.create(model=model, messages=FRANCE, **GREEDY)
            return answer.choices[0].message.content

        answers = await asyncio.gather(*(ask() for _ in range(16)))
    assert set(answers) == {"The capital of France is Paris."}


async def check_plain_streams_that_are_left(url: str, model: str) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a long story."}]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        for _ in range(4):
            async with await client.chat.completions.create(
                model=model, messages=messages, max_tokens=400, stream=True, temperature=1
            ) as stream:
                async for _chunk in stream:
                    break
        answer = await client.chat.completions.create(model=model, messages=FRANCE, **GREEDY)
        assert answer.choices[0].message.content == "The capital of France is Paris."


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
