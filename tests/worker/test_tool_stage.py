"""Tool calls in streams: however an answer is split, its deltas are the whole answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from effort import examples, grid
from growth import num_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import ONLY_FIRST, SPELLINGS, Call, format_of, said, said_before_calls, written

from adapters.calls import FORMATS
from adapters.calls.xml_values import value_of
from worker.frontdoor.calls import CallParser, Kinds
from worker.frontdoor.chat_stream import assembled
from worker.frontdoor.messages.chat_paths import ChatPaths
from worker.frontdoor.messages.events import MessageEvents
from worker.frontdoor.messages.message import input_of, whole_message
from worker.frontdoor.messages.request import TranslatedRequest
from worker.frontdoor.tool_stage import ToolStage

NAMES = ("f", "get_weather", "a.b-c", "get")
KEYS: Kinds = {
    "text": {"string"},
    "count": {"number"},
    "many": {"array"},
    "deep": {"object", "null"},
    "yes": {"boolean"},
    "maybe": {"string", "null", "boolean", "number"},
    "any": {"string", "null", "boolean", "number", "array", "object"},
}
TOOLS = dict.fromkeys(NAMES, KEYS)
FRAGMENTS = (
    "<tool",
    "<",
    "[",
    "[TOOL",
    "functools",
    "\n",
    " ",
    "é",
    "漢😀",
    "<|",
    "> ",
    "{",
    '"',
    "fn",
    "\\u12",
    "<func",
    ">>",
)
ID = "chatcmpl-7"


@dataclass(frozen=True)
class Written:
    """An answer as a model writes it, and what is in it."""

    spelling: str
    text: str
    content: str
    calls: tuple[Call, ...]


def stage(spelling: str, **options: Any) -> ToolStage:
    format = FORMATS[format_of(spelling)]
    return ToolStage(lambda: CallParser(format, TOOLS, **options))


def chunk(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    made = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **choice}
    return {"id": ID, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [made], "usage": None}


def entry(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -1.0, "bytes": list(token.encode()), "top_logprobs": []}


def chunks_of(
    tokens: Sequence[str], sizes: Sequence[int], finish_reason: str, thinking: str = ""
) -> list[dict[str, Any]]:
    """A frontend's stream: so many tokens in each chunk, the rest in the last one."""
    made, start = [], 0
    if thinking:
        made.append(chunk({"role": "assistant", "reasoning_content": thinking}))
    for size in [*sizes, len(tokens)]:
        part = tokens[start : start + size]
        start += len(part)
        logprobs = {"content": [entry(token) for token in part], "refusal": []}
        made.append(chunk({"role": "assistant", "content": "".join(part)}, logprobs=logprobs))
    made[-1]["choices"][0]["finish_reason"] = finish_reason
    return [*made, {**chunk({}), "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": len(tokens)}}]


def staged(at: ToolStage, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for one in chunks for each in at.feed(one)]


def by_hand(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together; each beginning of arguments is one of JSON."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for one in chunks:
        for choice in one["choices"]:
            delta = dict(choice["delta"])
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    assert call == {**call, "index": len(calls), "type": "function"}
                    calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
                assert is_beginning(calls[call["index"]]["arguments"])
            for key, value in delta.items():
                message[key] = message.get(key, "") + value
    return {**message, "calls": calls}


def is_beginning(text: str) -> bool:
    """Whether JSON may follow that makes a whole of ``text``, cut in no escape, number or word."""
    closers, in_text, escaped = list[str](), False, False
    for character in text:
        if in_text:
            in_text = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_text = True
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
        elif character in "}]":
            assert closers.pop() == character
    closing = "".join(reversed(closers))
    rests = [closing, f"null{closing}", f":null{closing}", f'"":null{closing}']
    for rest in [*rests, *(f'"{rest}' for rest in rests)] if in_text else rests:
        try:
            json.loads(text + rest)
        except ValueError:
            continue
        return True
    return not text


def whole(
    spelling: str, tokens: Sequence[str], sizes: Sequence[int], reason: str, thinking: str = ""
) -> dict[str, Any]:
    """The whole answer, which is checked against what a client puts together of the deltas."""
    given_chunks = chunks_of(tokens, sizes, reason, thinking)
    made = staged(stage(spelling), given_chunks)
    answer = assembled(made)
    (choice,) = answer["choices"]
    message, client = choice["message"], by_hand(made)
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ] == [(call["id"], call["name"], call["arguments"]) for call in client["calls"]]
    assert (message["content"], message["role"]) == (client.get("content"), client["role"])
    assert message.get("reasoning_content") == client.get("reasoning_content")
    assert [each["token"] for each in choice["logprobs"]["content"]] == list(tokens)
    assert answer["usage"]["completion_tokens"] == len(tokens)
    return answer


SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
MARKS = ("</arg_value>", "</parameter>", "</tool_call>", "</function>", "}", ")]", "<|call|>", "<arg_key>")
VALUES = st.recursive(
    SCALARS | TEXTS | st.sampled_from(MARKS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def is_plain(text: str) -> bool:
    """Whether a text stays one where other types are allowed, and holds no tag behind it."""
    return value_of(text, KEYS["any"]) == text if not text.startswith(("[", "{")) and "</" not in text else False


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS.filter(lambda text: "</parameter>" not in text),
        "count": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        "many": st.lists(VALUES, max_size=3),
        "deep": st.dictionaries(TEXTS, VALUES, max_size=3) | st.none(),
        "yes": st.booleans(),
        "maybe": SCALARS | TEXTS.filter(is_plain),
        "any": VALUES.filter(lambda value: not isinstance(value, str) or is_plain(value)),
    },
)
CALLS = st.lists(st.builds(Call, st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4)
FREE = st.lists(st.sampled_from(FRAGMENTS) | st.text("abc xyz.", max_size=5), max_size=5).map("".join)


@st.composite
def answers(draw: st.DrawFn) -> Written:
    spelling, calls, text = draw(st.sampled_from(SPELLINGS)), draw(CALLS), draw(FREE)
    marks = [mark for format in FORMATS.values() for each in format.openings for mark in format.triggers(each, NAMES)]
    if spelling in ONLY_FIRST or not text.strip() or any(mark in text for mark in marks if mark):
        return Written(spelling, written(spelling, *calls), "", tuple(calls))
    ended = text + "."  # so that the beginning of a mark is not continued
    return Written(spelling, said_before_calls(spelling, ended, *calls), ended, tuple(calls))


@st.composite
def split(draw: st.DrawFn, text: str) -> list[str]:
    """Tokens of a text."""
    places = sorted(draw(st.sets(st.integers(0, max(len(text), 1)), max_size=40)))
    return [part for start, end in zip([0, *places], [*places, len(text)], strict=True) if (part := text[start:end])]


@settings(max_examples=examples(2000), deadline=None)
@given(st.data())
def test_deltas_put_together_are_the_whole_answer(data: st.DataObject) -> None:
    """Names, arguments, ids, order, text, thinking, finish reason and log probabilities."""
    answer = data.draw(answers())
    thinking = data.draw(st.sampled_from(["", "Let me think. <tool_call>"]))
    tokens = data.draw(split(answer.text))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=30))
    found = whole(answer.spelling, tokens, sizes, "stop", thinking)
    assert found == whole(answer.spelling, tokens, [], "stop", thinking)
    (choice,) = found["choices"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]
    assert calls == [(call.name, call.arguments) for call in answer.calls]
    assert choice["message"]["content"] == (answer.content or None)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"].get("reasoning_content", "") == thinking


@settings(max_examples=examples(1000), deadline=None)
@given(st.data())
def test_a_cut_answer_is_the_same_however_it_is_split(data: st.DataObject) -> None:
    answer = data.draw(answers())
    text = answer.text[: data.draw(st.integers(0, len(answer.text)))]
    tokens = data.draw(split(text))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=30))
    found = whole(answer.spelling, tokens, sizes, "length")
    assert found == whole(answer.spelling, tokens, [], "length")
    check_cut(answer, found)


