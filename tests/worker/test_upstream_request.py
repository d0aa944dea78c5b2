"""Requests of the front door to workers behind OpenEngine: every control arrives, or is refused."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import vocabulary_like

from adapters.contract import Context
from adapters.processors.thinking import ThinkingBudget
from worker.errors import InvalidRequest
from worker.frontdoor.fields import CHAT, COMPLETIONS, TABLES
from worker.frontdoor.openengine import exchange
from worker.frontdoor.openengine.body import client_name, read_body
from worker.frontdoor.openengine.exchange import Request
from worker.frontdoor.openengine.thinking import PARSERS, Thinking, ThinkingSplit, reasoning_tokens
from worker.requests.request import RequestLimits, parse_request
from worker.runtimes.direct.openai_fields import places
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.asking import own_name, written
from worker.runtimes.openengine.errors import Unsupported
from worker.runtimes.openengine.request import FIELDS, CallHints, read, renamed
from worker.sampling import GuidedDecodingParams, SamplingParams

LIMITS = RequestLimits(context_length=64, vocab_size=1000, eos_token_ids=(1,), numerics="exact", kv_dtype="float32")
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
COUNT = st.integers(0, 2**31 - 1)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
GUIDES = ("json", "regex", "grammar", "structural_tag", "choice")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("tiny"),
    "token_ids": st.lists(st.integers(0, 2**32 - 1), min_size=1),
    "multi_modal_data": st.fixed_dictionaries(
        {"image_url": st.lists(st.fixed_dictionaries({"Url": TEXT.map("data:".__add__)}), min_size=1, max_size=3)}
    ),
    "annotations": st.lists(TEXT, min_size=1),
    "continues": st.fixed_dictionaries(
        {"generated_tokens": st.just(3), "numerics": st.just("exact"), "kv_dtype": st.just("float32")},
        optional={"weights": TEXT, "adapter": TEXT},
    ),
    "sampling_options.allowed_token_ids": st.lists(st.integers(0, 2**31), min_size=1),
    "sampling_options.bad_words_token_ids": st.lists(st.lists(st.integers(0, 2**31), min_size=1), min_size=1),
    "text": st.booleans(),
    "require_reasoning": st.booleans(),
    "sampling_options.seed": st.integers(0, 2**64 - 1),
    "sampling_options.top_k": st.integers(-1, 2**31 - 1),
    "sampling_options.guided_decoding.json": st.dictionaries(TEXT, COUNT).map(json.dumps),
    "sampling_options.guided_decoding.choice": st.lists(TEXT, min_size=1),
    "routing.cache_salt": TEXT,
    "routing.lora_name": TEXT.filter(bool),
    "stop_conditions.stop": st.lists(TEXT.filter(bool), min_size=1),
    "stop_conditions.stop_token_ids": st.lists(st.integers(0, 2**32 - 1), min_size=1),
    **dict.fromkeys(("output_options.skip_special_tokens", "stop_conditions.ignore_eos"), st.booleans()),
    "sampling_options.include_stop_str_in_output": st.booleans(),
    **dict.fromkeys(("output_options.logprobs", "output_options.prompt_logprobs"), st.integers(0, 100)),
    **{f"stop_conditions.{name}": COUNT for name in ("max_tokens", "min_tokens", "max_thinking_tokens")},
    **{
        f"sampling_options.{name}": NUMBER
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    },
}
ALONE = {"prompt", "logits_processors", "sampling_options.n"}
"""Fields of clients of the protocol that the front door has no use for."""


def test_every_field_of_the_protocol_is_known() -> None:
    guides = {f"sampling_options.guided_decoding.{name}" for name in (*GUIDES, "backend")}
    others = {"stop_conditions.stop", "stop_conditions.stop_token_ids"}
    assert set(FIELDS.values()) | others == set(VALUES) | ALONE | guides


def test_every_control_of_a_client_has_a_field_of_the_protocol() -> None:
    asked = {f"{section}.{name}" for name, section in places(SamplingParams).items()}
    assert asked <= {*FIELDS.values(), "stop_conditions.stop_token_ids"}


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """A message with any of the fields, at most one guide among them."""
    paths = draw(st.sets(st.sampled_from(sorted(VALUES)))) | {"token_ids", "model"}
    guides = sorted(path for path in paths if "guided" in path)
    made: dict[str, Any] = {}
    for path in paths.difference(guides[1:]):
        *sections, name = path.split(".")
        section = made
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = draw(VALUES[path])
    return made


@given(message=messages())
@settings(max_examples=examples(300), deadline=None)
def test_a_worker_reads_what_was_written(message: dict[str, Any]) -> None:
    request = written(message, "id")
    assert request.request_id == "id"
    sent = wire.GenerateRequest.FromString(request.SerializeToString())
    assert sent.model == message.pop("model")  # which a worker only checks
    assert read(sent, ("tiny",), CallHints()).message == message


@pytest.mark.parametrize("theirs", FIELDS)
def test_names_in_errors_go_back(theirs: str) -> None:
    ours = FIELDS[theirs]
    if theirs.startswith("guided."):
        ours = "sampling_options.guided_decoding"
    assert own_name(theirs, {}) == ours
    inside = {"media": "multi_modal_data.image_url[0].Url"}.get(theirs, f"{ours}[0].x")
    assert own_name(f"{theirs}[0].x", {}) == (ours if theirs.startswith("guided.") else inside)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_condition_is_named_as_the_message_has_it(name: str) -> None:
    """Beside stop strings an error about a stop token named those."""
    both = {"stop_conditions": {"stop": ["a"], "stop_token_ids": [1]}}
    told = renamed(InvalidRequest(f"stop_conditions.{name}", "is wrong"), written(both, "id"))
    assert own_name(told.field, both) == f"stop_conditions.{name}"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [2**32]}, "token_ids"),
        ({"sampling_options": {"temperature": "hot"}}, "sampling_options.temperature"),
        ({"sampling_options": {"seed": 2**64}}, "sampling_options.seed"),
        ({"stop_conditions": {"stop_token_ids": ["a"]}}, "stop_conditions.stop_token_ids"),
        ({"routing": {"dp_rank": 1}}, "routing.dp_rank"),
        ({"sampling_options": {"new_control": 1}}, "sampling_options.new_control"),
    ],
)
def test_what_the_protocol_cannot_say_is_refused(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        written(message, "id")
    assert error.value.field == field
    assert isinstance(error.value, Unsupported) == (field in ("routing.dp_rank", "sampling_options.new_control"))


def test_a_negative_seed_is_taken_modulo() -> None:
    assert written({"sampling_options": {"seed": -1}}, "").sampling.seed == 2**64 - 1


BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": []}, COMPLETIONS: {"prompt": "a"}}
GIVEN: dict[str, Any] = {
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
    "tools": [],
    "tool_choice": "auto",
    "nvext": {"annotations": ["a"]},
    "chat_template_args": {"a": 1},
    "chat_template_kwargs": {"a": 1},
    "thinking": {"type": "enabled"},
}


@pytest.mark.parametrize(
    ("path", "name"), [(path, row.name) for path in TABLES for row in TABLES[path].values() if row.fate != "refused"]
)
def test_every_field_of_a_client_is_read(path: str, name: str) -> None:
    """Those that the front door does not turn into something else; no other one is left out."""
    value = GIVEN.get(name, BODIES[path].get(name, 1))
    if TABLES[path][name].removed:
        with pytest.raises(InvalidRequest, match="is a field of Dynamo's frontend"):
            read_body(path, {**BODIES[path], name: value}, {}, thinks=False)
        return
    assert read_body(path, {**BODIES[path], name: value}, {}, thinks=False).is_chat == (path == CHAT)


@pytest.mark.parametrize("schema", [True, False, {}])
def test_any_schema_of_a_format_arrives(schema: Any) -> None:
    """True and false are schemas, and were taken for no format at all."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = read_body(CHAT, {"messages": [], "response_format": form}, {}, thinks=False)
    assert asked.message["sampling_options"] == {"guided_decoding": {"json": schema}}
    message = {"model": "tiny", "token_ids": [5], "sampling_options": asked.message["sampling_options"]}
    sent = read(written(message, "id"), ("tiny",), CallHints())
    made = parse_request({**sent.message, "model": "tiny"}, LIMITS)
    assert made.params.guided_decoding == GuidedDecodingParams(json=schema)


