"""Every field of OpenAI's chat and completion requests through the real front door, with a value
whose effect shows, or that is refused by name.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, running_stack
from effort import examples
from front_door_process import Door
from hypothesis import given, settings
from mutated_requests import mutated_requests, problem
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from worker.frontdoor.fields import CHAT, COMPLETIONS, TABLES

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}There are some tools. {% endif %}{{ reasoning_effort }}\n"
)
"""Shows what the frontend gives it in the number of the prompt's tokens, and so in the answer."""

MESSAGES = [{"role": "user", "content": "Hello there"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 12},
    COMPLETIONS: {"prompt": "Once upon", "max_tokens": 12},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"const": {}}}}]
FORCED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": {"a": 1}}}}

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("door")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    with running_stack(directory, tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker("--device", "cpu", "--dtype", "float32", "--custom-jinja-template", str(template))
        yield Door(stack)


def ask(door: Door, path: str, **fields: Any) -> Answer:
    """The answer, in the shape of one that is not streamed."""
    status, text = door.post(path.removeprefix("/v1/"), **{**BASE[path], **fields})
    assert status == 200, text
    if not fields.get("stream"):
        answer: Answer = json.loads(text)
        return answer
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert text.rstrip().endswith("data: [DONE]")
    return {**events[-1], "events": events}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_fails_late_says_why(door: Door, path: str, n: int) -> None:
    """Its controls contradict each other at the 41st token."""
    processors = [
        {"name": "banned_tokens", "args": {"token_ids": [70]}},
        {"name": "forced_sequence", "args": {"token_ids": [*range(300, 340), 70]}},
    ]
    fields = {"max_tokens": 60, "stream": True, "n": n, "logits_processors": processors}
    status, text = door.post(path.removeprefix("/v1/"), **{**BASE[path], **fields})
    assert status == 200
    *before, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert any(text_of({**one, "choices": [_as_whole(one["choices"][0])]}) for one in before)
    assert last["error"]["message"].startswith("logits processor forced_sequence: forces token 70, which another")
    assert last["error"]["type"] == "invalid_request_error"


def test_one_choice_of_several_that_fails_says_why(door: Door) -> None:
    """Whichever of them it is: the first may be none that fails."""
    processors = [
        {"name": "regex", "args": {"pattern": "(a[xyz]{3}|b{3})"}},
        {"name": "banned_tokens", "args": {"token_ids": [92, 93, 94]}},  # x, y and z, but not the longer ones
    ]
    fields = {"prompt": [5, 6, 7, 8], "temperature": 1.9, "logits_processors": processors}
    num_others = 0
    for seed in range(10):
        (alone, _), (status, text) = (door.post("completions", **fields, seed=seed, n=n) for n in (1, 4))
        if status != 200:
            num_others += alone == 200
            assert (status, "regex, banned_tokens: no token is left" in text) == (400, True), text
    assert num_others > 0, "no choice but the first fails"


def _as_whole(choice: dict[str, Any]) -> dict[str, Any]:
    return choice if "text" in choice else {**choice, "message": choice["delta"]}


def text_of(answer: Answer) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def same(path: str, plain: Answer, answer: Answer) -> None:
    assert text_of(answer) == text_of(plain)
    assert answer["usage"] == plain["usage"]


def changes(path: str, plain: Answer, answer: Answer) -> None:
    assert text_of(answer) != text_of(plain)


def prompt_changes(path: str, plain: Answer, answer: Answer) -> None:
    assert answer["usage"]["prompt_tokens"] != plain["usage"]["prompt_tokens"]


def says(text: str) -> Check:
    def check(path: str, plain: Answer, answer: Answer) -> None:
        assert text_of(answer) == text

    return check


def has_length(number: int) -> Check:
    def check(path: str, plain: Answer, answer: Answer) -> None:
        assert answer["usage"]["completion_tokens"] == number
        assert answer["choices"][0]["finish_reason"] == "length"

    return check


def has_logprobs(number: int) -> Check:
    def check(path: str, plain: Answer, answer: Answer) -> None:
        logprobs = answer["choices"][0]["logprobs"]
        if path == CHAT:
            assert [len(each["top_logprobs"]) for each in logprobs["content"]] == [number] * 12
        else:
            # By text: tokens of half a character share one on 1.6.1.
            assert max(len(each) for each in logprobs["top_logprobs"]) == number

    return check


def stops_early(path: str, plain: Answer, answer: Answer) -> None:
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert text_of(plain).startswith(text_of(answer))
    assert len(text_of(answer)) < len(text_of(plain))


def calls_f(path: str, plain: Answer, answer: Answer) -> None:
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {})