def check_cut(answer: Written, found: dict[str, Any]) -> None:
    """The calls that have begun are those of the answer, the last one as far as it came."""
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "length"
    complete = assembled(staged(stage(answer.spelling), chunks_of([answer.text], [], "stop")))
    expected = complete["choices"][0]["message"]["tool_calls"]
    calls = choice["message"].get("tool_calls", [])
    assert [(call["id"], call["function"]["name"]) for call in calls] == [
        (call["id"], call["function"]["name"]) for call in expected[: len(calls)]
    ]
    arguments = [call["function"]["arguments"] for call in calls]
    assert arguments[:-1] == [call["function"]["arguments"] for call in expected[: len(calls)]][:-1]
    assert all(call["function"]["arguments"].startswith(text) for call, text in zip(expected, arguments, strict=False))
    content = choice["message"]["content"] or ""
    begun = content.removeprefix(answer.content)  # of a mark, which may have been text
    assert answer.content.startswith(content) or begun in answer.text


@pytest.mark.parametrize("spelling", grid(SPELLINGS, fast=4))
def test_an_answer_of_calls_alone_has_no_text(spelling: str) -> None:
    """Nor has one that is cut in the mark of a call."""
    text = written(spelling, *EXAMPLE)
    for length in range(len(text)):
        for sizes in ([], [1] * length):
            made = staged(stage(spelling, only_calls=True), chunks_of(list(text[:length]), sizes, "length"))
            assert assembled(made)["choices"][0]["message"]["content"] is None


EXAMPLE = (
    Call("get_weather", {"text": 'a "é"\\\n😀 </tool_call>', "count": -1.5e3, "many": [1, {"x": None}]}),
    Call("f", {"deep": {"[TOOL_CALLS]": [True, False]}, "yes": True}),
)


@pytest.mark.parametrize("spelling", grid(SPELLINGS, fast=4))
def test_an_answer_cut_at_every_length(spelling: str) -> None:
    answer = Written(spelling, written(spelling, *EXAMPLE), "", EXAMPLE)
    for length in range(len(answer.text)):
        text = answer.text[:length]
        found = whole(spelling, list(text), [1] * length, "length")
        assert found["choices"][0]["message"] == whole(spelling, list(text), [], "length")["choices"][0]["message"]
        check_cut(answer, found)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_text_without_calls_is_unchanged(spelling: str) -> None:
    """Beginnings of marks and calls of what is no tool, in one chunk or by characters."""
    for text in ("", " \n", "Hi <tool_cal", "a [TOOL_CALLS", "functool[", "x\n\n", *unknown_calls(spelling)):
        answer = said(spelling, text)
        for sizes in ([], [1] * len(answer)):
            (choice,) = whole(spelling, list(answer), sizes, "stop")["choices"]
            assert choice["message"].get("content") == (text or None)
            assert choice["finish_reason"] == "stop"


def unknown_calls(spelling: str) -> Iterator[str]:
    """A call of what is no tool, where a format has it in its text."""
    if spelling not in ("harmony", *ONLY_FIRST):
        yield "x " + written(spelling, Call("nothing", {}))


def test_a_call_that_nothing_enforces_is_held_until_it_is_one() -> None:
    """Text that goes wrong in its arguments stays as it is."""
    wrong = 'a <tool_call>\n{"name": "f", "arguments": {"x": }}\n</tool_call> b'
    right = written("hermes", Call("f", {"x": 1}))
    for text, content, num_calls in ((wrong, wrong, 0), (wrong + right, wrong, 1), (right + wrong, wrong, 1)):
        for sizes in ([], [1] * len(text)):
            made = staged(stage("hermes", enforced=False), chunks_of(list(text), sizes, "stop"))
            (choice,) = assembled(made)["choices"]
            assert choice["message"]["content"] == content
            assert len(choice["message"].get("tool_calls", [])) == num_calls
    for length in range(len(right)):
        (choice,) = assembled(staged(stage("hermes", enforced=False), chunks_of(list(right[:length]), [], "stop")))[
            "choices"
        ]
        assert choice["message"] == {"role": "assistant", "content": right[:length] or None}


