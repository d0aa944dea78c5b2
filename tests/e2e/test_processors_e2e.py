"""Logits processors through Dynamo's own frontend: what a client asks for is what it gets, or it
hears why not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, Stack, Worker, wait_for
from processor_requests import (
    KEY,
    LETTER_A,
    LETTER_B,
    Reply,
    annotation,
    chat,
    check_failed,
    check_refused,
    complete,
    of,
    send,
    serving,
)
from tokenizers import Tokenizer

from adapters.client import HEADER, from_openai_logit_bias, logits_processors, processor, selection
from adapters.processors.synthid import detect_synthid
from adapters.processors.watermark import detect

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}

AB = [LETTER_A, LETTER_B]
HOT = [processor("logit_bias", bias={str(LETTER_A): 100, str(LETTER_B): 85})]

Shared = tuple[Stack, Worker]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Shared]:
    with serving(tmp_path_factory.mktemp("served"), tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def ends(tiny_model: Path) -> list[int]:
    """Ids that end an answer."""
    ids = json.loads((tiny_model / "generation_config.json").read_text())["eos_token_id"]
    return [int(token_id) for token_id in ids]


TAGS = {
    "type": "triggered_tags",
    "triggers": ["<n="],
    "tags": [{"begin": "<n=", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": ">"}],
}
TOOLS = [{"name": name, "parameters": PERSON} for name in ("greet", "dismiss")]


def is_a_call(text: str) -> bool:
    """Whether ``text`` is one call of one of `TOOLS`, as hermes writes it."""
    found = re.fullmatch("<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
    if found is None:
        return False
    call = json.loads(found[1])
    return call["name"] in ("greet", "dismiss") and set(call["arguments"]) == {"name", "ok"}


# Built-ins, by annotation. Each check would fail on the model's own answer.


BUILT_INS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], Callable[[Reply], bool]]] = {
    "forced_sequence": (
        [processor("forced_sequence", text="Hello world!")],
        {},
        lambda reply: reply.content == "Hello world!" and reply.finish_reason == "stop",
    ),
    "forced_prefix": (
        [processor("forced_prefix", text="Yes, of course: ")],
        {},
        lambda reply: reply.content.startswith("Yes, of course: ") and reply.finish_reason == "length",
    ),
    "force_last_phrase": (
        [processor("force_last_phrase", text=" The end.")],
        {"max_tokens": 24},
        lambda reply: reply.content.endswith(" The end.") and reply.finish_reason == "stop",
    ),
    "trigger_phrase": (
        [processor("trigger_phrase", text=" Wait, stop.", after_tokens=3)],
        {"max_tokens": 24},
        lambda reply: " Wait, stop." in reply.content,
    ),
    "choice": (
        [processor("choice", choices=["certainly", "never"])],
        {},
        lambda reply: reply.content in ("certainly", "never") and reply.finish_reason == "stop",
    ),
    "multiple_choice": (
        [processor("multiple_choice", choices=["the first", "the second"])],
        {},
        lambda reply: reply.content in ("the first", "the second") and reply.finish_reason == "stop",
    ),
    "json_schema": (
        [processor("json_schema", schema=PERSON)],
        {"max_tokens": 60},
        lambda reply: set(json.loads(reply.content)) == {"name", "ok"} and reply.finish_reason == "stop",
    ),
    "regex": (
        [processor("regex", pattern="[ab]{3}c+d")],
        {"max_tokens": 60, "temperature": 1.0, "seed": 1},
        lambda reply: re.fullmatch("[ab]{3}c+d", reply.content) is not None,
    ),
    "grammar": (
        [processor("grammar", lark='start: "one " ("and " | "or ") ("two" | "three")')],
        {},
        lambda reply: re.fullmatch("one (and|or) (two|three)", reply.content) is not None,
    ),
    "structural_tag": (
        [processor("structural_tag", format=TAGS), processor("forced_prefix", text="It is <n=")],
        {"max_tokens": 24},
        lambda reply: re.match("It is <n=[0-9]{2}>", reply.content) is not None,
    ),
    "tool_calls": (
        [processor("tool_calls", format="hermes", tools=TOOLS, choice="required", parallel=False)],
        {"max_tokens": 120},
        lambda reply: is_a_call(reply.content) and reply.finish_reason == "stop",
    ),
    "allowed_tokens": (
        [processor("allowed_tokens", token_ids=[LETTER_A, LETTER_B]), processor("min_tokens", n=9)],
        {"temperature": 1.0, "seed": 3},
        lambda reply: set(reply.token_ids) == {LETTER_A, LETTER_B} and len(reply.token_ids) >= 9,
    ),
    "logit_bias": (
        [processor("logit_bias", bias={str(LETTER_A): 100})],
        {},
        lambda reply: reply.content == "A" * 16,
    ),
    "sequence_bias": (
        [processor("sequence_bias", sequences=[{"token_ids": [LETTER_A], "bias": 50}, {"token_ids": AB, "bias": 100}])],
        {},
        lambda reply: reply.content == "AB" * 8,
    ),
    "a penalty over a window": (
        [
            processor("logit_bias", bias={str(LETTER_A): 100, str(LETTER_B): 90}),
            processor("repetition_penalty", penalty=2.0, window=1),
        ],
        {},
        lambda reply: reply.content == "AB" * 8,
    ),
    "top_a": (
        [*HOT, processor("top_a", a=1.0), processor("temperature", value=5.0)],
        {"seed": 3},
        lambda reply: reply.content == "A" * 16,
    ),
    "an order": (
        [*HOT, processor("min_p", p=0.9), processor("temperature", value=100.0)],
        {"seed": 3, "order": ["min_p", "temperature"]},
        lambda reply: reply.content == "A" * 16,
    ),
    "no_repeat_ngram": (
        [processor("logit_bias", bias={str(LETTER_A): 100}), processor("no_repeat_ngram", n=3, over="generated")],
        {},
        lambda reply: reply.content.startswith("AAA") and "AAAA" not in reply.content,
    ),
    "loop_stop": (
        [processor("logit_bias", bias={str(LETTER_A): 100}), processor("loop_stop", max_period=1, copies=5)],
        {},
        lambda reply: reply.content == "AAAAA" and reply.finish_reason == "stop",
    ),
    "bad_words": (
        [processor("logit_bias", bias={str(LETTER_A): 100}), processor("bad_words", words=["AA"])],
        {},
        lambda reply: reply.content.startswith("A") and "AA" not in reply.content,
    ),
    "ban_scripts": (
        [processor("ban_scripts", scripts=["Latin"])],
        {},
        lambda reply: not any("LATIN" in unicodedata.name(letter, "") for letter in reply.content),
    ),
    "top_k of one": (
        [processor("temperature", value=50.0), processor("top_k", k=1)],
        {"seed": 5},
        lambda reply: all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in reply.logprobs),
    ),
    "top_k of three": (
        [processor("temperature", value=50.0), processor("top_k", k=3)],
        {"seed": 5},
        lambda reply: {rank(one) for one in reply.logprobs} == {0, 1, 2},
    ),
    "watermark": (
        [processor("temperature", value=1.5), processor("watermark", key_id="house")],
        {"max_tokens": 120, "ignore_eos": True},
        lambda reply: detect(reply.token_ids, KEY, 2**31).p_value < 1e-6,
    ),
    "synthid": (
        [processor("temperature", value=1.5), processor("synthid", key_id="house")],
        {"max_tokens": 120, "ignore_eos": True, "seed": 7},
        lambda reply: detect_synthid(reply.token_ids, KEY, 2**31).p_value < 1e-6,
    ),
}


def rank(entry: dict[str, Any]) -> int:
    """Place of a token among the five likeliest, 5 if it is not there."""
    values = [top["logprob"] for top in entry["top_logprobs"]]
    return values.index(entry["logprob"]) if entry["logprob"] in values else 5


def test_the_letters(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id("A"), tokenizer.token_to_id("B")] == [LETTER_A, LETTER_B]


@pytest.mark.parametrize("name", BUILT_INS)
def test_built_in(served: Shared, name: str) -> None:
    """Streamed and not, and the model alone answers otherwise."""
    processors, options, holds = BUILT_INS[name]
    whole = chat(served[0], *processors, **options)
    assert whole.status == 200, whole.text
    assert holds(whole), whole.text
    streamed = chat(served[0], *processors, stream=True, **options)
    assert streamed.status == 200
    assert (streamed.content, streamed.finish_reason) == (whole.content, whole.finish_reason)
    assert streamed.token_ids == whole.token_ids
    if name != "top_k of one":  # which is what the model alone does
        with pytest.raises((AssertionError, ValueError)):
            assert holds(chat(served[0], **options))


def test_min_tokens_and_banned_tokens(served: Shared, ends: list[int]) -> None:
    eager = processor("logit_bias", bias={str(ends[0]): 100})
    assert chat(served[0], eager).token_ids == []
    held = chat(served[0], eager, processor("min_tokens", n=7))
    assert len(held.token_ids) == 7
    assert held.finish_reason == "stop"
    banned = chat(served[0], processor("banned_tokens", token_ids=sorted(set(held.token_ids))), ignore_eos=True)
    assert not set(banned.token_ids) & set(held.token_ids)
    assert len(banned.token_ids) == 16


def test_seeded_draws_of_a_processor_repeat(served: Shared) -> None:
    drawn = [processor("temperature", value=1.4), processor("xtc", threshold=0.05, probability=0.5)]
    first = chat(served[0], *drawn, seed=11)
    assert chat(served[0], *drawn, seed=11).token_ids == first.token_ids
    assert chat(served[0], *drawn, seed=12).token_ids != first.token_ids


def test_an_order_of_fields(served: Shared) -> None:
    """The fields are cut and warmed as the request says, and neither is dropped."""
    fields: dict[str, Any] = {"temperature": 2.0, "min_p": 0.6, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    by_law = chat(served[0], **fields)
    assert chat(served[0], order=["temperature", "min_p"], **fields).token_ids == by_law.token_ids
    cut_first = chat(served[0], order=["min_p", "temperature"], **fields)
    assert cut_first.token_ids != by_law.token_ids
    assert chat(served[0], order=["min_p", "temperature"], stream=True, **fields).token_ids == cut_first.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_budget(served: Shared, tokenizer: Tokenizer, stream: bool) -> None:
    """By name, and by Dynamo's own field."""
    close = tokenizer.token_to_id("</think>")
    options: dict[str, Any] = {"prompt": "Hello<think>", "max_tokens": 24, "stream": stream, "ignore_eos": True}
    assert close not in complete(served[0], **options).token_ids
    named = complete(served[0], processor("thinking_budget", tokens=3), **options)
    assert named.token_ids.index(close) == 3
    assert len(named.token_ids) == 24
    field = complete(served[0], nvext={"max_thinking_tokens": 3}, **options)
    assert field.token_ids == named.token_ids


