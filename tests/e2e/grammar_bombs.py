"""Generated grammars that are made to crash, hang or fill a compiler: one seed and number always
give the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from adapters.client import logits_processors, processor

Fields = dict[str, Any]
"""Fields of a request."""

PRIMES = (99999989, 99999971, 99999959, 99999941, 99999931, 99999847, 99999839, 99999827, 99999821, 99999787)


def _processor(name: str, **args: Any) -> Fields:
    return logits_processors(processor(name, **args))


def _letters(source: random.Random, count: int = 3) -> str:
    return "".join(source.choices("abcdefgh", k=count))


def _lark(source: random.Random, text: str) -> Fields:
    return {"guided_grammar": text} if source.random() < 0.5 else _processor("grammar", lark=text)


def _regex(source: random.Random, pattern: str) -> Fields:
    kind = source.randrange(3)
    if kind == 0:
        return {"guided_regex": pattern}
    if kind == 1:
        return _processor("regex", pattern=pattern)
    return {"guided_json": {"type": "string", "pattern": pattern}}


def rule_chain(source: random.Random) -> Fields:
    length, word = source.randrange(500, 5000), _letters(source)
    rules = [f'r{i}: "{word}" r{i + 1}' for i in range(length)]
    return _lark(source, "\n".join(["start: r0", *rules, f'r{length}: "x"']))


def terminal_chain(source: random.Random) -> Fields:
    length, word = source.randrange(2000, 20000), _letters(source, 1)
    terminals = [f'T{i}: "{word}" T{i + 1}' for i in range(length)]
    return _lark(source, "\n".join(["start: T0", *terminals, f'T{length}: "x"']))


def definitions_chain(source: random.Random) -> Fields:
    length, key = source.randrange(500, 5000), _letters(source)
    definitions: dict[str, Any] = {f"d{length}": {"type": "string"}}
    for i in range(length):
        below = {"$ref": f"#/$defs/d{i + 1}"}
        definitions[f"d{i}"] = {"type": "object", "properties": {key: below}, "required": [key]}
    return {"guided_json": {"$ref": "#/$defs/d0", "$defs": definitions}}


def multiple_of(source: random.Random) -> Fields:
    divisor = source.choice(PRIMES) - 2 * source.randrange(1000)
    kind = source.randrange(3)
    if kind == 0:
        return {"guided_json": {"type": "integer", "multipleOf": divisor}}
    if kind == 1:
        return {"guided_json": {"type": "number", "multipleOf": divisor / 10**4}}
    several = [{"type": "integer", "multipleOf": source.choice(PRIMES), "minimum": i} for i in range(4)]
    return {"guided_json": {"anyOf": several}}


def recursive_reference(source: random.Random) -> Fields:
    count = source.randrange(2, 40)
    definitions = {}
    for i in range(count):
        references = [{"$ref": f"#/$defs/d{source.randrange(count)}"} for _ in range(source.randrange(1, 6))]
        shape = source.choice(["anyOf", "oneOf", "allOf", "array", "object"])
        if shape == "array":
            definitions[f"d{i}"] = {"type": "array", "prefixItems": references, "items": references[0]}
        elif shape == "object":
            keys = [_letters(source) for _ in references]
            definitions[f"d{i}"] = {
                "type": "object",
                "properties": dict(zip(keys, references, strict=True)),
                "required": keys[:1],
            }
        else:
            definitions[f"d{i}"] = {shape: [*references, {"type": "null"}]}
    return {"guided_json": {"$ref": "#/$defs/d0", "$defs": definitions}}


def doubling_reference(source: random.Random) -> Fields:
    levels, width = source.randrange(10, 40), source.randrange(2, 5)
    definitions: dict[str, Any] = {f"d{levels}": {"type": "null"}}
    for level in range(levels):
        below = {"$ref": f"#/$defs/d{level + 1}"}
        keys = [f"{_letters(source)}{i}" for i in range(width)]
        definitions[f"d{level}"] = {"type": "object", "properties": dict.fromkeys(keys, below), "required": keys}
    return {"guided_json": {"$ref": "#/$defs/d0", "$defs": definitions}}


def deep(source: random.Random) -> Fields:
    depth, letter = source.randrange(20, 100), _letters(source, 1)
    if source.random() < 0.5:
        return _regex(source, "(" * depth * 20 + letter + ")" * depth * 20)
    schema: Any = {"type": "string"}
    for _ in range(min(depth, 60)):
        below = {"type": "object", "properties": {letter: schema}}
        schema = source.choice([{"type": "array", "items": schema}, below, {"anyOf": [schema]}])
    return {"guided_json": schema}


def wide(source: random.Random) -> Fields:
    count, length = source.randrange(500, 4000), source.randrange(5, 240)
    words = ["".join(source.choices("abcdefghijklmnop", k=length)) for _ in range(count)]
    kind = source.randrange(4)
    if kind == 0:
        return {"guided_choice": words}
    if kind == 1:
        return {"guided_json": {"enum": words}}
    if kind == 2:
        return {"guided_json": {"type": "object", "properties": {word: {"type": "integer"} for word in words[:1500]}}}
    return {"guided_json": {"anyOf": [{"type": "object", "properties": {word: {}}} for word in words[:1500]]}}


def ambiguous(source: random.Random) -> Fields:
    letter, count = _letters(source, 1), source.randrange(5, 60)
    kinds: list[Callable[[], Fields]] = [
        lambda: _regex(source, f"({letter}|{letter}{letter}|{letter}{{3}})*" * count + "b"),
        lambda: _regex(source, f"({letter}*)*" * count),
        lambda: _lark(source, f'start: x*\nx: "{letter}" | "{letter}{letter}" | x x'),
        lambda: _lark(source, f"start: x\nx: x x x | /{letter}+/ | y\ny: x?"),
        lambda: _lark(source, "start: " + " ".join(f"/[a-{letter}]*/" for _ in range(count))),
    ]
    return source.choice(kinds)()


def huge_counts(source: random.Random) -> Fields:
    low, high = source.randrange(1, 50), source.randrange(50, 100_000)
    letter = _letters(source, 1)
    kinds: list[Callable[[], Fields]] = [
        lambda: _regex(source, f"{letter}{{{low},{high}}}"),
        lambda: _regex(source, f"(({letter}{{1,{low}}}){{1,{low}}}){{1,{low}}}"),
        lambda: _regex(source, f"[a-{letter}]*{letter}[a-{letter}]{{{low}}}"),
        lambda: _regex(source, f"(.*{letter}){{{low}}}.{{{high}}}"),
        lambda: {"guided_json": {"type": "string", "minLength": low, "maxLength": high * 1000}},
        lambda: {"guided_json": {"type": "array", "items": {"enum": [letter]}, "minItems": high}},
        lambda: {"guided_json": {"type": "integer", "minimum": low, "maximum": 10 ** (high % 300)}},
        lambda: _lark(source, f'start: (x{{1,{high}}} "{letter}"){{{low}}}\nx: /[a-z]/ | "{letter}"'),
    ]
    return source.choice(kinds)()


def unicode_classes(source: random.Random) -> Fields:
    known = ["\\p{L}", "\\p{N}", "\\P{Lu}", "[^\\p{Han}]", "\\w", "[\\p{Greek}\\p{Cyrillic}]", "."]
    classes = source.choices(known, k=6)
    count = source.randrange(2, 400)
    return _regex(source, f"({'|'.join(classes)}){{{count}}}" + "".join(classes) * (count // 10))


def intersections(source: random.Random) -> Fields:
    parts = [f"/[a-h]*{_letters(source)}[a-h]{{{source.randrange(1, 40)}}}/" for _ in range(source.randrange(2, 8))]
    text = " & ".join(parts)
    return _lark(source, f"start: T\nT: {text if source.random() < 0.5 else f'~({text})'}")


KINDS: tuple[Callable[[random.Random], Fields], ...] = (
    rule_chain,
    terminal_chain,
    definitions_chain,
    multiple_of,
    recursive_reference,
    doubling_reference,
    deep,
    wide,
    ambiguous,
    huge_counts,
    unicode_classes,
    intersections,
)


def bomb(seed: int, number: int) -> Fields:
    """Fields of request ``number`` of the series ``seed``; every kind has its turn."""
    source = random.Random(f"{seed}/{number}")
    return KINDS[number % len(KINDS)](source)