def test_headers_and_nvext_arrive() -> None:
    headers = {b"x-dynamo-meta-logits-processors": b'{"version":1}', b"x-tenant-id": b"a", b"x-other": b"b"}
    nvext = {"agent_hints": {"priority": 3}, "max_thinking_tokens": 4, "extra_fields": ["engine_data"]}
    body = {"prompt": [5], "max_tokens": 9, "nvext": nvext, "guided_regex": "a"}
    asked = read_body(COMPLETIONS, {**body, "cache_salt": "b"}, headers, thinks=True)
    assert asked.message["routing"] == {"cache_salt": "a", "priority": 3}
    assert asked.message["annotations"] == ['logits_processors:{"version":1}']
    assert asked.message["stop_conditions"] == {"max_tokens": 9, "max_thinking_tokens": 4}
    assert asked.message["require_reasoning"] is True
    assert asked.message["token_ids"] == [5]
    salted = read_body(COMPLETIONS, {**body, "cache_salt": "b"}, {b"x-tenant-id": b""}, thinks=True)
    assert salted.message["routing"]["cache_salt"] == "b"
    ids = read_body(CHAT, {"messages": [{"role": "user"}], "nvext": {"token_data": [5, 6]}}, {}, thinks=False)
    assert (ids.message["token_ids"], "messages" in ids.message) == ([5, 6], False)
    tools = [{"type": "function", "function": {"name": "f"}}]
    told = read_body(CHAT, {"messages": [], "tools": tools, "nvext": {"token_data": [5]}}, {}, thinks=False)
    assert "tools" not in told.message  # which a template would get, and none makes a prompt of ids
    chat = read_body(CHAT, {"messages": [], "max_completion_tokens": 5, "max_tokens": 9}, {}, thinks=False)
    assert chat.message["stop_conditions"] == {"max_tokens": 5}