def test_a_scope(served: Shared) -> None:
    """The grammar begins after the thinking, which the budget closes."""
    answer = processor("choice", choices=["yes", "no"], scope="answer")
    budget = processor("thinking_budget", tokens=4)
    reply = complete(served[0], budget, answer, prompt="Hello<think>", max_tokens=24)
    thinking, tag, text = reply.content.partition("</think>")
    assert thinking
    assert tag
    assert text in ("yes", "no")
    assert reply.finish_reason == "stop"


def test_the_stock_openai_client(served: Shared) -> None:
    client = served[0].client()
    messages: Any = [{"role": "user", "content": "Is water wet?"}]
    body = logits_processors(processor("choice", choices=["yes", "no"]), receipt=True)
    answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
    assert answer.choices[0].message.content in ("yes", "no")
    extra: Any = answer.model_extra
    assert extra["nvext"]["engine_data"]["logits_processors"]["processors"][0]["name"] == "choice"
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True, extra_body=body)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content


def test_completions(served: Shared) -> None:
    body = {"prompt": "Once", "max_tokens": 16, **logits_processors(processor("forced_sequence", text="Hello world!"))}
    assert send(served[0], "completions", body).content == "Hello world!"
    assert send(served[0], "completions", {**body, "stream": True}).content == "Hello world!"


