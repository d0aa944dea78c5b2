"""The events that the chunks of a chat become, held to OpenAI's types and to its accumulation."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from responses_oracle import check_stream, checked_event, checked_response

from adapters.calls import FORMATS
from adapters.calls.writing import written_calls
from worker.frontdoor.calls import CallParser
from worker.frontdoor.chat_stream import assembled
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.openengine.answer import AnswerForm
from worker.frontdoor.openengine.body import AskedAnswer
from worker.frontdoor.openengine.thinking import PARSERS, ThinkingSplit
from worker.frontdoor.responses.answer import Answer
from worker.frontdoor.responses.kinds import LOGPROBS
from worker.frontdoor.responses.output_items import OutputItems
from worker.frontdoor.responses.outputs import Event
from worker.frontdoor.responses.response import Response, new_response
from worker.frontdoor.tool_stage import ToolStage

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
FIELDS: dict[str, Any] = {"model": "m", "input": "Hello"}


def chunk(finish_reason: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def call(index: int, arguments: str = "", **first: str) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": first["name"]} if "name" in first else {})}
    made: dict[str, Any] = {"index": index, "type": "function", "function": function}
    return chunk(tool_calls=[{**made, "id": first["id"]} if "id" in first else made])


def logprob(token: str, *others: str) -> dict[str, Any]:
    top = [{"token": each, "logprob": -1.5, "bytes": None} for each in (token, *others)]
    return {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": top}


def usage(**extra: Any) -> dict[str, Any]:
    return {**chunk(), "choices": [], "usage": USAGE, **extra}


def streamed(chunks: Sequence[dict[str, Any]], **fields: Any) -> tuple[list[Event], Response]:
    """The events, as a client gets them, and the response that is the answer without a stream."""
    answer = Answer(new_response({**FIELDS, **fields}, "resp_1", stored=True))
    events: list[Event] = [*answer.created()]
    for i, each in enumerate(chunks):
        events += [*([] if i else answer.begun()), *answer.events(each)]
        checked_response(answer.response)
    events += answer.completed()
    return json.loads(json.dumps(events)), answer.response


def test_a_text() -> None:
    events, response = streamed(
        [chunk(role="assistant", content=""), chunk(content="Hel"), chunk("stop", content="lo"), usage()]
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    final = check_stream(events)
    assert (final.output_text, final.status, final.incomplete_details) == ("Hello", "completed", None)
    assert final.usage is not None
    assert final.usage.to_dict() == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert events[-1]["response"] == response


def test_the_response_repeats_the_request() -> None:
    fields = {
        "instructions": "Be kind.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_0",
        "reasoning": {"effort": "low"},
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        "top_p": 0.9,
        "user": "u",
    }
    response = checked_response(new_response({**FIELDS, **fields}, "resp_1", stored=False)).to_dict()
    for name, value in fields.items():
        shown = response[name]
        assert shown == value or name in ("reasoning", "tools"), name
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["tools"] == [{**fields["tools"][0], "description": None}]  # type: ignore[index]
    assert (response["status"], response["store"], response["output"]) == ("in_progress", False, [])


def test_reasoning_then_a_text_then_calls() -> None:
    events, _ = streamed(
        [
            chunk(reasoning_content="Hm"),
            chunk(reasoning_content="."),
            chunk(content="I look."),
            call(0, id="c1", name="f"),
            call(0, '{"a"'),
            call(0, ":1}"),
            call(1, "{}", id="c2", name="g"),
            chunk("tool_calls"),
            usage(),
        ]
    )
    final: Any = check_stream(events)
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[0].content[0].text == "Hm."
    assert [(item.call_id, item.name, item.arguments) for item in final.output[2:]] == [
        ("c1", "f", '{"a":1}'),
        ("c2", "g", "{}"),
    ]
    assert final.status == "completed"


def test_both_workers_of_a_response_name_their_weights() -> None:
    """The one that goes on with an answer names those of its own tokens alone."""
    versions = [{"version": version, "from_token": start} for version, start in (("6", 0), ("7", 3))]
    data = [{"engine_data": {"weight_versions": [one]}} for one in versions]
    said = [{**chunk(content="a"), "nvext": data[0]}, {**chunk("stop"), "nvext": data[1]}, usage()]
    assert streamed(said)[1]["nvext"] == {"engine_data": {"weight_versions": versions}}


@pytest.mark.parametrize("last", [chunk(content="Hel"), call(0, '{"a', id="c", name="f"), chunk(reasoning_content="H")])
def test_an_answer_that_is_cut_is_incomplete(last: dict[str, Any]) -> None:
    events, _ = streamed([last, chunk("length"), usage()])
    final: Any = check_stream(events)
    assert (final.status, final.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in final.output] == ["incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    events, _ = streamed([chunk("stop"), usage()])
    final: Any = check_stream(events)
    assert (final.output_text, final.output[0].type, final.status) == ("", "message", "completed")


def test_log_probabilities_are_those_of_the_message() -> None:
    events, _ = streamed(
        [
            chunk(reasoning_content="Hm", logprobs={"content": [logprob("Hm")]}),
            chunk(content="a", logprobs={"content": [logprob("a", "b", "c")]}),
            chunk(logprobs={"content": [logprob("\ufffd")]}),
            chunk(content="é", logprobs={"content": [logprob("é")]}),
            chunk("stop", logprobs={"content": [logprob("<end>")]}),
            usage(),
        ],
        include=[LOGPROBS],
        top_logprobs=2,
    )
    final: Any = check_stream(events)
    (part,) = final.output[1].content
    assert [each.token for each in part.logprobs] == ["a", "\ufffd", "é", "<end>"]
    assert [top.token for top in part.logprobs[0].top_logprobs] == ["a", "b"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in event["logprobs"]] for event in deltas] == [["a"], ["\ufffd", "é"], ["<end>"]]


def test_a_chunk_may_have_the_end_of_the_reasoning_and_the_text() -> None:
    tokens = {"content": [logprob(each) for each in (".", "</think>", "\n", "\nA")]}
    events, _ = streamed(
        [chunk(reasoning_content=".", content="\n\nA", logprobs=tokens), chunk("stop"), usage()], include=[LOGPROBS]
    )
    final: Any = check_stream(events)
    assert [each.token for each in final.output[1].content[0].logprobs] == ["\n", "\nA"]


THOUGHT = [b"Hm", b".", b"</think>"]


@given(
    answer=st.text("aé\u65e5 ", min_size=1, max_size=8).map(str.encode),
    sizes=st.lists(st.integers(1, 5), max_size=6),
    calls=st.booleans(),
)
@settings(max_examples=examples(200), deadline=None)
def test_log_probabilities_of_a_message_have_no_thinking(answer: bytes, sizes: list[int], calls: bool) -> None:
    """Those of the tag did, and of thoughts that came with the text: workers put several tokens
    into one chunk.
    """
    tokens = [*THOUGHT, *(answer[start : start + 2] for start in range(0, len(answer), 2))]
    split = ThinkingSplit(PARSERS["deepseek_r1"], is_inside=True)
    form = AnswerForm(AskedAnswer({}, is_chat=True, model="m"), "1", 0, tokens.__getitem__, split)
    decoder = codecs.getincrementaldecoder("utf-8")()
    stage = ToolStage(lambda: CallParser(FORMATS["hermes"], {}))
    items, at = OutputItems(0), 0
    for size in [*sizes, len(tokens)]:
        ids = list(range(at, min(at + size, len(tokens))))
        at += len(ids)
        text = decoder.decode(b"".join(tokens[each] for each in ids))
        made = {"token_ids": ids, "text": text, "log_probs": [-1.0] * len(ids), "top_logprobs": [[]] * len(ids)}
        made |= {"finish_reason": "stop"} if at == len(tokens) else {}
        for event in form.events(made):
            for each in stage.feed(event) if calls else [event]:
                for choice in each["choices"]:
                    list(items.events(choice))
        if at == len(tokens):
            break
    list(items.end("completed"))
    *_, message = items.items
    (part,) = message["content"]
    assert part["text"] == answer.decode()
    assert b"".join(bytes(each["bytes"]) for each in part["logprobs"]) == answer


@pytest.mark.parametrize(
    ("before", "mark"),
    [
        (["Hi ", "you"], ["<tool", "_call>"]),
        (["Hi <"], ["<tool_call>"]),
        (["Hi", " <to"], ["<tool_call>{"]),
        (["Hi <to", "ol_"], ["<tool_", "call>"]),
    ],
)
def test_log_probabilities_of_a_message_have_no_call(before: list[str], mark: list[str]) -> None:
    """Those of the marks before a call did, also where the text ends as a mark begins, and those of
    the marks behind it in the next one.
    """
    begun = '"name": "f"' if mark[-1].endswith("{") else '{"name": "f"'
    tokens = [*before, *mark, begun, ', "arguments": ', "{}", "}", "</tool_call>", "Do", "ne"]
    stage, items = ToolStage(lambda: CallParser(FORMATS["neutral"], {"f": {}})), OutputItems(0)
    for place, token in enumerate(tokens, 1):
        ends = "stop" if place == len(tokens) else None
        for each in stage.feed(chunk(ends, {"content": [logprob(token)]}, content=token)):
            list(items.events(each["choices"][0]))
    list(items.end("completed"))
    first, called, last = items.items
    assert called["arguments"] == "{}"
    for message, text in ((first, before), (last, ["Do", "ne"])):
        (part,) = message["content"]
        assert part["text"] == "".join(text)
        assert [each["token"] for each in part["logprobs"]] == text


_CALL = written_calls(FORMATS["hermes"], [("f", {})]).encode()
CALL = [_CALL[start : start + 7] for start in range(0, len(_CALL), 7)]
SEGMENTS: dict[str, list[bytes]] = {"call": CALL, "thought": [b"<think>", b"Hm", b".", b"</think>"]}


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    between=st.lists(st.sampled_from(sorted(SEGMENTS)), min_size=3, max_size=3),
    sizes=st.lists(st.integers(1, 9), max_size=12),
)
@example(lengths=[1, 1], between=["thought"] * 3, sizes=[])
@example(lengths=[1, 1], between=["call"] * 3, sizes=[])
@settings(max_examples=examples(200), deadline=None)
def test_log_probabilities_of_each_message_are_its_own(
    lengths: list[int], between: list[str], sizes: list[int]
) -> None:
    """Those of a call or a thought behind it were a message's where they came in its chunk."""
    tokens: list[bytes] = []
    texts = [(letter * length).encode() for letter, length in zip("\xe9\u65e5\xe4", lengths, strict=False)]
    for text, other in zip(texts, between, strict=False):
        tokens += [text[start : start + 2] for start in range(0, len(text), 2)] + SEGMENTS[other]
    split = ThinkingSplit(PARSERS["qwen3"], is_inside=False)
    form = AnswerForm(AskedAnswer({}, is_chat=True, model="m"), "1", 0, tokens.__getitem__, split)
    decoder = codecs.getincrementaldecoder("utf-8")()
    stage = ToolStage(lambda: CallParser(FORMATS["hermes"], {"f": {}}))
    items, at = OutputItems(0), 0
    for size in [*sizes, len(tokens)]:
        ids = list(range(at, min(at + size, len(tokens))))
        at += len(ids)
        decoded = decoder.decode(b"".join(tokens[each] for each in ids))
        made = {"token_ids": ids, "text": decoded, "log_probs": [-1.0] * len(ids), "top_logprobs": [[]] * len(ids)}
        made |= {"finish_reason": "stop"} if at == len(tokens) else {}
        for event in form.events(made):
            for each in stage.feed(event):
                for choice in each["choices"]:
                    list(items.events(choice))
        if at == len(tokens):
            break
    list(items.end("completed"))
    parts = [item["content"][0] for item in items.items if item["type"] == "message"]
    assert [part["text"] for part in parts] == [text.decode() for text in texts]
    for part in parts:
        assert b"".join(bytes(each["bytes"]) for each in part["logprobs"]) == part["text"].encode()


