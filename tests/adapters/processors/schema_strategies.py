"""Random JSON Schemas, and values that they are likely to tell apart."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

KEYS = ("a", "b", "c", "x-1", 'q"')
TEXTS = ("", "a", "b", "ab", "abc", "x-1", 'q"\n', "é")
BIG = 2**53 + 1
NUMBERS = (-3, -1, 0, 1, 2, 3, 5, BIG, BIG - 1, -BIG, 2**63, 10**20, 0.5, 1.5, -0.25, 1.0, 3.0)
PATTERNS = ("^a", "b$", "^ab?c*$", "^[a-b]{1,2}$", "a|b", "^x-[0-9]+$", "^(a|b)$", "^[^a]*$")

scalars = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)),
    max_leaves=5,
)
small_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(KEYS), inner, max_size=2)),
    max_leaves=3,
)
sizes = st.integers(0, 3)
types = st.sampled_from(("null", "boolean", "integer", "number", "string", "array", "object"))
names = st.lists(st.sampled_from(KEYS), max_size=2, unique=True)

_LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "type": st.one_of(types, st.lists(types, min_size=1, max_size=3, unique=True)),
    "const": small_values,
    "enum": st.lists(small_values, min_size=1, max_size=4),
    "minimum": st.sampled_from(NUMBERS),
    "maximum": st.sampled_from(NUMBERS),
    "exclusiveMinimum": st.sampled_from(NUMBERS),
    "exclusiveMaximum": st.sampled_from(NUMBERS),
    "multipleOf": st.sampled_from((1, 2, 3, 0.5, 0.25, 10)),
    "minLength": sizes,
    "maxLength": sizes,
    "pattern": st.sampled_from(PATTERNS),
    "minItems": sizes,
    "maxItems": sizes,
    "uniqueItems": st.booleans(),
    "required": names,
    "minProperties": st.integers(0, 2),
    "maxProperties": sizes,
    "dependentRequired": st.dictionaries(st.sampled_from(KEYS), names, max_size=2),
    "$ref": st.sampled_from(("#/$defs/one", "#/$defs/two", "#/$defs/q%22~1", "#two")),
}


def _keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    members = st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    some = st.lists(inner, min_size=1, max_size=3)
    return {
        **_LEAVES,
        "properties": members,
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "prefixItems": some,
        "items": inner,
        "contains": inner,
        "minContains": st.integers(0, 2),
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentSchemas": st.dictionaries(st.sampled_from(KEYS), inner, max_size=2),
        "dependencies": st.dictionaries(st.sampled_from(KEYS), st.one_of(names, inner), max_size=2),
        "unevaluatedProperties": inner,
    }


_RELATED = (
    ("properties", "required", "additionalProperties"),
    ("properties", "type", "required"),
    ("properties", "patternProperties", "additionalProperties"),
    ("properties", "minProperties", "additionalProperties"),
    ("type", "minimum", "maximum"),
    ("type", "exclusiveMinimum", "multipleOf"),
    ("type", "pattern", "maxLength"),
    ("type", "items", "minItems", "maxItems"),
    ("prefixItems", "items", "contains"),
    ("if", "then", "else"),
    ("oneOf", "type"),
    ("oneOf", "properties"),
    ("properties", "allOf", "unevaluatedProperties"),
    ("enum", "uniqueItems", "type"),
)
"""Keywords that are there together more often than by chance."""


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    known = _keywords(inner)
    if draw(st.booleans()):
        chosen = list(draw(st.sampled_from(_RELATED)))
    else:
        chosen = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=3, unique=True))
    return {keyword: draw(known[keyword]) for keyword in draw(st.permutations(chosen))}


def _leaf() -> st.SearchStrategy[Any]:
    one = [st.fixed_dictionaries({keyword: strategy}) for keyword, strategy in _LEAVES.items()]
    return st.one_of(st.booleans(), *one)


_parts = st.recursive(_leaf(), lambda inner: _objects(inner), max_leaves=5)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """A document whose references lead somewhere."""
    root = draw(_objects(_parts))
    one, two = draw(_parts), draw(_parts)
    two = {**two, "$anchor": "two"} if isinstance(two, dict) else {"$anchor": "two"}
    return {**root, "$defs": {"one": one, "two": two, 'q"/': draw(_leaf())}}