# The header


def test_the_header(served: Shared) -> None:
    value = selection(processor("forced_sequence", text="Grüße!"), receipt=True)
    reply = chat(served[0], headers={HEADER: value}, nvext={"extra_fields": ["engine_data"]})
    assert reply.content == "Grüße!"
    assert reply.receipts[-1] is not None
    assert reply.receipts[-1]["processors"][0]["name"] == "forced_sequence"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "logits_processors: expected a JSON object"),
        ("[]", "logits_processors: expected a JSON object"),
        ('{"version": 2}', "logits_processors.version: expected 1, got 2"),
        (selection(processor("top_k", k=-2)), "logits_processors.processors[0].args.k: input should be greater"),
    ],
)
def test_a_bad_header_is_refused(served: Shared, value: str, problem: str) -> None:
    check_refused(chat(served[0], headers={HEADER: value}), problem)


def test_both_channels_are_refused(served: Shared) -> None:
    forced = processor("forced_sequence", text="Hi")
    reply = chat(served[0], forced, headers={HEADER: selection(forced)})
    check_refused(reply, "logits_processors: processors are selected more than once; give one annotation or one header")


def test_a_header_too_large_is_refused_by_the_frontend(served: Shared) -> None:
    assert chat(served[0], headers={HEADER: "x" * 70_000}).status == 431