def test_special_tokens_are_no_text() -> None:
    text = "<s>[INST]Hi </s>" + written("mistral", Call("f", {"text": "</s>"}))
    for sizes in ([], [1] * len(text)):
        made = staged(
            stage("mistral", hidden=("<s>", "[INST]", "</s>", "[TOOL_CALLS]")), chunks_of(list(text), sizes, "stop")
        )
        message = assembled(made)["choices"][0]["message"]
        assert message["content"] == "Hi "
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"text": "</s>"}


@pytest.mark.parametrize("spelling", ["hermes", "llama3_json"])
@pytest.mark.parametrize("last", ["a", "call"])
def test_white_space_waits_however_long_it_is(spelling: str, last: str) -> None:
    """It is text before a text, and nothing before a call."""
    blank = "\n \t" * 1000
    for sizes in ([], [1] * len(blank), [7, 1, 2] * 400):
        text = blank + (written(spelling, Call("f", {"text": "b"})) if last == "call" else last)
        message = whole(spelling, list(text), sizes, "stop")["choices"][0]["message"]
        assert message["content"] == (None if last == "call" else text)
        assert len(message.get("tool_calls", ())) == (last == "call")


@pytest.mark.parametrize("spelling", ["qwen3_coder", "glm45", "glm47"])
def test_json_between_tags_may_hold_the_tags(spelling: str) -> None:
    call = Call("f", {"many": ["</arg_value>", {"</parameter>\n": None}], "deep": {"\n</parameter>": "</arg_value>"}})
    text = written(spelling, call)
    for sizes in ([], [1] * len(text)):
        (choice,) = whole(spelling, list(text), sizes, "stop")["choices"]
        (found,) = choice["message"]["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == call.arguments
        assert choice["message"]["content"] is None


def test_special_tokens_are_looked_at_for_the_first_answer_alone() -> None:
    """Some models have a thousand of them, which took 3 ms for each answer."""
    hidden = [frozenset(f"<|reserved_{i}|>" for i in range(count)) for count in (10, 1000)]
    few, many = (partial(CallParser, FORMATS["hermes"], TOOLS, hidden=tokens) for tokens in hidden)
    few(), many()
    assert num_lines(many) == num_lines(few)


def test_arguments_nested_too_deep_are_no_call() -> None:
    for text in ("[" * 50_000, '{"a":' * 50_000):
        answer = written("qwen3_coder", Call("f", {"many": "XYZ"})).replace("XYZ", text)
        (choice,) = assembled(staged(stage("qwen3_coder", enforced=False), chunks_of([answer], [], "stop")))["choices"]
        assert choice["message"] == {"role": "assistant", "content": answer}


def test_channels_are_thinking_and_text() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant" + written("harmony", Call("f", {"count": 1}))
    )
    for end in (text, text.removesuffix("<|call|>")):  # the token that ends an answer is not in its text
        for sizes in ([], [1] * len(end)):
            (choice,) = whole("harmony", list(end), sizes, "stop")["choices"]
            assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Wait.")
            assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_json_in_place_of_calls_may_look_like_one(spelling: str) -> None:
    """An answer is calls alone or what ``response_format`` asks for, whatever its texts hold."""
    call = written(spelling, Call("f", {}))
    for text in (json.dumps({"x": [call, "<|im_end|>"]}, ensure_ascii=False), json.dumps(call, ensure_ascii=False)):
        answer = said(spelling, text)
        for sizes in ([], [1] * len(answer)):
            at = stage(spelling, or_answer=True, hidden=("<|im_end|>",))
            (choice,) = assembled(staged(at, chunks_of(list(answer), sizes, "stop")))["choices"]
            assert choice["message"] == {"role": "assistant", "content": text}
            assert choice["finish_reason"] == "stop"
    for text in (call, written(spelling, *EXAMPLE)):
        for sizes in ([], [1] * len(text)):
            made = assembled(staged(stage(spelling, or_answer=True), chunks_of(list(text), sizes, "stop")))
            assert made["choices"][0]["message"]["tool_calls"]
            assert made["choices"][0]["message"]["content"] is None