@pytest.mark.parametrize("nvext", [{"extra_fields": ["timing"]}, {"router": {}}, {"agent_hints": {"osl": 1}}])
def test_what_needs_dynamo_is_refused(nvext: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^nvext\."):
        read_body(CHAT, {"messages": [], "nvext": nvext}, {}, thinks=False)


def test_names_of_a_client() -> None:
    assert client_name("routing.priority", {}) == "nvext.agent_hints.priority"
    assert client_name("chat_template_args", {"chat_template_kwargs": {}}) == "chat_template_kwargs"
    assert client_name("chat_template_args", {"chat_template_args": {}}) == "chat_template_args"
    assert client_name("token_ids", {}) == "token_ids"


BEGUN = {"generated_tokens": 2, "numerics": "exact", "kv_dtype": "float32"}


def continued(continues: Any, **fields: Any) -> Any:
    sampling = fields.pop("sampling_options", {"seed": 4})
    raw = {"token_ids": [5, 6, 7, 8], "continues": continues, "sampling_options": sampling, **fields}
    return parse_request(raw, LIMITS)


def test_an_answer_goes_on_with_whole_budgets() -> None:
    request = continued(BEGUN, stop_conditions={"max_tokens": 9, "min_tokens": 3})
    assert (request.prompt_token_ids, request.generated_token_ids) == ([5, 6], [7, 8])
    assert (request.params.max_tokens, request.params.min_tokens, request.params.seed) == (9, 3, 4)
    assert continued(BEGUN).params.max_tokens == LIMITS.context_length - 2  # the room behind the prompt alone


@pytest.mark.parametrize(
    ("continues", "fields", "field"),
    [
        ({}, {}, "continues"),
        ({**BEGUN, "more": 1}, {}, "continues"),
        ({**BEGUN, "generated_tokens": 0}, {}, "continues.generated_tokens"),
        ({**BEGUN, "generated_tokens": 4}, {}, "continues.generated_tokens"),
        ({**BEGUN, "generated_tokens": True}, {}, "continues.generated_tokens"),
        ({**BEGUN, "numerics": 1}, {}, "continues.numerics"),
        ({**BEGUN, "numerics": "other"}, {}, "continues.numerics"),
        ({**BEGUN, "kv_dtype": "int8"}, {}, "continues.kv_dtype"),
        ({**BEGUN, "weights": None}, {}, "continues.weights"),
        ({**BEGUN, "adapter": 1}, {}, "continues.adapter"),
        (BEGUN, {"sampling_options": {}}, "sampling_options.seed"),
        (BEGUN, {"stop_conditions": {"max_tokens": 2}}, "continues.generated_tokens"),
    ],
)
def test_an_answer_that_would_not_go_on_is_refused(continues: Any, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        continued(continues, **fields)
    assert error.value.field == field


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "</", "a", "\n", ""]), max_size=12)