def test_what_the_frontend_does_to_headers(served: Shared) -> None:
    """It drops a value that is not ASCII, and all but the first of several: nobody behind it can
    tell.
    """
    plain = chat(served[0])
    value = selection(processor("forced_sequence", text="Hi")).replace("Hi", "é").encode()
    assert chat(served[0], headers={HEADER: value}).content == plain.content
    both = [(HEADER, selection(processor("forced_sequence", text=text))) for text in ("one", "two")]
    assert chat(served[0], headers=both).content == "one"


# OpenAI's logit_bias, and Dynamo's own fields


def test_openai_logit_bias(served: Shared) -> None:
    """The frontend drops the field itself; the client's helper makes it a processor."""
    assert chat(served[0], logit_bias={str(LETTER_A): 100}).content == chat(served[0]).content
    assert chat(served[0], from_openai_logit_bias({LETTER_A: 100})).content == "A" * 16


GUIDES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "guided_choice": ({"guided_choice": ["certainly", "never"]}, lambda text: text in ("certainly", "never")),
    "guided_regex": ({"guided_regex": "[ab]{3}c"}, lambda text: re.fullmatch("[ab]{3}c", text) is not None),
    "guided_grammar": ({"guided_grammar": 'start: "one" | "two"'}, lambda text: text in ("one", "two")),
    "guided_json": ({"guided_json": PERSON}, lambda text: set(json.loads(text)) == {"name", "ok"}),
    "guided_json as text": (
        {"guided_json": json.dumps(PERSON)},
        lambda text: set(json.loads(text)) == {"name", "ok"},
    ),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        lambda text: set(json.loads(text)) == {"name", "ok"},
    ),
}


@pytest.mark.parametrize("name", GUIDES)
def test_dynamos_own_guides(served: Shared, name: str) -> None:
    fields, holds = GUIDES[name]
    for stream in (False, True):
        reply = chat(served[0], stream=stream, max_tokens=60, **fields)
        assert reply.status == 200, reply.text
        assert holds(reply.content), reply.content
        assert reply.finish_reason == "stop"
    with pytest.raises((AssertionError, ValueError)):
        assert holds(chat(served[0], max_tokens=60).content)


def test_response_format_json_object(served: Shared) -> None:
    """Any JSON object; one that the model does not end is still the beginning of one."""
    reply = chat(served[0], response_format={"type": "json_object"})
    assert reply.status == 200, reply.text
    assert reply.content.startswith("{")