def test_choices_are_parsed_apart() -> None:
    """Each with calls, ids and a finish reason of its own."""
    at = stage("hermes")
    text = written("hermes", Call("f", {}))
    chunks = []
    for start in range(0, len(text), 3):
        for index in (0, 1):
            part = text[start : start + 3] if index else "abc"
            chunks.append(chunk({"content": part}, index=index))
    chunks += [chunk({}, index=index, finish_reason="stop") for index in (0, 1)]
    first, second = assembled(staged(at, chunks))["choices"]
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "tool_calls")
    assert set(first["message"]["content"]) == set("abc")
    assert second["message"]["content"] is None


def test_ids_are_those_of_request_choice_and_call() -> None:
    text = written("hermes", Call("f", {}), Call("f", {}))
    ids = set()
    for request, index in (("a", 0), ("a", 1), ("b", 0)):
        made = staged(stage("hermes"), [{**chunk({"content": text}, index=index, finish_reason="stop"), "id": request}])
        ids |= {call["id"] for one in made for call in one["choices"][0]["delta"].get("tool_calls", ()) if "id" in call}
    assert len(ids) == 6
    assert all(each.startswith("call_") and len(each) == 29 for each in ids)
    short = ToolStage(lambda: CallParser(FORMATS["mistral"], TOOLS), short_ids=True)
    made = staged(short, [chunk({"content": written("mistral", Call("f", {}))}, finish_reason="stop")])
    (call,) = made[0]["choices"][0]["delta"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_thinking_within_a_call_comes_behind_it(data: st.DataObject) -> None:
    """Messages and Responses have one block at a time: the answer ended with an error there."""
    calls = [Call("f", {"text": "a"}), Call("f", {})]
    text = written("neutral", *calls) + data.draw(st.sampled_from(["", "And"]))
    text = text[: data.draw(st.integers(0, len(text)))]
    at, made, thoughts = stage("neutral"), list[dict[str, Any]](), ""
    for number, part in enumerate(data.draw(split(text))):
        made.append(chunk({"content": part}))
        if data.draw(st.booleans()):
            made.append(chunk({"reasoning_content": f"{number}."}))
            thoughts += f"{number}."
    made.append(chunk({}, finish_reason="length"))
    deltas = staged(at, made)
    message = assembled(deltas)["choices"][0]["message"]
    assert message.pop("reasoning_content", "") == thoughts
    whole_text = staged(stage("neutral"), [chunk({"content": text}, finish_reason="length")])
    assert message == assembled(whole_text)["choices"][0]["message"]
    usage = {"id": ID, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
    events = MessageEvents(TranslatedRequest({}, ChatPaths(), max_tokens=9))
    blocks = whole_message([each for one in [*deltas, usage] for each in events.take(one)] + events.end())["content"]
    assert [block["input"] for block in blocks if block["type"] == "tool_use"] == [
        input_of(each["function"]["arguments"]) for each in message.get("tool_calls", ())
    ]
    assert "".join(block["thinking"] for block in blocks if block["type"] == "thinking") == thoughts


def test_what_a_chunk_has_beside_text_comes_once() -> None:
    """Receipts and usage, also of a chunk whose text is held back."""
    receipt = {"engine_data": {"x": 1}}
    at = stage("hermes")
    held = at.feed({**chunk({"content": "<tool"}), "nvext": receipt, "usage": {"completion_tokens": 1}})
    assert [(one["nvext"], one["usage"]) for one in held] == [(receipt, {"completion_tokens": 1})]
    assert at.feed(chunk({"content": "_call"})) == []
    rest = written("hermes", Call("f", {"count": 1})).removeprefix("<tool_call")
    made = at.feed({**chunk({"content": rest}, finish_reason="stop"), "nvext": receipt})
    assert [one["nvext"] for one in made] == [None, receipt]
    assert [one["choices"][0]["finish_reason"] for one in made] == [None, "tool_calls"]
