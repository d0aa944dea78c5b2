"""Chunks of a chat as the events of a message, and as the message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.frontdoor.errors import Refused
from worker.frontdoor.messages.chat_paths import ChatPaths
from worker.frontdoor.messages.events import Event, MessageEvents
from worker.frontdoor.messages.held_text import HeldText
from worker.frontdoor.messages.message import input_of, server_sent, whole_message, written
from worker.frontdoor.messages.request import TranslatedRequest
from worker.frontdoor.messages.thinking import signature_of

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
SPLIT_USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 6,
    "output_tokens": 4,
}


def chunk(finish_reason: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish_reason}
    made: dict[str, Any] = {"id": "chatcmpl-a-b", "model": "m", "created": 1, "choices": [choice]}
    return made if usage is None else {**made, "usage": usage}


def last(usage: Any = USAGE) -> dict[str, Any]:
    return {"id": "chatcmpl-a-b", "model": "m", "choices": [], "usage": usage}


def call(index: int = 0, arguments: str = "", **more: Any) -> dict[str, Any]:
    """A part of a call; with ``name`` its beginning."""
    name = more.pop("name", None)
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    start = {} if name is None else {"id": f"call-{index}", "type": "function"}
    return {"tool_calls": [{"index": index, **start, "function": function, **more}]}


def events_of(chunks: Iterable[Any], **request: Any) -> list[Event]:
    maker = MessageEvents(TranslatedRequest({}, ChatPaths(), **{"max_tokens": 9, **request}))
    return [event for each in chunks for event in maker.take(each)] + maker.end()


def message_of(chunks: Iterable[Any], **request: Any) -> Any:
    return whole_message(events_of(chunks, **request))


def check_order(events: Sequence[Event]) -> None:
    """Blocks come one after the other, numbered, and each event is where Anthropic has it."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    index, is_open = -1, False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            index, is_open = index + 1, True
            assert event["index"] == index
        elif event["type"] in ("content_block_delta", "content_block_stop"):
            assert is_open
            assert event["index"] == index
            is_open = event["type"] == "content_block_delta"
    assert not is_open


def test_the_events_of_a_text() -> None:
    first = chunk(content="Hel", usage={"prompt_tokens": 9, "completion_tokens": 1})
    events = events_of([first, chunk(content=""), chunk("stop", content="lo"), last()])
    start = {"input_tokens": 9, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    message: dict[str, Any] = {
        "id": "msg_ab",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": start,
    }
    assert events == [
        {"type": "message_start", "message": message},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": SPLIT_USAGE,
        },
        {"type": "message_stop"},
    ]


def test_thoughts_calls_and_texts_are_blocks() -> None:
    chunks = [
        chunk(reasoning_content="I "),
        chunk(reasoning_content="see", content="So"),
        chunk(**call(0, '{"a"', name="f")),
        chunk(**call(0, ": 1}")),
        chunk(**call(1, "", name="g")),
        chunk("tool_calls"),
        last(),
    ]
    events = events_of(chunks)
    check_order(events)
    message = whole_message(events)
    assert message["content"] == [
        {"type": "thinking", "thinking": "I see", "signature": signature_of("I see", is_shown=True)},
        {"type": "text", "text": "So"},
        {"type": "tool_use", "id": "call-0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call-1", "name": "g", "input": {}},
    ]
    assert (message["stop_reason"], message["usage"]) == ("tool_use", SPLIT_USAGE)


def test_omitted_thoughts_are_in_the_signature() -> None:
    events = events_of([chunk(reasoning_content="hm"), chunk("stop", content="a"), last()], shows_thoughts=False)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    signature = signature_of("hm", is_shown=False)
    assert deltas == [
        {"type": "signature_delta", "signature": signature},
        {"type": "text_delta", "text": "a"},
    ]
    block = whole_message(events)["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": signature}


@pytest.mark.parametrize(
    ("finish_reason", "completion_tokens", "expected"),
    [
        ("stop", 4, "end_turn"),
        ("length", 9, "max_tokens"),
        ("length", 8, "model_context_window_exceeded"),
        ("content_filter", 4, "refusal"),
        (None, 4, "end_turn"),
    ],
)
def test_the_reason_of_the_end(finish_reason: str, completion_tokens: int, expected: str) -> None:
    usage = {**USAGE, "completion_tokens": completion_tokens}
    message = message_of([chunk(finish_reason, content="a"), last(usage)])
    assert (message["stop_reason"], message["stop_sequence"]) == (expected, None)


def test_a_forced_call_that_ends_as_a_text_is_a_call() -> None:
    """OpenAI's finish reason of a call that ``tool_choice`` names is ``stop``."""
    assert message_of([chunk("stop", **call(0, "{}", name="f")), last()])["stop_reason"] == "tool_use"


