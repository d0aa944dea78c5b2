"""The openai package's own default: the Responses API."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from checks import ADA, OSLO, refusal, run, writing
from pydantic import BaseModel

FRANCE = "What is the capital of France?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ONE: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


class Person(BaseModel):
    name: str
    age: int


def connected(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def ask(url: str, model: str, prompt: Any, **fields: Any) -> Any:
    with connected(url) as client:
        return client.responses.create(
            **{"model": model, "input": prompt, "temperature": 0, "max_output_tokens": 60, **fields}
        )


def calls(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def check_responses(url: str, model: str) -> None:
    response = ask(url, model, FRANCE)
    assert (response.status, response.output_text) == ("completed", "The capital of France is Paris.")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert "Paris" in ask(url, model, [{"role": "user", "content": FRANCE}], instructions="Be brief.").output_text


def check_responses_cut(url: str, model: str) -> None:
    response = ask(url, model, FRANCE, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def check_responses_stream(url: str, model: str) -> None:
    with connected(url) as client:
        events = list(client.responses.create(model=model, input=FRANCE, temperature=0, stream=True))
        with client.responses.stream(model=model, input=FRANCE, temperature=0) as stream:
            stream.until_done()
            final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == "The capital of France is Paris."


def check_responses_structured(url: str, model: str) -> None:
    with connected(url) as client:
        answer = client.responses.parse(model=model, input=ADA, text_format=Person, temperature=0)
        with client.responses.stream(model=model, input=ADA, text_format=Person, temperature=0) as stream:
            stream.until_done()
            streamed = stream.get_final_response()
    assert answer.output_parsed == streamed.output_parsed == Person(name="Ada", age=36)


def check_responses_tools(url: str, model: str) -> None:
    assert ask(url, model, OSLO, tools=[WEATHER]).output
    response = ask(url, model, OSLO, tools=[WEATHER], extra_body=writing("Oslo", "Paris"), max_output_tokens=70)
    assert [json.loads(call.arguments)["city"] for call in calls(response)][:2] == ["Oslo", "Paris"]
    assert len({call.call_id for call in calls(response)}) == len(calls(response))


def check_responses_required(url: str, model: str) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        (call,) = calls(ask(url, model, OSLO, **{**ONE, "tool_choice": choice}))
        assert json.loads(call.arguments)["city"] in ("Oslo", "Paris")


def check_responses_tools_streamed(url: str, model: str) -> None:
    with connected(url) as client:
        stream = client.responses.create(model=model, input=OSLO, temperature=0, stream=True, **ONE)
        events = list(stream)
    written = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = (event.arguments for event in events if event.type == "response.function_call_arguments.done")
    assert json.loads(written) == json.loads(done)


def check_responses_round_trip(url: str, model: str) -> None:
    """By `previous_response_id`, and by the items that came."""
    first = ask(url, model, OSLO, **ONE)
    (call,) = calls(first)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It is raining."}
    assert ask(url, model, [result], previous_response_id=first.id).output_text
    history = [{"role": "user", "content": OSLO}, *first.output, result]
    assert ask(url, model, history, tools=[WEATHER], tool_choice="none").output_text


def check_responses_stored(url: str, model: str) -> None:
    with connected(url) as client:
        made = client.responses.create(model=model, input=FRANCE, temperature=0)
        assert client.responses.retrieve(made.id).output_text == made.output_text
        assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]
        client.responses.delete(made.id)
        assert refusal(openai.NotFoundError, client.responses.retrieve, response_id=made.id)
        apart = client.responses.create(model=model, input=FRANCE, temperature=0, store=False)
        assert refusal(openai.NotFoundError, client.responses.retrieve, response_id=apart.id)


def check_responses_count(url: str, model: str) -> None:
    with connected(url) as client:
        counted = client.responses.input_tokens.count(model=model, input=FRANCE).input_tokens
    assert counted == ask(url, model, FRANCE).usage.input_tokens


def check_responses_errors(url: str, model: str) -> None:
    wrong: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"extra_body": {"no_such_field": 1}}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ]
    for kind, fields in wrong:
        assert refusal(kind, ask, **{"url": url, "model": model, "prompt": FRANCE, **fields})


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
