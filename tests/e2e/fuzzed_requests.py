"""Made-up requests for the fuzz test: the same number gives the same request, and most say what
must come of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from e2e_stack import MODEL

from adapters.catalog import Catalog
from adapters.client import ANNOTATION, HEADER
from adapters.testing.schemas import branches

Fate = Literal["refused", "served", "either"]

CATALOG = Catalog.default()
SCHEMAS = {entry.name: entry.args_schema() for entry in CATALOG.entries}
WORDS = ["yes", "no", " the", "fox", "é", "日本", "\n", "", "a" * 300, "Han", "Latin", "<think>", "0", "🙂", "house"]


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        kind: Which generator made it.
        fate: What must come of it; ``either``: served or refused, as it happens to be well-formed.
        body: JSON text of the request, which may be none.
    """

    kind: str
    fate: Fate
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


Made = tuple[Fate, dict[str, Any]]
"""Fate and fields of the body; a field ``header`` is the header."""


def annotated(text: str) -> dict[str, Any]:
    return {"nvext": {"annotations": [ANNOTATION + text]}}


def selection(*processors: Any, **rest: Any) -> str:
    return json.dumps({"version": 1, "processors": list(processors), **rest})


def entry(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


def some(source: random.Random) -> Any:
    """Arbitrary JSON data, a few levels deep."""
    leaves: list[Callable[[], Any]] = [
        lambda: None,
        lambda: source.random() < 0.5,
        lambda: source.randrange(-5, 5),
        lambda: source.choice([2**31, 2**53, 2**63, -(2**63), 10**19]),
        lambda: source.uniform(-1e3, 1e3),
        lambda: source.choice(WORDS),
    ]
    kind = source.randrange(len(leaves) + 2)
    if kind < len(leaves):
        return leaves[kind]()
    if kind == len(leaves):
        return [some(source) for _ in range(source.randrange(3))]
    return {source.choice(WORDS): some(source) for _ in range(source.randrange(3))}


def fitting(schema: Mapping[str, Any], root: Mapping[str, Any], source: random.Random) -> Any:
    """A value that ``schema`` allows, as far as its bounds are plain."""
    branch = source.choice(branches(schema, root))
    if "enum" in branch:
        return source.choice(list(branch["enum"]))
    low = branch.get("minimum", branch.get("exclusiveMinimum", 0))
    high = branch.get("maximum", branch.get("exclusiveMaximum", 100))
    match branch.get("type"):
        case "integer":
            return source.choice([low, high, source.randrange(int(low), min(int(low) + 50, int(high)) + 1)])
        case "number":
            return source.choice([low, high, source.uniform(low, high)])
        case "boolean":
            return source.random() < 0.5
        case "null":
            return None
        case "array":
            least = branch.get("minItems", 0)
            most = min(branch.get("maxItems", 4), least + 4)
            return [fitting(branch.get("items", {}), root, source) for _ in range(source.randint(least, most))]
        case "string":
            return source.choice([word for word in WORDS if len(word) >= branch.get("minLength", 0)])
        case "object" if "properties" not in branch:
            inner = branch.get("additionalProperties", {})
            values = [fitting(inner if isinstance(inner, dict) else {}, root, source) for _ in range(3)]
            return {str(source.randrange(1100)): value for value in values}
    return some(source)


def named(source: random.Random) -> dict[str, Any]:
    """A processor of the catalogue with arguments within its bounds."""
    name = source.choice(CATALOG.names)
    schema = SCHEMAS[name]
    required = set(schema.get("required", ()))
    args = {
        key: fitting(value, schema, source)
        for key, value in schema["properties"].items()
        if key in required or source.random() < 0.3
    }
    return entry(name, **args)


GOOD = [
    entry("min_tokens", n=1),
    entry("banned_tokens", token_ids=[40, 41]),
    entry("logit_bias", bias={"40": 3.5}),
    entry("choice", choices=["yes", "no"]),
    entry("regex", pattern="[a-z]+ [0-9]{2}"),
    entry("top_p", p=0.5),
    entry("forced_prefix", text="A"),
    entry("json_schema", schema={"type": "integer"}),
    entry("no_repeat_ngram", n=2, scope="answer"),
    entry("loop_stop"),
]


def good(source: random.Random) -> Made:
    return "served", annotated(selection(source.choice(GOOD), receipt=source.choice([True, False, "debug"])))


def cut(source: random.Random) -> Made:
    text = selection(*source.choices(GOOD, k=2))
    return "refused", annotated(text[: source.randrange(len(text))])


def mutated(source: random.Random) -> Made:
    text = list(selection(*source.choices(GOOD, k=2)))
    for _ in range(source.randrange(1, 6)):
        place = source.randrange(len(text))
        match source.randrange(3):
            case 0:
                text[place] = chr(source.choice([*range(1, 128), 0x2028, 0x1F642]))
            case 1:
                text.insert(place, source.choice('{}[]",:\\eE+-0.'))
            case _:
                del text[place]
    return "either", annotated("".join(text))


def noise(source: random.Random) -> Made:
    letters = [chr(source.choice([source.randrange(1, 128), source.randrange(0xA0, 0xD7FF)])) for _ in range(40)]
    return "refused", annotated("".join(letters))


def deep(source: random.Random) -> Made:
    depth = source.choice([33, 40, 400, 5000, 15_000])
    opening, closing = source.choice([("[", "]"), ('{"a":', "}")])
    data = opening * depth + "1" + closing * depth
    where = source.choice(
        ['{"version":1,"processors":[{"name":"json_schema","args":{"schema":%s}}]}', '{"version":%s}']
    )
    return "refused", annotated(where.replace("%s", data))


def numbers(source: random.Random) -> Made:
    digits = source.choice([20, 60, 400, 5000, 60_000])
    number = source.choice(["9" * digits, "-" + "9" * digits, "1e400", "-1e999", "NaN", "Infinity", "-Infinity"])
    name, argument = source.choice([("min_tokens", "n"), ("top_p", "p"), ("temperature", "value"), ("top_k", "k")])
    return "refused", annotated(f'{{"version":1,"processors":[{{"name":"{name}","args":{{"{argument}":{number}}}}}]}}')


def twice(source: random.Random) -> Made:
    text = source.choice(
        [
            '{"version":1,"version":1}',
            '{"version":1,"processors":[{"name":"top_k","name":"top_k","args":{"k":1}}]}',
            '{"version":1,"processors":[{"name":"top_k","args":{"k":1,"k":2}}]}',
            '{"version":1,"processors":[{"name":"logit_bias","args":{"bias":{"4":1,"4":2}}}]}',
        ]
    )
    return "refused", annotated(text)


def large(source: random.Random) -> Made:
    size = source.choice([66_000, 200_000, 1_000_000, 5_000_000])
    return "refused", annotated(selection(entry("forced_sequence", text="a" * size)))


def long_text(source: random.Random) -> Made:
    name, argument = source.choice(
        [("forced_sequence", "text"), ("force_last_phrase", "text"), ("watermark", "key_id")]
    )
    return "refused", annotated(
        selection(entry(name, **{argument: source.choice("aé ") * source.randrange(4097, 20_000)}))
    )


def odd_letters(source: random.Random) -> Made:
    odd = source.choice([r"\u0000", r"\ud800", r"\udfff x", r"\ud83d", "\x00", "\x1f"])
    return "refused", annotated(
        '{"version":1,"processors":[{"name":"forced_sequence","args":{"text":"a' + odd + 'b"}}]}'
    )


def unknown(source: random.Random) -> Made:
    name = source.choice(
        ["", "top_kk", "os:system", "__class__", "../etc", "TOP_K", "a" * 65, "acme/none", "é", "top k"]
    )
    return "refused", annotated(selection(entry(name)))


def junk_arguments(source: random.Random) -> Made:
    name = source.choice(CATALOG.names)
    args = {key: some(source) for key in SCHEMAS[name]["properties"] if source.random() < 0.7}
    if source.random() < 0.3:
        return "refused", annotated(selection(entry(name, **args, no_such_argument=1)))
    return "either", annotated(selection(entry(name, **args)))


def fitting_arguments(source: random.Random) -> Made:
    return "either", annotated(selection(named(source), receipt=True))


def many(source: random.Random) -> Made:
    count = source.choice([2, 5, 9, 16])
    return "either", annotated(selection(*[named(source) for _ in range(count)]))


def too_many(source: random.Random) -> Made:
    return "refused", annotated(selection(*source.choices(GOOD, k=source.choice([17, 100, 900]))))


def both(source: random.Random) -> Made:
    text = selection(source.choice(GOOD))
    if source.random() < 0.5:
        return "refused", {**annotated(text), "header": text.encode()}
    return "refused", {"nvext": {"annotations": [ANNOTATION + text, ANNOTATION + text]}}


def header(source: random.Random) -> Made:
    text = selection(source.choice(GOOD), receipt=True)
    match source.randrange(4):
        case 0:
            return "served", {"header": text.encode()}
        case 1:
            return "refused", {"header": text[: source.randrange(1, len(text))].strip().encode()}
        case 2:
            return "refused", {"header": bytes(source.choices(range(33, 127), k=source.randrange(1, 200)))}
        case _:
            return "served", {"header": b"\xff" + text.encode()}  # the frontend drops what is not ASCII


def envelope(source: random.Random) -> Made:
    rest = source.choice(
        [
            {"version": source.choice([0, 2, 1.0, "1", True, None])},
            {"version": 1, "receipt": source.choice([1, "true", "yes", [], {}])},
            {"version": 1, "deadline": source.choice([0, -1, 2**34, "1", True, [], 1e300])},
            {"version": 1, "processors": source.choice([1, {}, "x", [1], [None], [[]], [{}], [{"name": 1}]])},
            {"version": 1, "code": "import os"},
            {},
        ]
    )
    return "refused", annotated(json.dumps(rest))


def others(source: random.Random) -> Made:
    if source.random() < 0.5:
        name = source.choice(["logit_processors", "LogitsProcessor", "logits-processors", "processor"])
        return "refused", {"nvext": {"annotations": [f"{name}:{{}}"]}}
    return "served", {"nvext": {"annotations": [source.choice(["mine:1", "formatted_prompt", "x" * 1000, ""])]}}


def own_fields(source: random.Random) -> Made:
    """Dynamo's fields; what is of the wrong type never passes the frontend."""
    ids = [source.choice([-1, 0, 40, 41, 999, 5000, 2**31, 2**40]) for _ in range(source.randrange(4))]
    fields = source.choice(
        [
            {"guided_json": source.choice([some(source), {"type": source.choice(WORDS)}, {"enum": WORDS}, True])},
            {"guided_regex": "".join(source.choices("ab()[]{}|*+?\\.^$0123,-", k=source.randrange(1, 30)))},
            {"guided_choice": source.choices(WORDS, k=source.randrange(4))},
            {"guided_grammar": "start: " + "".join(source.choices('ab"|()*+?/\\ \n:', k=source.randrange(1, 30)))},
            {"allowed_token_ids": ids},
            {"bad_words_token_ids": [ids, ids]},
            {"nvext": {"max_thinking_tokens": source.choice([-1, 0, 1, 2**31, 2**40])}},
            {"min_tokens": source.choice([-1, 0, 1, 2**31, 2**40]), "presence_penalty": source.uniform(-4, 4)},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": some(source)}}},
            {"logit_bias": {"40": source.choice([100, -100, 1e9])}, "seed": source.choice([-1, 0, 2**62])},
        ]
    )
    return "either", fields


def grammars(source: random.Random) -> Made:
    text = "".join(source.choices("abc(){}[]|*+?,0123456789\\.", k=source.randrange(1, 60)))
    bomb = source.choice(["((a{1,90}){1,90}){1,90}", "(a|aa)*" * 30, "(" * 600 + "a" + ")" * 600, "[^a]{5000}"])
    name, argument, value = source.choice(
        [
            ("regex", "pattern", text),
            ("regex", "pattern", bomb),
            ("grammar", "lark", "start: " + text),
            ("grammar", "lark", f"start: a\na: a a | /{source.choice('ab.')}/ | b\nb: a?"),
            ("json_schema", "schema", {"type": "string", "pattern": source.choice([text, bomb])}),
            ("json_schema", "schema", {"$ref": source.choice(["#", "#/a", "http://x/y", ""])}),
            ("json_schema", "schema", {"anyOf": [{"const": i} for i in range(source.randrange(800))]}),
            ("choice", "choices", [str(i) for i in range(source.randrange(3000))]),
        ]
    )
    return "either", annotated(selection(entry(name, **{argument: value})))


KINDS: list[Callable[[random.Random], Made]] = [
    good,
    cut,
    mutated,
    noise,
    deep,
    numbers,
    twice,
    large,
    long_text,
    odd_letters,
    unknown,
    junk_arguments,
    fitting_arguments,
    many,
    too_many,
    both,
    header,
    envelope,
    others,
    own_fields,
    grammars,
]


def case(seed: int, number: int) -> Case:
    """Request ``number`` of the series ``seed``; every kind has its turn."""
    source = random.Random(f"{seed}/{number}")
    make = KINDS[number % len(KINDS)]
    fate, fields = make(source)
    headers = [(HEADER.encode(), fields.pop("header"))] if "header" in fields else []
    messages = [{"role": "user", "content": source.choice(["Hello", "<think>", "a b c " * 20])}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **fields})
    if source.random() < 0.02:
        fate, body = "refused", body[: source.randrange(len(body))]
    return Case(make.__name__, fate, body.encode(), headers)