def test_a_stop_sequence_ends_a_text_behind_a_call() -> None:
    """And a thought: the client got it as text, untold. The end of a call is no stop sequence."""
    called = chunk(**call(0, '{"a": 1}', name="f"))
    stops = ("END", "}")
    message = message_of(
        [called, chunk(content="So E"), chunk("tool_calls", content="ND"), last()], stop_sequences=stops
    )
    assert message["content"][1:] == [{"type": "text", "text": "So "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    thought = [chunk(reasoning_content="So E"), chunk("tool_calls", reasoning_content="ND")]
    message = message_of([called, *thought, last()], stop_sequences=stops)
    assert message["content"][1]["thinking"] == "So "
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    message = message_of([called, chunk("tool_calls"), last()], stop_sequences=stops)
    assert message["content"] == [{"type": "tool_use", "id": "call-0", "name": "f", "input": {"a": 1}}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


def test_an_empty_answer_has_no_blocks() -> None:
    assert message_of([chunk("stop", content=""), last()])["content"] == []
    assert message_of([chunk("stop", content="END"), last()], stop_sequences=("END",))["content"] == []


def test_the_usage_has_the_tokens_of_thoughts() -> None:
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 2}}
    message = message_of([chunk("stop", content="a"), last(usage)])
    assert message["usage"] == {**SPLIT_USAGE, "output_tokens_details": {"thinking_tokens": 2}}


def test_receipts_come_with_the_last_event() -> None:
    data = [{"engine_data": {"n": n}, f"x{n}": n} for n in range(2)]
    chunks = [{**chunk(content="a"), "nvext": data[0]}, {**chunk("stop"), "nvext": data[1]}, last()]
    events = events_of(chunks)
    expected = {"engine_data": {"n": 1}, "x0": 0, "x1": 1}
    assert events[-2]["nvext"] == whole_message(events)["nvext"] == expected


def test_both_workers_of_a_message_name_their_weights() -> None:
    """The one that goes on with an answer names those of its own tokens alone."""
    versions = [{"version": version, "from_token": start} for version, start in (("6", 0), ("7", 3))]
    data = [{"engine_data": {"weight_versions": [one]}} for one in versions]
    events = events_of([{**chunk(content="a"), "nvext": data[0]}, {**chunk("stop"), "nvext": data[1]}, last()])
    assert events[-2]["nvext"] == {"engine_data": {"weight_versions": versions}}


@pytest.mark.parametrize("delta", [{"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, call(1, "}")])
def test_a_call_without_a_beginning_is_a_failure(delta: Any) -> None:
    maker = MessageEvents(TranslatedRequest({}, ChatPaths()))
    maker.take(chunk(**call(0, "{", name="f")))
    maker.take(chunk(content="a"))
    with pytest.raises(Refused) as caught:
        maker.take(chunk(**delta))
    assert caught.value.status == 502


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, {"b": "c"}]}', {"a": [1, {"b": "c"}]}),
        ('{"a": 1, "b": "cut', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("{", {}),
        ("", {}),
        ("[1", {}),
        ("nonsense", {}),
    ],
)
def test_the_input_of_a_call_that_was_cut(text: str, expected: Any) -> None:
    assert input_of(text) == expected


def test_an_input_that_is_too_deep_for_json_is_no_other() -> None:
    with pytest.raises(Refused, match="nested too deep"):
        input_of('{"a":' * 50_000 + "1" + "}" * 50_000)


@pytest.mark.parametrize("number", ["1e999", "-1e400", "1" * 5000])
@pytest.mark.parametrize("end", ["}", ',"b":"c'])
def test_a_number_that_json_cannot_have_is_no_other(number: str, end: str) -> None:
    chunks = [chunk(**call(0, f'{{"a":{number}{end}', name="f")), chunk("tool_calls"), last()]
    with pytest.raises(Refused, match="a number that is too large"):
        written(message_of(chunks))


def test_a_message_is_too_deep_for_json_or_sent() -> None:
    """Near the limit of recursion its input is read, and the message around it is deeper."""
    messages, problems = [], set()
    for depth in range(900, 1000):
        text = '{"a":' + "[" * depth + "]" * depth + "}"
        try:
            messages.append(written(message_of([chunk(**call(0, text, name="f")), chunk("tool_calls"), last()])))
        except Refused as refused:
            problems.add(refused.message)
    assert problems == {"the input of a call is nested too deep for JSON; a stream has it as text"}
    assert messages


def test_events_are_sent_with_their_names() -> None:
    assert server_sent([{"type": "ping"}, {"type": "a", "b": "é\n"}]) == (
        b'event: ping\ndata: {"type":"ping"}\n\nevent: a\ndata: {"type":"a","b":"\\u00e9\\n"}\n\n'
    )