def test_dynamos_own_tokens(served: Shared, ends: list[int]) -> None:
    stack = served[0]
    allowed = {"allowed_token_ids": [LETTER_A, LETTER_B], "min_tokens": 9, "temperature": 1.0, "seed": 3}
    reply = chat(stack, **allowed)
    assert set(reply.token_ids) == {LETTER_A, LETTER_B}
    assert len(reply.token_ids) >= 9
    greedy = chat(stack).token_ids
    without = chat(stack, bad_words_token_ids=[[greedy[0]], greedy[2:4]]).token_ids
    assert greedy[0] not in without
    assert all(without[i : i + 2] != greedy[2:4] for i in range(len(without)))
    eager = chat(stack, processor("logit_bias", bias={str(ends[0]): 100}), min_tokens=5)
    assert len(eager.token_ids) == 5


PENALTIES = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 2.0},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_dynamos_own_penalties(served: Shared, name: str) -> None:
    """With five tokens to choose from, a penalty makes the most frequent one rarer."""
    few = {"allowed_token_ids": list(range(LETTER_A, LETTER_A + 5)), "min_tokens": 60, "max_tokens": 60}
    plain = Counter(chat(served[0], **few).token_ids)
    penalised = Counter(chat(served[0], **few, **PENALTIES[name]).token_ids)
    assert penalised.total() == plain.total() == 60
    assert penalised != plain
    if name == "frequency_penalty":
        assert max(penalised.values()) < max(plain.values())


def test_a_field_and_its_processor_are_refused_together(served: Shared) -> None:
    reply = chat(served[0], processor("choice", choices=["a"]), guided_choice=["b"])
    check_refused(reply, "sampling_options.guided_decoding: is set, and the processor choice is named too")
    reply = chat(served[0], processor("min_tokens", n=2), min_tokens=3)
    check_refused(reply, "stop_conditions.min_tokens: is set, and the processor min_tokens is named too")


# Refusals


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": (
        of(processor("choise", choices=["a"])),
        'processors[0].name: unknown logits processor "choise"; did you mean choice?',
    ),
    "unknown argument": (of(processor("top_k", q=1)), "processors[0].args.q: unknown argument; known are k, scope"),
    "missing argument": (of(processor("top_k")), "processors[0].args.k: field required"),
    "bad argument": (
        of(processor("loop_stop"), processor("top_p", p=1.5)),
        "processors[1].args.p: input should be less than or equal to 1, got 1.5",
    ),
    "wrong type": (of(processor("min_tokens", n="3")), "processors[0].args.n: input should be a valid integer"),
    "token outside the vocabulary": (
        of(processor("banned_tokens", token_ids=[5000])),
        "processors[0].args.token_ids: expected token ids between 0 and ",
    ),
    "unknown scope": (
        of(processor("min_tokens", n=3, scope="answers")),
        "processors[0].args.scope: expected one of all, thinking, answer",
    ),
    "unknown key": (
        of(processor("watermark", key_id="mine")),
        "processors[0].args.key_id: the operator has no watermark key 'mine'",
    ),
    "unknown script": (of(processor("ban_scripts", scripts=["Klingon"])), "processors[0].args.scripts"),
    "broken regex": (of(processor("regex", pattern="(")), "processors[0].args.pattern"),
    "unknown field": (annotation('{"version": 1, "processor": []}'), 'unknown field "processor"; known are version'),
    "twice": (
        {"nvext": {"annotations": of()["nvext"]["annotations"] * 2}},
        "logits_processors: processors are selected more than once",
    ),
    "oversize": (annotation(" " * 70_000), "annotations: must have at most 65536 characters"),
    "too many": (of(*[processor("loop_stop")] * 17), "logits_processors.processors: expected at most 16, got 17"),
    "not JSON": (annotation('{"version": 1,}'), "logits_processors: is not JSON: "),
    "twice a key": (annotation('{"version": 1, "version": 1}'), 'the key "version" occurs twice in one object'),
    "NaN": (annotation('{"version": NaN}'), "logits_processors: NaN is not JSON"),
    "huge": (annotation('{"version": 1e999}'), "logits_processors: the number 1e999 is out of range"),
    "nested": (annotation('{"version": ' + "[" * 30_000 + "]" * 30_000 + "}"), "is nested more than 32 deep"),
    "misspelt": ({"nvext": {"annotations": ["logit_processors:{}"]}}, "annotations: 'logit_processors' is not known"),
    "old deadline form": (
        annotation('{"version": 1, "deadline": 1790000000000}'),
        "logits_processors.deadline: expected seconds since 1970, at most 8589934592",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(served: Shared, name: str) -> None:
    stack, worker = served
    fields, message = REFUSALS[name]
    before = worker.metric("dlw_requests_total", outcome="refused")
    check_refused(chat(stack, **fields), message)
    check_refused(chat(stack, stream=True, **fields), message, stream=True)
    completions = send(stack, "completions", {"prompt": "x", "max_tokens": 2, **fields})
    check_refused(completions, message, completions=True)
    assert worker.metric("dlw_requests_total", outcome="refused") == before + 3
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"


# Requests that cannot be satisfied: an error, never some other token


def test_unsatisfiable(served: Shared) -> None:
    stack, worker = served
    blamed = ("forced_prefix", "forced_sequence", "choice", "banned_tokens", "bad_words")
    before = [worker.metric("dlw_processor_unsatisfiable_total", processor=name) for name in blamed]
    banned = processor("banned_tokens", token_ids=[LETTER_A])
    rest = [[token_id] for token_id in range(500, 1000)]
    for processors, message in (
        (
            [banned, processor("forced_prefix", token_ids=[LETTER_A])],
            f"logits processor forced_prefix: forces token {LETTER_A}, which another processor forbids at position",
        ),
        (
            [processor("forced_prefix", token_ids=[LETTER_A]), processor("forced_sequence", token_ids=[LETTER_B])],
            f"forces token {LETTER_B} where forced_prefix forces {LETTER_A}",
        ),
        (
            [processor("choice", choices=["yes"]), processor("choice", choices=["no"])],
            "logits processor choice: no token is left at position",
        ),
        (
            [processor("banned_tokens", token_ids=list(range(500))), processor("bad_words", token_ids=rest)],
            "logits processor banned_tokens, bad_words: no token is left at position",
        ),
    ):
        check_failed(chat(stack, *processors), message)
        check_failed(chat(stack, *processors, stream=True), message, stream=True)
    after = [worker.metric("dlw_processor_unsatisfiable_total", processor=name) for name in blamed]
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 2, 2, 2, 2]
    late = [banned, processor("forced_sequence", token_ids=[LETTER_B, LETTER_B, LETTER_A])]
    message = f"forces token {LETTER_A}, which another processor forbids"
    check_failed(chat(stack, *late), message)
    reply = chat(stack, *late, stream=True)
    check_failed(reply, message, stream=True)
    assert set(reply.token_ids) <= {LETTER_B}


