"""Contents of a JSON Schema of arguments: bounds, types, and values that must be refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

HUGE = 10**30
_MAX_BUILT = 100_000
"""Longest list or text that is built to be refused."""

_WRONG: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 1,
    "number": 1.5,
    "string": "1",
    "array": [[]],
    "object": {"a": 1},
}


def resolve(schema: Schema, root: Schema) -> Schema:
    """``schema`` with a reference at its top followed."""
    while "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def branches(schema: Schema, root: Schema) -> list[Schema]:
    """The alternatives of ``schema``, itself if it has none."""
    schema = resolve(schema, root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return [leaf for branch in schema[key] for leaf in branches(branch, root)]
    if "allOf" in schema and len(schema["allOf"]) == 1:
        return branches(schema["allOf"][0], root)
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": kind} for kind in schema["type"]]
    return [schema]


def types_of(schema: Schema, root: Schema) -> set[str] | None:
    """JSON types that ``schema`` allows, None if it does not say."""
    found: set[str] = set()
    for branch in branches(schema, root):
        values = branch.get("enum", [branch["const"]] if "const" in branch else [])
        if "type" in branch:
            found.add(branch["type"])
        elif values:
            found |= {_type_of(value) for value in values}
        else:
            return None
    return found | {"integer"} if "number" in found else found


def unbounded(schema: Schema, root: Schema, path: str = "", depth: int = 0) -> Iterator[str]:
    """Paths of numbers, texts and lists without a bound, with the missing bound."""
    if depth > 8:
        return
    for branch in branches(schema, root):
        kind = branch.get("type")
        if "enum" in branch or "const" in branch:
            continue
        if kind in ("integer", "number"):
            if low_of(branch) is None:
                yield f"{path} has no lower bound"
            if high_of(branch) is None:
                yield f"{path} has no upper bound"
        elif kind == "string" and "maxLength" not in branch:
            yield f"{path} has no greatest length"
        elif kind == "array":
            if "maxItems" not in branch:
                yield f"{path} has no greatest number of items"
            yield from unbounded(branch.get("items", {}), root, f"{path}[]", depth + 1)
        elif kind == "object":
            yield from _unbounded_object(branch, root, path, depth)


def _unbounded_object(branch: Schema, root: Schema, path: str, depth: int) -> Iterator[str]:
    for name, inner in branch.get("properties", {}).items():
        yield from unbounded(inner, root, f"{path}.{name}".lstrip("."), depth + 1)
    values = branch.get("additionalProperties")
    if isinstance(values, Mapping) and values:
        if "maxProperties" not in branch:
            yield f"{path} has no greatest number of entries"
        yield from unbounded(values, root, f"{path}.*", depth + 1)


def low_of(schema: Schema) -> float | None:
    """Lower bound of a number, inclusive or not."""
    low: float | None = schema.get("minimum", schema.get("exclusiveMinimum"))
    return low


def high_of(schema: Schema) -> float | None:
    """Upper bound of a number, inclusive or not."""
    high: float | None = schema.get("maximum", schema.get("exclusiveMaximum"))
    return high


@dataclass(frozen=True, slots=True)
class Mutant:
    """Mutated arguments, probably invalid.

    Attributes:
        arguments: The arguments.
        wrong: Problem of the arguments.
        refused: True if the schema forbids them, so that they must be refused.
    """

    arguments: dict[str, Any]
    wrong: str
    refused: bool


def mutants(root: Schema, base: Mapping[str, Any]) -> Iterator[Mutant]:
    """Arguments like ``base`` with one thing wrong."""
    yield Mutant({**base, "no_such_argument": 1}, "an unknown argument", True)
    for name in root.get("required", ()):
        yield Mutant({key: value for key, value in base.items() if key != name}, f"{name} is missing", True)
    for name, schema in root.get("properties", {}).items():
        for value, wrong, refused in _wrong_values(schema, root, base.get(name)):
            yield Mutant({**base, name: value}, f"{name} {wrong}", refused)


def _wrong_values(schema: Schema, root: Schema, good: Any, depth: int = 0) -> Iterator[tuple[Any, str, bool]]:
    allowed = types_of(schema, root)
    for kind, value in _WRONG.items():
        fits = allowed is None or kind in allowed
        yield value, f"is {_shown(value)}", not fits
    numeric = allowed is not None and bool(allowed & {"integer", "number"})
    for value in (math.nan, math.inf, -math.inf):
        yield value, f"is {value}", allowed is not None
    for value in (HUGE, -HUGE):
        yield value, f"is {value:.0e}", numeric
    for value in ("", "\0", "\N{PILE OF POO}", [], {}, [None], [[[]]], {"": None}, {"-1": 1}, 1e308):
        yield value, f"is {_shown(value)}", False
    choices = branches(schema, root)
    for branch in choices:
        yield from _beyond(branch, len(choices) == 1)
        if depth < 3:
            yield from _wrong_inside(branch, root, good, depth)


def _beyond(branch: Schema, alone: bool) -> Iterator[tuple[Any, str, bool]]:
    """Just outside the bounds of one alternative."""
    if branch.get("type") in ("integer", "number"):
        for value in _outside(branch):
            yield value, f"is {value}", alone
    if branch.get("type") == "string":
        if branch.get("maxLength", _MAX_BUILT) < _MAX_BUILT:
            yield "a" * (branch["maxLength"] + 1), f"has {branch['maxLength'] + 1} characters", alone
        if branch.get("minLength", 0) > 0:
            yield "", "is empty", alone
    if branch.get("type") == "array" and branch.get("minItems", 0) > 0:
        yield [], "is empty", alone


def _outside(branch: Schema) -> Iterator[float]:
    step = 1 if branch["type"] == "integer" else 1e-3
    for sign, inclusive, exclusive in ((-1, "minimum", "exclusiveMinimum"), (1, "maximum", "exclusiveMaximum")):
        if inclusive in branch:
            yield branch[inclusive] + sign * max(step, abs(branch[inclusive]) * 1e-3 if step < 1 else 1)
        elif exclusive in branch:
            yield branch[exclusive]


def _wrong_inside(branch: Schema, root: Schema, good: Any, depth: int) -> Iterator[tuple[Any, str, bool]]:
    """One wrong item in a list, or one wrong value in an object."""
    if branch.get("type") == "array" and isinstance(good, list) and good:
        most = branch.get("maxItems", _MAX_BUILT)
        if most < _MAX_BUILT:
            yield good[:1] * (most + 1), f"has {most + 1} items", True
        for value, wrong, refused in _wrong_values(branch.get("items", {}), root, good[0], depth + 1):
            yield [value, *good[1:]], f"[0] {wrong}", refused
    if branch.get("type") == "object" and isinstance(good, Mapping) and good:
        properties, others = branch.get("properties", {}), branch.get("additionalProperties")
        for name in list(good)[:2]:
            inner = properties.get(name, others)
            if isinstance(inner, Mapping):
                for value, wrong, refused in _wrong_values(inner, root, good[name], depth + 1):
                    yield {**good, name: value}, f".{name} {wrong}", refused and bool(inner)


def _type_of(value: Any) -> str:
    for kind, sample in _WRONG.items():
        if type(value) is type(sample):
            return kind
    return "object"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:40] + "…"