ALPHABET = "abAB"
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@st.composite
def split(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(st.data(), STOPS, st.text(ALPHABET, max_size=12))
@settings(max_examples=examples(500), deadline=None)
def test_a_stop_sequence_is_cut_however_a_text_is_split(data: st.DataObject, stops: list[str], text: str) -> None:
    held = HeldText(stops)
    shown = ""
    for part in data.draw(split(text)):
        shown += held.add(part)
        assert text.startswith(shown)
    rest, found = held.stop()
    ends = [stop for stop in stops if text.endswith(stop)]
    assert found == max(ends, key=len, default=None)
    assert shown + rest + (found or "") == text


@pytest.mark.parametrize(("matched", "text", "found"), [(4, "ax", None), ("x", "a", "x"), (None, "a", "x")])
def test_a_stop_sequence_before_min_tokens_is_text(matched: Any, text: str, found: str | None) -> None:
    """The end token behind it may come after tokens without a text."""
    told = {"rollout": "{}"} if matched is None else {"rollout": "{}", "matched": matched}
    ends = {**chunk("stop"), "nvext": {"engine_data": {**told, "own": 1}}}
    request = {"stop_sequences": ("x",), "asks_for_match": True}
    message = message_of([chunk(content="ax"), ends, last()], **request)
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence" if found else "end_turn", found)
    assert message["nvext"] == {"engine_data": {"own": 1}}


@pytest.mark.parametrize("text", ["so STOP", "STOP"])
def test_a_stop_sequence_behind_a_call_is_cut(text: str) -> None:
    """It was part of the text, and the reason of the end was the call."""
    chunks = [chunk(**call(0, "{}", name="f")), chunk(content=text), chunk("tool_calls"), last()]
    message = message_of(chunks, stop_sequences=("STOP",))
    assert [each.get("text") for each in message["content"][1:]] == ([] if text == "STOP" else ["so "])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
    assert message_of([*chunks[:1], *chunks[2:]], stop_sequences=("STOP",))["stop_reason"] == "tool_use"


def test_an_answer_that_was_aborted_is_no_message() -> None:
    ends = {**chunk("stop"), "nvext": {"engine_data": {"rollout": "{}", "abort": True}}}
    with pytest.raises(Refused, match="aborted"):
        message_of([chunk(content="a"), ends, last()], stop_sequences=("x",), asks_for_match=True)


@given(st.data(), STOPS, st.text(ALPHABET, max_size=12))
@settings(max_examples=examples(200), deadline=None)
def test_no_more_of_a_text_is_held_than_begins_a_stop(data: st.DataObject, stops: list[str], text: str) -> None:
    held = HeldText(stops)
    shown = "".join(held.add(part) for part in data.draw(split(text)))
    begun = (text[start:] for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in stops))
    assert text == shown + next(begun, "")


class Looked(str):
    """Stop sequence that counts the characters that are compared with it."""

    num_looked = 0

    def startswith(self, begin: Any, *place: Any) -> bool:
        Looked.num_looked += len(begin)
        return super().startswith(begin, *place)

    def __getitem__(self, place: Any) -> str:
        Looked.num_looked += 1
        return super().__getitem__(place)


def test_a_long_stop_sequence_is_compared_once() -> None:
    """Each end of what was held was compared, so that one of 65,000 characters took 0.2 s."""
    length = 2000
    held, Looked.num_looked = HeldText([Looked("a" * length)]), 0
    assert held.add("a" * (length - 1)) == ""
    assert held.add("b") == "a" * (length - 1) + "b"
    assert Looked.num_looked < 20 * length


BLOCKS = st.lists(
    st.tuples(st.sampled_from(["text", "thinking", "tool_use"]), st.text(ALPHABET, min_size=1, max_size=8)),
    max_size=6,
)


@given(st.data(), BLOCKS, st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), st.booleans())
@settings(max_examples=examples(500), deadline=None)
def test_a_message_does_not_depend_on_its_chunks(
    data: st.DataObject, blocks: list[tuple[str, str]], stops: list[str], has_stopped: bool
) -> None:
    chunks: list[Any] = []
    expected: list[tuple[str, Any]] = []
    for number, (kind, text) in enumerate(blocks):
        parts = data.draw(split(text if kind != "tool_use" else json.dumps({"x": text})))
        if kind == "tool_use":
            chunks.append(chunk(**call(number, parts[0], name=text)))
            chunks += [chunk(**call(number, part)) for part in parts[1:]]
            expected.append((kind, {"x": text}))
        else:
            chunks += [chunk(**{"content" if kind == "text" else "reasoning_content": part}) for part in parts]
            if expected and expected[-1][0] == kind:
                text = expected.pop()[1] + text
            expected.append((kind, text))
    chunks += [chunk("stop" if has_stopped else "length"), last()]
    events = events_of(chunks, stop_sequences=tuple(stops))
    check_order(events)
    message = whole_message(events)
    found = message["stop_sequence"]
    if found is not None:
        assert has_stopped
        assert message["stop_reason"] == "stop_sequence"
        kind, text = expected.pop()
        assert text.endswith(found)
        if text != found:
            expected.append((kind, text.removesuffix(found)))
    values = [
        (each["type"], each.get("text") or each.get("thinking") or each.get("input")) for each in message["content"]
    ]
    assert values == expected
    if has_stopped and expected and expected[-1][0] != "tool_use" and found is None:
        assert not any(expected[-1][1].endswith(stop) for stop in stops)
