"""instructor: answers as pydantic models, in each of its ways that ask an OpenAI server."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
from checks import beginning, run, written_call
from pydantic import BaseModel, Field

ADA: Any = [{"role": "user", "content": "Ada is 36 years old, and her favourite colour is blue. Extract the person."}]
BOTH: Any = [{"role": "user", "content": "Ada is 36 and likes blue, Bob is 40 and likes red. Extract the people."}]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    colour: Literal["red", "blue", "green"]


class People(BaseModel):
    people: list[Person] = Field(min_length=2, max_length=2)


def connected(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0), mode=mode)


def ask(url: str, model: str, mode: instructor.Mode, **fields: Any) -> Person:
    client = connected(url, mode)
    return client.chat.completions.create(
        model=model, messages=ADA, response_model=Person, temperature=0, max_tokens=120, max_retries=0, **fields
    )


def check_structured(url: str, model: str) -> None:
    person = ask(url, model, instructor.Mode.JSON_SCHEMA)
    assert (person.name, person.age) == ("Ada", 36)


def check_required(url: str, model: str) -> None:
    person = ask(url, model, instructor.Mode.TOOLS)
    assert person.name


def check_structured_nested(url: str, model: str) -> None:
    client = connected(url, instructor.Mode.JSON_SCHEMA)
    found = client.chat.completions.create(
        model=model, messages=BOTH, response_model=People, temperature=0, max_tokens=200, max_retries=0
    )
    assert len(found.people) == 2


def check_structured_with_completion(url: str, model: str) -> None:
    client = connected(url, instructor.Mode.JSON_SCHEMA)
    person, completion = client.chat.completions.create_with_completion(
        model=model, messages=ADA, response_model=Person, temperature=0, max_tokens=120, max_retries=0
    )
    assert person.age == 36
    assert completion.usage.completion_tokens > 0


def check_structured_partial(url: str, model: str) -> None:
    client = connected(url, instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model=model, messages=ADA, response_model=Person, temperature=0, max_tokens=120, max_retries=0
        )
    )
    assert len(parts) > 1
    assert (parts[-1].name, parts[-1].age) == ("Ada", 36)


def check_parallel(url: str, model: str) -> None:
    client = connected(url, instructor.Mode.TOOLS)
    people = '{"tasks":[{"name":"Ada","age":36,"colour":"blue"},{"name":"Bob","age":40,"colour":"red"}]}'
    found: Iterable[Person] = client.chat.completions.create(
        model=model,
        messages=BOTH,
        response_model=Iterable[Person],
        temperature=0,
        max_tokens=300,
        max_retries=0,
        extra_body=beginning(written_call("IterablePerson", people)),
    )
    assert [each.name for each in found] == ["Ada", "Bob"]


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