def test_receipts_come_with_the_response() -> None:
    first = {"nvext": {"engine_data": {"logits_processors": {"receipt": 1}}}}
    chunks = [chunk(content="a"), {**chunk("stop"), **first}, usage()]
    events, _ = streamed(chunks)
    check_stream(events)
    assert events[-1]["response"]["nvext"] == assembled(chunks)["nvext"]


def test_a_failure_ends_the_stream_with_its_error() -> None:
    answer = Answer(new_response(FIELDS, "resp_1", stored=True))
    events = [*answer.created(), *answer.begun(), *answer.events(chunk(content="a"))]
    events += answer.failed(Refused(502, "the frontend did not answer", kind="server_error"))
    final: Any = check_stream(events)
    assert (final.status, final.error.code, final.error.message) == (
        "failed",
        "server_error",
        "the frontend did not answer",
    )
    assert final.output[0].status == "incomplete"


def test_a_failure_before_the_answer_names_the_field() -> None:
    answer = Answer(new_response({**FIELDS, "background": True}, "resp_1", stored=True))
    events = [*answer.created(), *answer.failed(FieldRefused("seed", "must be an integer"))]
    final: Any = checked_event(events[-1]).response
    assert [event["type"] for event in events] == ["response.created", "response.queued", "response.failed"]
    assert (final.error.code, final.error.param) == ("invalid_prompt", "seed")