def streams(path: str, plain: Answer, answer: Answer) -> None:
    deltas = [choice.get("text") or choice.get("delta", {}).get("content") or ""
              for event in answer["events"] for choice in event["choices"]]  # fmt: skip
    assert "".join(deltas) == text_of(plain)


def counts_prediction(path: str, plain: Answer, answer: Answer) -> None:
    assert text_of(answer) == text_of(plain)
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 1)


def has_usage(path: str, plain: Answer, answer: Answer) -> None:
    assert answer["usage"]["completion_tokens"] == 12


def has_two(path: str, plain: Answer, answer: Answer) -> None:
    first, second = answer["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert text_of({"choices": [second]}) != text_of(answer)


def repeats_the_prompt(path: str, plain: Answer, answer: Answer) -> None:
    assert text_of(answer) == BASE[path]["prompt"] + text_of(plain)
    assert answer["usage"] == plain["usage"]


def is_of(model: str) -> Check:
    def check(path: str, plain: Answer, answer: Answer) -> None:
        assert answer["model"] == model

    return check


Check = Callable[[str, Answer, Answer], None]
BIASED: dict[str, Any] = {"logit_bias": {"40": 100}}
REFUSED = object()
EFFECTS: dict[tuple[str, str], tuple[dict[str, Any], Check | object]] = {
    (path, name): effect
    for paths, effects in {
        (CHAT, COMPLETIONS): {
            "model": ({"model": "tiny"}, is_of("tiny")),
            "max_tokens": ({"max_tokens": 5}, has_length(5)),
            "temperature": ({"temperature": 2.0, "seed": 3}, changes),
            "seed": ({"temperature": 2.0, "seed": 4}, changes),
            "top_p": ({"temperature": 2.0, "seed": 3, "top_p": 1e-6}, same),  # greedy again
            "frequency_penalty": ({**BIASED, "frequency_penalty": 2.0, "logit_bias": {"40": 5, "41": 4.9}}, changes),
            "presence_penalty": ({**BIASED, "presence_penalty": 2.0, "logit_bias": {"40": 5, "41": 4.9}}, changes),
            "logit_bias": (BIASED, says("D" * 12)),
            "stop": ({**BIASED, "stop": ["DDDD"]}, stops_early),
            "stream": ({"stream": True}, streams),
            "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, has_usage),
            "user": ({"user": "u"}, same),
            "n": ({"n": 2, "temperature": 1.0, "seed": 3}, has_two),
        },
        (CHAT,): {
            "messages": ({"messages": [{"role": "user", "content": "Hello there, all of you"}]}, prompt_changes),
            "max_completion_tokens": ({"max_completion_tokens": 5}, has_length(5)),
            "logprobs": ({"logprobs": True, "top_logprobs": 1}, has_logprobs(1)),
            "top_logprobs": ({"logprobs": True, "top_logprobs": 3}, has_logprobs(3)),
            "response_format": ({"response_format": SCHEMA, "max_tokens": 60}, says('{"a":1}')),
            "tools": ({"tools": TOOLS}, prompt_changes),
            "tool_choice": ({"tools": TOOLS, "tool_choice": FORCED, "max_tokens": 60}, calls_f),
            "parallel_tool_calls": ({"tools": TOOLS, "parallel_tool_calls": False}, REFUSED),
            "reasoning_effort": ({"reasoning_effort": "high"}, prompt_changes),
            "metadata": ({"metadata": {"a": "b"}}, same),
            "prediction": ({"prediction": {"type": "content", "content": "x"}}, counts_prediction),
            "prompt_cache_key": ({"prompt_cache_key": "k"}, same),
            "safety_identifier": ({"safety_identifier": "who"}, same),
            "audio": ({"audio": {"voice": "alloy", "format": "wav"}}, REFUSED),
            "modalities": ({"modalities": ["text", "audio"]}, REFUSED),
            "web_search_options": ({"web_search_options": {}}, REFUSED),
            "moderation": ({"moderation": {"model": "omni-moderation-latest"}}, REFUSED),
            "verbosity": ({"verbosity": "low"}, REFUSED),
            "functions": ({"functions": [{"name": "f", "parameters": {}}]}, REFUSED),
            "function_call": ({"function_call": {"name": "f"}}, REFUSED),
            "store": ({"store": True}, REFUSED),
            "service_tier": ({"service_tier": "flex"}, REFUSED),
            "prompt_cache_options": ({"prompt_cache_options": {"mode": "explicit"}}, REFUSED),
            "prompt_cache_retention": ({"prompt_cache_retention": "24h"}, REFUSED),
        },
        (COMPLETIONS,): {
            "prompt": ({"prompt": "Once upon a time"}, prompt_changes),
            "logprobs": ({"logprobs": 3}, has_logprobs(3)),
            "best_of": ({"best_of": 2}, REFUSED),
            "echo": ({"echo": True}, repeats_the_prompt),
            "suffix": ({"suffix": "the end"}, REFUSED),
        },
    }.items()
    for path in paths
    for name, effect in effects.items()  # type: ignore[attr-defined]
}
"""For each field a request, and what shows in the answer beside the one to a plain request. Where
a request has further fields, the plain one has them too.
"""


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsBase),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openai_is_sent(path: str, schema: type) -> None:
    """A field that a new `openai` package adds fails here, until its fate is known."""
    assert {name for at, name in EFFECTS if at == path} == {*schema.__annotations__, "stream"}