@given(pieces=PIECES, cuts=st.lists(st.integers(0, 60), max_size=6), is_inside=st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_thinking_is_split_whatever_the_pieces(pieces: list[str], cuts: list[int], is_inside: bool) -> None:
    text = "".join(pieces)
    inside, rest = is_inside, text
    expected = {"content": "", "reasoning_content": ""}
    while rest:
        tag = "</think>" if inside else "<think>"
        part, found, rest = rest.partition(tag)
        expected["reasoning_content" if inside else "content"] += part
        inside = inside != bool(found)
    cut_at = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    chunks = [text[a:b] for a, b in pairwise(cut_at)] or [""]
    split = ThinkingSplit(PARSERS["qwen3"], is_inside=is_inside)
    made = {"content": "", "reasoning_content": ""}
    for number, chunk in enumerate(chunks):
        for name, part in split.feed(chunk, ends=number == len(chunks) - 1):
            assert part
            made[name] += part
    assert made == expected


TAGS = (Thinking("<think>", "</think>"), Thinking("◁think▷", "◁/think▷"))


@pytest.mark.parametrize("thinking", TAGS, ids=["tokens", "texts"])
@given(data=st.data(), is_inside=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_reasoning_tokens_are_those_of_the_budget(thinking: Thinking, data: st.DataObject, is_inside: bool) -> None:
    vocabulary = vocabulary_like("qwen")
    words = (thinking.begin, thinking.end, thinking.begin[:2], thinking.end[:3], "ink>", " a", "<", "\n")
    texts = data.draw(st.lists(st.sampled_from(words), max_size=14))
    ids = [token_id for text in texts for token_id in vocabulary.encode(text)]
    args = ThinkingBudget.Args(tokens=10_000, start=thinking.begin, end=thinking.end)
    budget = ThinkingBudget(args, Context(vocabulary, frozenset(), 0))
    prompt = vocabulary.encode(thinking.begin) if is_inside else []
    budget.start(prompt)
    counter = reasoning_tokens(vocabulary, thinking, is_inside=is_inside)
    for place, token_id in enumerate(ids):
        budget.accept(token_id, len(prompt) + place)
        counter.feed([token_id])
        assert counter.count == budget._state.used


@pytest.mark.parametrize("count", [1, 40_000])
async def test_a_large_body_is_read_beside_the_event_loop(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB of ids held all other clients up for 0.1 s."""
    threads, loads = list[threading.Thread](), json.loads

    async def ended(_: Any, made: Any) -> None:
        assert made is None

    def noted(text: bytes) -> Any:
        threads.append(threading.current_thread())
        return loads(text)

    body = json.dumps({"model": "tiny", "prompt": [5] * count}).encode()
    request = Request("POST", COMPLETIONS, {b"content-type": b"application/json"}, body)
    engines: Any = None
    monkeypatch.setattr(exchange, "_prepared", lambda *_: threads.append(threading.current_thread()))
    monkeypatch.setattr(json, "loads", noted)
    monkeypatch.setattr(exchange._Answering, "_generate", ended)
    await exchange._Answering(engines, request, engines).generate()
    assert [thread is threading.current_thread() for thread in threads] == [count == 1] * 2