# Receipts


@pytest.mark.parametrize("level", [True, "debug"])
def test_every_chunk_has_the_receipt_so_far(served: Shared, level: Any) -> None:
    processors = [processor("forced_prefix", text="Hello"), processor("banned_tokens", token_ids=[5, 6])]
    long: dict[str, Any] = {"ignore_eos": True, "seed": 5, "max_tokens": 150}  # a busy frontend joins chunks
    reply = chat(served[0], *processors, receipt=level, stream=True, **long)
    assert len(reply.receipts) >= 2
    previous: dict[str, Any] | None = None
    for number, receipt in enumerate(reply.receipts, 1):
        assert receipt is not None
        assert [one["name"] for one in receipt["processors"]] == ["banned_tokens", "forced_prefix"]
        assert ("tokens" in receipt) == (level == "debug" and number == len(reply.receipts))
        if previous is not None:
            check_grows(previous, receipt)
        previous = receipt
    assert previous is not None
    whole = chat(served[0], *processors, receipt=level, **long)
    assert whole.receipts == [previous]
    assert len(reply.token_ids) == 150
    check_receipt(previous, reply)


def check_grows(before: dict[str, Any], after: dict[str, Any]) -> None:
    for old, new in zip(before["processors"], after["processors"], strict=True):
        assert old["steps_active"] <= new["steps_active"]
        assert old["tokens_masked"] <= new["tokens_masked"]
        assert old["tokens_forced"] <= new["tokens_forced"]
        assert old["first_position"] == new["first_position"]