def test_a_cancelled_response_ends_with_an_error() -> None:
    answer = Answer(new_response({**FIELDS, "background": True}, "resp_1", stored=True))
    events = [*answer.created(), *answer.begun(), *answer.events(chunk(content="a")), *answer.cancelled()]
    for event in events:
        checked_event(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "response_cancelled")
    assert checked_response(answer.response).status == "cancelled"


def test_parts_of_a_call_that_has_ended_are_an_error() -> None:
    answer = Answer(new_response(FIELDS, "resp_1", stored=True))
    for each in (call(0, "{}", id="a", name="f"), call(1, id="b", name="f")):
        list(answer.events(each))
    with pytest.raises(Refused) as caught:
        list(answer.events(call(0, "1")))
    assert caught.value.status == 502


TEXTS = st.text(min_size=1, max_size=4)
KINDS = st.sampled_from(["reasoning_content", "content", "call", "nothing"])


@st.composite
def answers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Chunks of any answer: reasoning, texts and calls in any order, in any pieces."""
    chunks: list[dict[str, Any]] = []
    num_calls = 0
    for kind in draw(st.lists(KINDS, max_size=6)):
        pieces = draw(st.lists(TEXTS, max_size=3))
        if kind == "call":
            chunks.append(call(num_calls, *pieces[:1], id=f"c{num_calls}", name=draw(TEXTS)))
            chunks += [call(num_calls, piece) for piece in pieces[1:]]
            num_calls += 1
        elif kind == "nothing":
            chunks.append(chunk(content="", logprobs={"content": [logprob(each) for each in pieces]}))
        else:
            chunks += [chunk(**{kind: each}, logprobs={"content": [logprob(each)]}) for each in pieces]
    return [*chunks, chunk(draw(st.sampled_from(["stop", "length", "tool_calls"]))), usage()]


@settings(max_examples=examples(400), deadline=None)
@given(chunks=answers())
def test_the_events_of_any_answer_are_its_response(chunks: list[dict[str, Any]]) -> None:
    events, response = streamed(chunks)
    final: Any = check_stream(events)
    message = assembled(chunks)["choices"][0]["message"]
    assert events[-1]["response"] == json.loads(json.dumps(response))
    assert final.output_text == (message["content"] or "")
    assert "".join(item.content[0].text for item in final.output if item.type == "reasoning") == (
        message.get("reasoning_content") or ""
    )
    calls = [(item.call_id, item.name, item.arguments) for item in final.output if item.type == "function_call"]
    assert calls == [
        (each["id"], each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())
    ]
    assert all(item.status == "completed" for item in final.output[:-1])
