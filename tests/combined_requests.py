"""Chats and completions that combine features of requests: every pair of values of any two
features is in one of the first rows, and later rows are random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Fields = dict[str, Any]
Row = dict[str, int]
"""Number of the value of each feature."""

IDS = [300, 12, *range(100, 140), 40, 41, 77]
"""Token ids of a prompt."""

HELLO = [{"role": "user", "content": "Hello there, who are you, and what is the weather like today?"}]
ENDS = (1, 4)
"""End tokens of the tiny model."""

_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23, "DE"]}}, "required": ["a"]}
_FUNCTION = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"x": {"enum": ["D", "E"]}}, "required": ["x"]},
}
_OTHER = {"name": "g"}
_TOOLS = [{"type": "function", "function": one} for one in (_FUNCTION, _OTHER)]
_ONE = {"type": "function", "function": {"name": "f"}}
_TAG = {
    "type": "triggered_tags",
    "triggers": ["D"],
    "tags": [{"type": "tag", "begin": "D", "content": {"type": "regex", "pattern": "[x-z]{2}"}, "end": "E"}],
    "at_least_one": False,
    "stop_after_first": False,
}


def _named(*processors: tuple[str, Fields]) -> Fields:
    return {"logits_processors": {"processors": [{"name": name, "args": args} for name, args in processors]}}


def _of_selection(**options: Any) -> Fields:
    return {"logits_processors": options}


_PROCESSORS: tuple[Fields, ...] = (
    {},
    _named(("no_repeat_ngram", {"n": 2})),
    _named(("dry", {"allowed_length": 1}), ("typical_p", {"p": 0.9})),
    _named(("xtc", {"probability": 0.5, "threshold": 0.01}), ("mirostat", {"tau": 3})),
    _named(("forced_prefix", {"text": "DE D"})),
    _named(("min_tokens", {"n": 4}), ("banned_tokens", {"token_ids": [42, 43]})),
    _named(("phrase_ban", {"phrases": ["DE", "e"]})),
    _named(("sequence_bias", {"sequences": [{"token_ids": [40, 41], "bias": 20}]}), ("top_n_sigma", {"n": 2})),
    _named(("loop_stop", {"max_period": 2, "copies": 3}), ("gen_length", {"boost": 2})),
    _named(("cfg", {"scale": 1.5, "negative_prompt": "Hello"})),
    _named(("force_last_phrase", {"text": " the end"})),
    _named(("trigger_phrase", {"text": " Wait", "after_tokens": 3}), ("dynamic_temperature", {"low": 0.5, "high": 2})),
    _named(("temperature", {"value": 0.8})),
    _named(("forced_prefix", {"text": "<think>Hm"}), ("choice", {"choices": ["yes", "no"], "scope": "answer"})),
    _named(("forced_prefix", {"text": "<think>DE</think>"}), ("min_tokens", {"n": 3, "scope": "answer"})),
)

COMMON: Mapping[str, Sequence[Fields]] = {
    "length": ({"max_tokens": 14}, {"max_tokens": 1}, {"max_tokens": 40}),
    "least": ({}, {"min_tokens": 5}, {"min_tokens": 60}),
    "ends": ({}, {"ignore_eos": True}, {"stop_token_ids": [41]}, {"stop_token_ids": [4, 44]}),
    "stop": ({}, {"stop": ["DE"]}, {"stop": ["E", "DDD", "e"]}),
    "shown": ({}, {"include_stop_str_in_output": True}),
    "temperature": ({}, {"temperature": 0}, {"temperature": 0.5}, {"temperature": 1.5}),
    "truncation": ({}, {"top_k": 1}, {"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.125}, {"top_k": 50, "top_p": 0.75}),
    "seed": ({"seed": 7}, {"seed": -3}),
    "penalties": ({}, {"frequency_penalty": 1.5}, {"presence_penalty": -1.0}, {"repetition_penalty": 1.5}),
    "bias": ({}, {"logit_bias": {"40": 4, "41": 4, "42": 4}}, {"logit_bias": {"4": 4}}),
    "bad words": ({}, {"bad_words_token_ids": [[40, 41], [43]]}),
    "allowed": ({}, {"allowed_token_ids": [4, 40, 41, 42, 43, 44, 45, 46, 70, 71, 300, 301, 302]}),
    "guide": (
        {},
        {"guided_regex": "[A-F]{3,9}"},
        {"guided_choice": ["DEED", "E"]},
        {"guided_grammar": 'start: "D" | "E" start'},
        {"guided_json": _SCHEMA},
        {"structured_outputs": {"regex": "[D-F]+x"}},
    ),
    "prompt scores": ({}, {"prompt_logprobs": 0}, {"prompt_logprobs": 2}),
    "ids": ({}, {"return_token_ids": True}, {"nvext": {"extra_fields": ["completion_token_ids"]}}),
    "mode": ({}, {"logprobs_mode": "processed"}, {"logprobs_mode": "train"}),
    "n": ({}, {"n": 2}, {"n": 3}),
    "usage": (
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "thinking": ({}, {"thinking_token_budget": 2}),
    "salt": ({}, {"cache_salt": "salt"}),
    "special": ({}, {"skip_special_tokens": False}),
    "names": ({}, {"return_tokens_as_token_ids": True}),
    "processors": _PROCESSORS,
    "receipt": ({}, _of_selection(receipt=True)),
    "drafts": ({}, _of_selection(speculation=False), _of_selection(prediction="DEDE DED")),
    "order": ({}, _of_selection(order=["top_k", "temperature", "min_p"])),
    "deadline": ({}, _of_selection(deadline=2**33)),
}

OWN: Mapping[str, Mapping[str, Sequence[Fields]]] = {
    CHAT: {
        "prompt": ({"messages": HELLO}, {"prompt": IDS}, {"messages": HELLO, "nvext": {"token_data": IDS}}),
        "scores": ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}),
        "tools": (
            {},
            {"tools": _TOOLS},
            {"tools": _TOOLS, "tool_choice": "required"},
            {"tools": _TOOLS, "tool_choice": _ONE},
            {"tools": _TOOLS, "tool_choice": "none"},
            {"tools": _TOOLS, "parallel_tool_calls": False},
        ),
        "format": (
            {},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
            {"response_format": {"type": "structural_tag", "format": _TAG}},
        ),
        "prediction": ({}, {"prediction": {"type": "content", "content": "DEDEDED"}}),
    },
    COMPLETIONS: {
        "prompt": (
            {"prompt": "Hello there, and tell me about the rain, the town and the old trees near the river."},
            {"prompt": IDS},
            {"prompt": ["Hello", "there are"]},
            {"prompt": [IDS, [40, 41]]},
        ),
        "scores": ({}, {"logprobs": 0}, {"logprobs": 3}),
        "echo": ({}, {"echo": True}, {"echo": True, "max_tokens": 0}),
    },
}


def features(path: str) -> dict[str, Sequence[Fields]]:
    """The values of each feature of an endpoint."""
    return {**COMMON, **OWN[path]}


def body(path: str, row: Row) -> Fields:
    """The request with the values of a row."""
    known, made = features(path), Fields()
    for name, value in row.items():
        _merge(made, known[name][value])
    return made


def _merge(into: Fields, more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict) and name in ("logits_processors", "nvext"):
            _merge(into[name], value)
        else:
            into[name] = dict(value) if isinstance(value, Mapping) else value


def rows(path: str, number: int, seed: int = 0) -> Iterator[Row]:
    """Rows of features, each with as many new pairs of values as are easily found."""
    known, source = features(path), random.Random(f"{path}/{seed}")
    left = _pairs(known)
    for _ in range(number):
        yield _row(known, left, source)
        left = left or _pairs(known)


Pair = tuple[tuple[str, int], tuple[str, int]]


def _pairs(known: Mapping[str, Sequence[Fields]]) -> set[Pair]:
    return {
        ((one, i), (other, j))
        for one, other in itertools.combinations(known, 2)
        for i in range(len(known[one]))
        for j in range(len(known[other]))
    }


def _row(known: Mapping[str, Sequence[Fields]], left: set[Pair], source: random.Random) -> Row:
    """A row that begins with a pair of ``left``, from which its pairs are taken."""
    places = {name: place for place, name in enumerate(known)}
    row: Row = dict(source.choice(sorted(left)))

    def pair(one: tuple[str, int], other: tuple[str, int]) -> Pair:
        return (one, other) if places[one[0]] < places[other[0]] else (other, one)

    for name in source.sample(list(known), len(known)):
        if name not in row:
            values = source.sample(range(len(known[name])), len(known[name]))
            row[name] = max(values, key=lambda value: sum(pair((name, value), each) in left for each in row.items()))
    left.difference_update(itertools.starmap(pair, itertools.combinations(row.items(), 2)))
    return {name: row[name] for name in known}