def check_receipt(receipt: dict[str, Any], reply: Reply) -> None:
    banned, prefix = receipt["processors"]
    first, count = receipt["prompt_length"], len(reply.token_ids)
    assert banned["steps_active"] == count
    assert banned["tokens_masked"] == 2 * count
    assert (banned["first_position"], banned["last_position"]) == (first, first + count - 1)
    assert 0 < prefix["tokens_forced"] == prefix["steps_active"] < count
    assert receipt["mode"] == "aggregated"
    assert receipt["replayed_tokens"] == 0
    if "tokens" in receipt:
        forced = [one["token_id"] for one in receipt["tokens"] if one["did"] == "forced"]
        assert forced == reply.token_ids[: len(forced)]
        assert len(forced) == prefix["tokens_forced"]
        assert {one["processor"] for one in receipt["tokens"]} == {"banned_tokens", "forced_prefix"}


@pytest.mark.parametrize("name", ["nothing", "regex", "watermark"])
def test_an_answer_without_a_seed_is_replayed_from_its_receipt(served: Shared, name: str, tmp_path: Path) -> None:
    chosen = {
        "nothing": [],
        "regex": [processor("regex", pattern="[ab ]{5,30}c+d")],
        "watermark": [processor("watermark", key_id="house"), processor("frequency_penalty", penalty=0.7)],
    }[name]
    messages = [{"role": "user", "content": f"Say {name}, or something else"}]
    body = {"messages": messages, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    reply = chat(served[0], *chosen, receipt=True, **body)
    (tmp_path / "response.json").write_text(reply.text)
    (tmp_path / "request.json").write_text(json.dumps(body))
    files = [str(tmp_path / "response.json"), "--prompt-file", str(tmp_path / "request.json")]
    options = ["--model-path", str(served[0].model_path), "--device", "cpu", "--processor-policy"]
    policy = str(served[0].directory.parent / "policy.yaml")
    again = subprocess.run(
        [sys.executable, "-m", "worker", "replay", *files, *options, policy],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=served[0].environ,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    receipt = reply.receipts[-1]
    assert receipt is not None
    assert f"answer: {receipt['generated_tokens']} tokens, equal to those recorded" in again.stdout
    sent_back = chat(served[0], *chosen, receipt=True, seed=receipt["seed"], **body)
    assert sent_back.token_ids == reply.token_ids


def test_each_request_is_a_line_of_the_log(served: Shared) -> None:
    stack, worker = served

    def last() -> dict[str, Any]:
        lines = [line for line in worker.log.splitlines() if line.startswith('{"request_id"')]
        return dict(json.loads(lines[-1])) if lines else {"seed": None, "error": None}

    reply = chat(stack, processor("banned_tokens", token_ids=[LETTER_B]), seed=11, content="Anything but a B")
    assert reply.status == 200
    line = wait_for(lambda: (found := last())["seed"] == 11 and found, "the line")
    assert (line["model"], line["generated_tokens"], line["processors"]) == (MODEL, 16, ["banned_tokens"])
    assert (line["finish_reason"], line["error"], line["preemptions"]) == ("length", None, 0)
    assert 0 < line["time_to_first_token_s"] <= line["total_s"]
    assert "Anything" not in worker.log
    assert chat(stack, processor("banned_tokens", token_ids=[-5])).status == 400
    line = wait_for(lambda: (found := last())["error"] == "InvalidRequest" and found, "the line")
    assert line["error_field"] == "logits_processors.processors[0].args"


def test_no_receipt_unless_asked_for(served: Shared) -> None:
    body = logits_processors(processor("min_tokens", n=2), nvext={"extra_fields": ["engine_data"]})
    reply = chat(served[0], **body)
    assert reply.receipts == [None]


def test_the_example_program(served: Shared) -> None:
    """`examples/logits_processors_client.py`, whose client is the stock one."""
    root = Path(__file__).parents[2]
    program = [sys.executable, str(root / "examples" / "logits_processors_client.py"), "--url", f"{served[0].url}/v1"]
    done = subprocess.run(
        [*program, "--model", MODEL], capture_output=True, text=True, timeout=60, env=served[0].environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout
    assert "unknown logits processor" in done.stdout
    assert re.search(r"one of two words\n +answer: +(yes|no)\n", done.stdout)