@pytest.mark.parametrize(("path", "name"), EFFECTS, ids=["-".join(each) for each in EFFECTS])
def test_effect(door: Door, path: str, name: str) -> None:
    fields, check = EFFECTS[path, name]
    if check is REFUSED:
        assert TABLES[path][name].fate == "refused" or name == "parallel_tool_calls"
        for stream in (False, True):
            status, text = door.post(path.removeprefix("/v1/"), **BASE[path], **fields, stream=stream)
            assert status == 400, text
            assert json.loads(text)["error"]["param"] == name
        return
    assert callable(check)
    beside = {key: value for key, value in fields.items() if key not in (name, "stream", "top_logprobs")}
    if name in ("top_p", "logprobs", "tool_choice"):
        beside = {}
    check(path, ask(door, path, **beside), ask(door, path, **fields))


@pytest.mark.parametrize("path", TABLES)
def test_choices_are_those_of_requests_that_name_them(door: Door, path: str) -> None:
    """Streamed or not: the same random numbers, token for token."""
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    alone = [text_of(ask(door, path, **drawn, logits_processors={"choice": index})) for index in range(3)]
    assert len(set(alone)) == 3
    together = ask(door, path, **drawn, n=3)
    assert [text_of({"choices": [one]}) for one in together["choices"]] == alone
    assert together["usage"]["completion_tokens"] == 36
    streamed = ask(door, path, **drawn, n=3, stream=True, stream_options={"include_usage": True})
    texts = ["", "", ""]
    for event in streamed["events"]:
        for one in event["choices"]:
            texts[one["index"]] += one.get("text") or one.get("delta", {}).get("content") or ""
    assert texts == alone
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed["usage"][key] == together["usage"][key]


def test_a_refusal_of_choices_is_that_of_one(door: Door) -> None:
    beyond = [{"name": "banned_tokens", "args": {"token_ids": [10**6]}}]
    refused: dict[str, Any] = {**BASE[CHAT], "logits_processors": beyond}
    alone = door.post("chat/completions", **refused)
    assert alone[0] == 400
    status, text = door.post("chat/completions", **refused, n=3)
    assert (status, json.loads(text)) == (400, json.loads(alone[1]))


@given(odd=mutated_requests(MODEL, without=("/detokenize", "/v1/batches")))
@settings(max_examples=examples(150), deadline=None)
def test_a_bad_field_is_a_400_that_names_it(door: Door, odd: tuple[str, bytes]) -> None:
    path, body = odd
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=60)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert problem(answer.status, text) is None, (path, body, answer.status, text)


REFUSED_BY_THE_WORKER: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": ["\0"]}, "prompt"),
    (COMPLETIONS, {"guided_regex": "("}, "guided_regex"),
    (COMPLETIONS, {"n": 2, "guided_json": {"type": 5}}, "guided_json"),
    (COMPLETIONS, {"logits_processors": [{"name": "banned_tokens", "args": {"token_ids": [10**6]}}]},
     "logits_processors[0].args.token_ids"),
    (CHAT, {"guided_json": {"type": 5}}, "guided_json"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 5}}}},
     "response_format.json_schema.schema"),
    (CHAT, {"n": 2, "logits_processors": {"processors": [{"name": "banned_tokens", "args": {"token_ids": [10**6]}}]}},
     "logits_processors.processors[0].args.token_ids"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "param"), REFUSED_BY_THE_WORKER)
def test_the_worker_s_refusal_is_a_400(door: Door, path: str, fields: dict[str, Any], param: str, stream: bool) -> None:
    """Dynamo's frontend alone makes a 500 of it, or an error in a stream without its reason."""
    status, text = door.post(path.removeprefix("/v1/"), **{**BASE[path], **fields, "stream": stream})
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
