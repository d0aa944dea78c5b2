"""Arguments generated from a JSON Schema: Hypothesis strategies from bounds and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapters.testing.schemas import Schema, branches, high_of, low_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    Strategy = SearchStrategy[Any]

_SPREAD = 48
"""Range above the lower bound from which integers mostly come.

A limit of 2**31 - 1 says little about usual values.
"""

_MAX_ITEMS, _MAX_DEPTH = 4, 5
_WORDS = ("the", " fox", "Yes", "no", ".", "a b", "über", "1")


def valid(root: Schema, examples: Sequence[Mapping[str, Any]]) -> Strategy:
    """Arguments that the schema allows; with examples, mostly one of them slightly varied."""
    from hypothesis import strategies as st

    made_up = _object(root, root, 0)
    if not examples:
        return made_up
    return st.one_of(*(_varied(root, example) for example in examples), made_up)


def junk(root: Schema) -> Strategy:
    """Objects of arbitrary JSON data under the schema's names."""
    from hypothesis import strategies as st

    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
    data = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    )
    names = list(root.get("properties", {}))
    return st.fixed_dictionaries({}, optional=dict.fromkeys([*names, "no_such_argument"], data))


def each(strategy: Strategy, count: int, take: Callable[[Any], object]) -> None:
    """Call ``take`` with ``count`` values, the same every time; the smallest failing one last."""
    from hypothesis import HealthCheck, Phase, given, settings

    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    quiet = list(HealthCheck)

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=quiet,
        phases=phases,
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(strategy)
    def run(value: Any) -> None:
        take(value)

    run()


def _varied(root: Schema, example: Mapping[str, Any]) -> Strategy:
    from hypothesis import strategies as st

    fields = {name: _value(schema, root, 1) for name, schema in root.get("properties", {}).items()}
    kept = {name: st.just(value) for name, value in example.items()}
    kept = {name: one | fields[name] if name in fields else one for name, one in kept.items()}
    return st.fixed_dictionaries(kept, optional={name: s for name, s in fields.items() if name not in example})


def _value(schema: Schema, root: Schema, depth: int) -> Strategy:
    from hypothesis import strategies as st

    options = [_branch(branch, root, depth) for branch in branches(schema, root)]
    examples = schema.get("examples", ())
    return st.one_of(*([st.sampled_from(list(examples))] if examples else []), *options)


def _branch(branch: Schema, root: Schema, depth: int) -> Strategy:
    from hypothesis import strategies as st

    if "const" in branch:
        return st.just(branch["const"])
    if "enum" in branch:
        return st.sampled_from(list(branch["enum"]))
    kind = branch.get("type")
    if kind == "array" and depth < _MAX_DEPTH:
        return _array(branch, root, depth)
    if kind == "object" and depth < _MAX_DEPTH:
        return _object(branch, root, depth)
    made: dict[str | None, Callable[[], Strategy]] = {
        "null": st.none,
        "boolean": st.booleans,
        "integer": lambda: _integers(branch),
        "number": lambda: _floats(branch),
        "string": lambda: _texts(branch),
        "array": lambda: st.just([]),
        "object": lambda: st.just({}),
    }
    return made.get(kind, lambda: st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.sampled_from(_WORDS)))()


def _integers(branch: Schema) -> Strategy:
    from hypothesis import strategies as st

    low = int(low_of(branch) or 0) + ("exclusiveMinimum" in branch)
    high = high_of(branch)
    top = low + _SPREAD if high is None else int(high) - ("exclusiveMaximum" in branch)
    return st.integers(low, min(top, low + _SPREAD)) | st.sampled_from([low, top])


def _floats(branch: Schema) -> Strategy:
    from hypothesis import strategies as st

    low, high = low_of(branch), high_of(branch)
    return st.floats(
        min_value=low,
        max_value=high,
        exclude_min="exclusiveMinimum" in branch,
        exclude_max="exclusiveMaximum" in branch,
        allow_nan=False,
        allow_infinity=False,
        allow_subnormal=False,
    )


def _texts(branch: Schema) -> Strategy:
    from hypothesis import strategies as st

    if "pattern" in branch:
        return st.from_regex(branch["pattern"], fullmatch=True)
    least = branch.get("minLength", 0)
    most = min(branch.get("maxLength", least + 8), least + 8)
    words = [word for word in _WORDS if least <= len(word) <= most]
    letters = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=least, max_size=most)
    return letters | st.sampled_from(words) if words else letters


def _array(branch: Schema, root: Schema, depth: int) -> Strategy:
    from hypothesis import strategies as st

    least = branch.get("minItems", 0)
    most = max(least, min(branch.get("maxItems", _MAX_ITEMS), _MAX_ITEMS))
    unique = bool(branch.get("uniqueItems"))
    return st.lists(_value(branch.get("items", {}), root, depth + 1), min_size=least, max_size=most, unique=unique)


def _object(branch: Schema, root: Schema, depth: int) -> Strategy:
    from hypothesis import strategies as st

    properties: Mapping[str, Schema] = branch.get("properties", {})
    required = set(branch.get("required", ()))
    fields = {name: _value(schema, root, depth + 1) for name, schema in properties.items()}
    others = branch.get("additionalProperties")
    if not fields and others not in (None, False):
        least = branch.get("minProperties", 0)
        values = _value(others if isinstance(others, Mapping) else {}, root, depth + 1)
        keys = st.integers(0, 99).map(str) | st.sampled_from(_WORDS)
        return st.dictionaries(keys, values, min_size=least, max_size=max(least, _MAX_ITEMS))
    return st.fixed_dictionaries(
        {name: strategy for name, strategy in fields.items() if name in required},
        optional={name: strategy for name, strategy in fields.items() if name not in required},
    )
