"""Keywords of JSON Schema as shapes: what each of them allows, and what it rules out.

Keywords of all drafts hold, whatever ``$schema`` says. Annotations and unknown keywords mean
nothing (JSON Schema, core, section 6.5); one that cannot be enforced is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, NoReturn

from adapters.grammars.json_schema.decimals import Bound, Numbers, complements, exact, single, without
from adapters.grammars.json_schema.decimals import meet as meet_numbers
from adapters.grammars.json_schema.documents import Document, inside, shown
from adapters.grammars.json_schema.ecma import PatternError, searched
from adapters.grammars.json_schema.formats import format_language
from adapters.grammars.json_schema.patterns import (
    ANYTHING,
    NOTHING,
    Language,
    TooComplex,
    alt,
    both,
    complement,
    is_empty,
    matches,
    of_length,
)
from adapters.grammars.json_schema.patterns import text as text_language
from adapters.grammars.json_schema.shapes import (
    FALSE,
    TOP,
    TRUE,
    Booleans,
    Goal,
    Items,
    Literal,
    Members,
    Null,
    Others,
    SchemaRefused,
    Shape,
    Shapes,
    Texts,
    instead,
    is_top,
    joined,
    union,
)

MAX_WORK = 200_000
"""Intersections of two shapes, values or members, for one document: about a second."""

_VALUE_WORK = 5
"""Of a value that is no text, or is excluded."""

MAX_SHAPES = 2_000
"""Shapes of one schema."""

_PROOF_DEPTH = 4
"""Levels of values inside values that a proof looks at, that nothing has a goal."""

_TYPES: Mapping[str, Shapes] = {
    "null": (Null(),),
    "boolean": (Booleans(),),
    "integer": (Numbers(step=exact(1)),),
    "number": (Numbers(),),
    "string": (Texts(),),
    "array": (Items(),),
    "object": (Members(),),
}

_REFUSED = frozenset({"unevaluatedItems", "maxContains"})

Constraint = Callable[[bool], Shapes]
"""The shapes of what a keyword allows, or of what it rules out."""


class _Endless(SchemaRefused):
    """A schema whose meaning is asked for while it is being found."""


class Solver:
    """The shapes of the schemas of one document.

    Args:
        document: The document.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._found: dict[Literal, Shapes] = {}
        self._open = set[Literal]()
        self._goals: dict[Goal, Shapes] = {TRUE: TOP, FALSE: ()}
        self._proved: dict[Goal, bool] = {TRUE: False, FALSE: True}
        self._work = 0

    # --- goals

    def goal(self, schema: Any, place: str, holds: bool = True) -> Goal:
        """The goal that ``schema`` holds, or does not."""
        if schema is False:
            return FALSE if holds else TRUE
        number = self._document.number(schema, place)
        return ((number, holds),) if number else (TRUE if holds else FALSE)

    def shapes(self, goal: Goal) -> Shapes:
        """The values that meet ``goal``.

        Raises:
            SchemaRefused: a schema of it cannot be enforced.
        """
        found = self._goals.get(goal)
        if found is None:
            found = TOP
            for literal in goal:
                found = self._meet(found, self._shapes_of(literal), self._document.place(literal[0]))
            self._goals[goal] = found
        return found

    def is_impossible(self, goal: Goal, depth: int = _PROOF_DEPTH) -> bool:
        """Whether it is plain that no value meets ``goal``."""
        proved = self._proved.get(goal)
        if proved is None and depth > 0:
            try:
                proved = all(self._is_impossible_shape(shape, depth) for shape in self.shapes(goal))
            except _Endless:  # a schema that is being looked at right now
                return False
            self._proved[goal] = proved
        return bool(proved)

    def _is_impossible_shape(self, shape: Shape, depth: int) -> bool:
        if isinstance(shape, Members):
            goals = dict(shape.names)
            return any(self.is_impossible(goals.get(name, TRUE), depth - 1) for name in shape.required)
        if isinstance(shape, Items):
            return any(self.is_impossible(shape.item(index), depth - 1) for index in range(min(shape.low, 64)))
        return False

    # --- schemas

    def _shapes_of(self, literal: Literal) -> Shapes:
        found = self._found.get(literal)
        if found is not None:
            return found
        number, holds = literal
        place = self._document.place(number)
        if literal in self._open:
            raise _Endless(f"{place}: refers to itself without an end")
        self._open.add(literal)
        try:
            found = self._found[literal] = self._read(self._document.schema(number), place, holds)
        finally:
            self._open.discard(literal)
        return found

    def _read(self, schema: Any, place: str, holds: bool) -> Shapes:
        constraints = [] if schema is True else self._constraints(schema, place)
        if not holds:
            return union(shape for constraint in constraints for shape in constraint(False))
        found = TOP
        for constraint in constraints:
            found = self._meet(found, constraint(True), place)
        return found

    def _constraints(self, schema: dict[str, Any], place: str) -> Iterator[Constraint]:
        """What the keywords of a schema say, types first, the others in their order."""
        done = set[str]()
        for keyword in sorted(schema, key=lambda keyword: keyword != "type"):
            if keyword in _REFUSED:
                raise SchemaRefused(f"{inside(place, keyword)}: cannot be enforced")
            if keyword == "x-guidance" and place != "#":
                raise SchemaRefused(f"{inside(place, keyword)}: is no part of a schema inside another one")
            group = _GROUPS.get(keyword)
            if group is not None and group not in done:
                done.add(group)
                yield self._constraint(group, keyword, schema, place)

    def _constraint(self, group: str, keyword: str, schema: dict[str, Any], place: str) -> Constraint:
        method = getattr(self, f"_{group}")
        return lambda holds: method(schema, inside(place, keyword), place, holds)

    # --- intersections

    def _meet(self, left: Shapes, right: Shapes, place: str) -> Shapes:
        if left == TOP or right == TOP:
            return right if left == TOP else left
        found = list[Shape]()
        for one in left:
            for other in right:
                if type(one) is type(other):
                    self._count(place, _size_of(one) + _size_of(other))
                    both_shapes = self._meet_shapes(one, other, place)
                    if both_shapes is not None:
                        found.append(both_shapes)
        shapes = union(found)
        if len(shapes) > MAX_SHAPES:
            raise SchemaRefused(f"{place}: has more than {MAX_SHAPES} cases")
        return shapes

    def _count(self, place: str, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise SchemaRefused(f"{place}: the schema has too many cases")

    def _meet_shapes(self, left: Any, right: Any, place: str) -> Shape | None:
        if left == right or is_top(right):
            return left  # type: ignore[no-any-return]
        if is_top(left):
            return right  # type: ignore[no-any-return]
        if isinstance(left, Booleans):
            values = left.values & right.values
            return Booleans(values) if values else None
        if isinstance(left, Numbers):
            return meet_numbers(left, right)
        if isinstance(left, Texts):
            return _meet_texts(left, right, place)
        return self._meet_items(left, right) if isinstance(left, Items) else self._meet_members(left, right)

    def _meet_items(self, left: Items, right: Items) -> Items | None:
        low, high = max(left.low, right.low), _least(left.high, right.high)
        prefix = list[Goal]()
        for index in range(max(len(left.prefix), len(right.prefix))):
            goal = joined([left.item(index), right.item(index)])
            if self.is_impossible(goal):
                high = index if high is None else min(high, index)
                break
            prefix.append(goal)
        if high is not None and low > high:
            return None
        contains = tuple(dict.fromkeys([*left.contains, *right.contains]))
        rest = joined([left.rest, right.rest])
        return Items(tuple(prefix), rest, low, high, contains, left.unique or right.unique)

    def _meet_members(self, left: Members, right: Members) -> Members | None:
        theirs, names = dict(right.names), dict[str, Goal]()
        for name, goal in left.names:
            names[name] = joined([goal, theirs[name] if name in theirs else right.value(name)])
        for name, goal in right.names:
            if name not in names:
                names[name] = joined([left.value(name), goal])
        required = tuple(dict.fromkeys([*left.required, *right.required]))
        for name, goal in names.items():
            if len(goal) > 1 and self.is_impossible(goal):
                names[name] = FALSE
        if any(names.get(name) == FALSE for name in required):
            return None
        low, high = max(left.low, right.low), _least(left.high, right.high)
        if high is not None and max(low, len(required)) > high:
            return None
        return Members(
            tuple(names.items()),
            tuple(dict.fromkeys([*left.others, *right.others])),
            required,
            low,
            high,
            tuple(dict.fromkeys([*left.keys, *right.keys])),
            tuple(dict.fromkeys([*left.beyond, *right.beyond])),
        )

    def _are_disjoint(self, left: Shapes, right: Shapes) -> bool:
        """Whether it is plain that no value is in both."""
        return all(
            type(one) is not type(other) or self._is_disjoint_shape(one, other) for one in left for other in right
        )

    def _is_disjoint_shape(self, left: Shape, right: Shape) -> bool:
        if isinstance(left, Members) and isinstance(right, Members):
            mine, theirs = dict(left.names), dict(right.names)
            for name in dict.fromkeys([*left.required, *right.required]):
                goals = [shape.get(name, other.value(name)) for shape, other in ((mine, left), (theirs, right))]
                if self.is_impossible(joined(goals)):
                    return True
            return False
        met = self._meet_shapes(left, right, "#")
        return met is None or self._is_impossible_shape(met, _PROOF_DEPTH)

    # --- types and values

    def _type(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                raise SchemaRefused(f"{place}: expected the names of types, got {shown(schema['type'])}")
        found = union(shape for name in dict.fromkeys(names) for shape in _TYPES[name])
        if holds:
            return found
        kinds = {type(shape) for shape in found}
        left = tuple(shape for shape in TOP if type(shape) not in kinds)
        return (*left, Numbers(fractional=True)) if "integer" in names and "number" not in names else left

    def _const(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        return self._one_of_values([schema["const"]], place, holds)

    def _enum(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        return self._one_of_values(_list(schema["enum"], place), place, holds)

    def _one_of_values(self, values: list[Any], place: str, holds: bool) -> Shapes:
        self._count(place, sum(1 if isinstance(value, str) and holds else _VALUE_WORK for value in values))
        if holds:
            texts = tuple(dict.fromkeys(_writable(value, place) for value in values if isinstance(value, str)))
            found = [self._value(value, place) for value in values if not isinstance(value, str)]
            return union([*found, *([Texts(values=texts)] if texts else [])])
        texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
        found_shapes: Shapes = TOP
        if texts:
            found_shapes = instead([Texts(complement(alt(map(text_language, texts))))], Texts)
        for value in values:
            if not isinstance(value, str):
                found_shapes = self._meet(found_shapes, self._all_but(value, place), place)
        return found_shapes

    def _value(self, value: Any, place: str) -> Shape:
        """The shape of one value, which is no text."""
        if value is None:
            return Null()
        if isinstance(value, bool):
            return Booleans(frozenset({value}))
        if isinstance(value, list):
            goals = tuple(self._const_goal(item, place) for item in value)
            return Items(goals, FALSE, len(goals), len(goals))
        if isinstance(value, dict):
            names = tuple((_writable(name, place), self._const_goal(each, place)) for name, each in value.items())
            return Members(names, (Others((), FALSE),), tuple(value))
        return single(_number(value, place))

    def _const_goal(self, value: Any, place: str, holds: bool = True) -> Goal:
        return ((self._document.made({"const": value}, place), holds),)

    def _all_but(self, value: Any, place: str) -> Shapes:
        shape = self._value(value, place)
        found = list[Shape]()
        if isinstance(shape, Booleans):
            found = [Booleans(frozenset({not value}))]
        elif isinstance(shape, Numbers):
            found += without(Numbers(), _number(value, place))
        elif isinstance(shape, Items):
            found = [Items(high=len(value) - 1)] if value else []
            found.append(Items(low=len(value) + 1))
            for index, item in enumerate(value):
                wrong = self._const_goal(item, place, False)
                found.append(Items((*[TRUE] * index, wrong), low=index + 1))
        elif isinstance(shape, Members):
            found = [Members(beyond=(frozenset(value),))]
            for name, each in value.items():
                found.append(Members(((name, FALSE),)))
                found.append(Members(((name, self._const_goal(each, place, False)),), required=(name,)))
        return instead(found, type(shape))

    # --- numbers and texts

    def _minimum(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        is_open = schema.get("exclusiveMinimum") is True
        return _numbers(Numbers(low=Bound(_number(schema["minimum"], place), is_open)), place, holds)

    def _maximum(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        is_open = schema.get("exclusiveMaximum") is True
        return _numbers(Numbers(high=Bound(_number(schema["maximum"], place), is_open)), place, holds)

    def _exclusive_minimum(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        if isinstance(schema["exclusiveMinimum"], bool):  # draft 4: part of minimum
            return TOP if holds else ()
        return _numbers(Numbers(low=Bound(_number(schema["exclusiveMinimum"], place), True)), place, holds)

    def _exclusive_maximum(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        if isinstance(schema["exclusiveMaximum"], bool):
            return TOP if holds else ()
        return _numbers(Numbers(high=Bound(_number(schema["exclusiveMaximum"], place), True)), place, holds)

    def _multiple_of(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        step = abs(_number(schema["multipleOf"], place))
        if not step:
            raise SchemaRefused(f"{place}: expected a number above 0")
        return _numbers(Numbers(step=step), place, holds)

    def _min_length(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        low = _size(schema["minLength"], place)
        return _texts(of_length(low, None), holds) if low else (TOP if holds else ())

    def _max_length(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        return _texts(of_length(0, _size(schema["maxLength"], place)), holds)

    def _pattern(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        return _texts(_searched(schema["pattern"], place), holds)

    def _format(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return TOP if holds else ()  # formats are of texts
        language = format_language(schema["format"]) if isinstance(schema["format"], str) else None
        if language is None:
            raise SchemaRefused(f"{place}: unknown format {shown(schema['format'])}, expected a pattern")
        return _texts(language, holds)

    # --- arrays

    def _items(self, schema: dict[str, Any], _: str, place: str, holds: bool) -> Shapes:
        tuples, rest_key = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            tuples, rest_key = "items", "additionalItems"
        listed = _list(schema.get(tuples, []), inside(place, tuples))
        prefix = tuple(self.goal(item, inside(place, tuples, index)) for index, item in enumerate(listed))
        rest = self.goal(schema.get(rest_key, True), inside(place, rest_key))
        if holds:
            return instead([Items(prefix, rest)], Items)
        found = [Items((*[TRUE] * i, _denied(goal)), low=i + 1) for i, goal in enumerate(prefix) if goal != TRUE]
        if rest == FALSE:
            found.append(Items(low=len(prefix) + 1))
        elif rest != TRUE:
            if prefix:
                _cannot_deny(inside(place, rest_key))
            found.append(Items(contains=((_denied(rest), 1),)))
        return tuple(found)

    def _min_items(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        low = _size(schema["minItems"], place)
        return instead([Items(low=low)], Items) if holds else ((Items(high=low - 1),) if low else ())

    def _max_items(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        high = _size(schema["maxItems"], place)
        return instead([Items(high=high)], Items) if holds else (Items(low=high + 1),)

    def _contains(self, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
        least = _size(schema.get("minContains", 1), inside(outer, "minContains"))
        goal = self.goal(schema["contains"], place)
        if least == 0:
            return TOP if holds else ()
        if holds:
            return instead([Items(contains=((goal, least),))], Items)
        if least > 1:
            _cannot_deny(place)
        return (Items(rest=_denied(goal)),)

    def _unique_items(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        if schema["uniqueItems"] is not True:
            return TOP if holds else ()
        if not holds:
            _cannot_deny(place)
        return instead([Items(unique=True)], Items)

    # --- objects

    def _properties(self, schema: dict[str, Any], _: str, place: str, holds: bool) -> Shapes:
        named, patterns = self._named(schema, place), self._patterns(schema, place)
        rest = self.goal(schema.get("additionalProperties", True), inside(place, "additionalProperties"))
        if not holds:
            return self._wrong_member(named, patterns, rest, place)
        names = [(n, joined([goal, *(more for p, more in patterns if matches(p, n))])) for n, goal in named]
        others = (Others(patterns, rest),) if patterns or rest != TRUE else ()
        return instead([Members(tuple(names), others)], Members)

    def _named(self, schema: dict[str, Any], place: str) -> tuple[tuple[str, Goal], ...]:
        place = inside(place, "properties")
        found = _map(schema.get("properties", {}), place)
        return tuple((_writable(name, place), self.goal(each, inside(place, name))) for name, each in found.items())

    def _patterns(self, schema: dict[str, Any], place: str) -> tuple[tuple[Language, Goal], ...]:
        place = inside(place, "patternProperties")
        found = _map(schema.get("patternProperties", {}), place)
        return tuple(
            (_searched(pattern, inside(place, pattern)), self.goal(each, inside(place, pattern)))
            for pattern, each in found.items()
        )

    def _wrong_member(
        self, named: Iterable[tuple[str, Goal]], patterns: tuple[tuple[Language, Goal], ...], rest: Goal, place: str
    ) -> Shapes:
        named = tuple(named)
        found = [Members(((n, _denied(goal)),), required=(n,)) for n, goal in named if goal != TRUE]
        if any(goal != TRUE for _, goal in patterns) or (patterns and rest != TRUE) or rest not in (TRUE, FALSE):
            _cannot_deny(inside(place, "patternProperties" if patterns else "additionalProperties"))
        if rest == FALSE:
            found.append(Members(beyond=(frozenset(name for name, _ in named),)))
        return tuple(found)

    def _required(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        if isinstance(schema["required"], bool):  # draft 3, and a frequent mistake
            raise SchemaRefused(f"{place}: expected a list of names")
        names = _names(schema["required"], place)
        if holds:
            return instead([Members(required=names)], Members)
        return tuple(Members(((name, FALSE),)) for name in names)

    def _min_properties(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        low = _size(schema["minProperties"], place)
        return instead([Members(low=low)], Members) if holds else ((Members(high=low - 1),) if low else ())

    def _max_properties(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        high = _size(schema["maxProperties"], place)
        return instead([Members(high=high)], Members) if holds else (Members(low=high + 1),)

    def _property_names(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        if not holds:
            _cannot_deny(place)
        shapes = self.shapes(self.goal(schema["propertyNames"], place))
        languages = [shape.as_language() for shape in shapes if isinstance(shape, Texts)]
        keys = alt(languages)
        return TOP if keys is ANYTHING else instead([Members(keys=(keys,))], Members)

    def _dependencies(self, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
        return self._dependent(schema, "dependencies", place, outer, holds)

    def _dependent_required(self, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
        return self._dependent(schema, "dependentRequired", place, outer, holds)

    def _dependent_schemas(self, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
        return self._dependent(schema, "dependentSchemas", place, outer, holds)

    def _dependent(self, schema: dict[str, Any], keyword: str, place: str, outer: str, holds: bool) -> Shapes:
        """If there is a member, the others or the schema that it needs."""
        found = TOP if holds else ()
        for name, needed in _map(schema[keyword], place).items():
            there = (Members(required=(_writable(name, place),)),)
            if isinstance(needed, list):
                goal: Goal = ((self._document.made({"required": needed}, inside(place, name)), holds),)
            else:
                goal = self.goal(needed, inside(place, name), holds)
            needs = self._meet(there, self.shapes(goal), outer)
            if holds:
                absent = Members(((name, FALSE),))
                found = self._meet(found, instead([absent, *needs], Members), outer)
            else:
                found = union([*found, *needs])
        return found

    def _unevaluated_properties(self, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
        if not holds:
            _cannot_deny(place)
        goal = self.goal(schema["unevaluatedProperties"], place)
        if goal == TRUE:
            return TOP
        named, patterns = dict[str, Goal](), dict[Language, Goal]()
        if self._evaluates_all(schema, place, outer, named, patterns, set()):
            return TOP
        return instead([Members(tuple(named.items()), (Others(tuple(patterns.items()), goal),))], Members)

    def _evaluates_all(
        self,
        schema: Any,
        place: str,
        outer: str,
        named: dict[str, Goal],
        patterns: dict[Language, Goal],
        seen: set[int],
    ) -> bool:
        """Collect the members that a schema evaluates; whether that is all of them."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return False
        seen.add(id(schema))
        for keyword in _CONDITIONAL.intersection(schema):
            raise SchemaRefused(f"{place}: cannot be enforced beside {keyword}")
        named.update(dict.fromkeys(_map(schema.get("properties", {}), outer), TRUE))
        patterns.update(dict.fromkeys((p for p, _ in self._patterns(schema, outer)), TRUE))
        found = "additionalProperties" in schema
        inner = list(_list(schema.get("allOf", []), outer))
        if "$ref" in schema:
            inner.append(self._document.schema(self._document.target(schema, "$ref", outer)))
        for each in inner:
            found |= self._evaluates_all(each, place, outer, named, patterns, seen)
            found |= isinstance(each, dict) and "unevaluatedProperties" in each
        return found

    # --- combinations

    def _all_of(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        parts = self._parts(schema["allOf"], place)
        return self._all(parts, place, True) if holds else self._any(parts, False)

    def _any_of(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        parts = self._parts(schema["anyOf"], place)
        return self._any(parts, True) if holds else self._all(parts, place, False)

    def _parts(self, schemas: Any, place: str) -> list[int]:
        return [
            self._document.number(schema, inside(place, index)) for index, schema in enumerate(_list(schemas, place))
        ]

    def _any(self, numbers: Iterable[int], holds: bool) -> Shapes:
        return union(shape for number in numbers for shape in self._shapes_of((number, holds)))

    def _all(self, numbers: Iterable[int], place: str, holds: bool) -> Shapes:
        found = TOP
        for number in numbers:
            found = self._meet(found, self._shapes_of((number, holds)), place)
        return found

    def _one_of(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        parts = self._parts(schema["oneOf"], place)
        shapes = [self._shapes_of((number, True)) for number in parts]
        overlapping = list[tuple[int, int]]()
        for one, other in combinations(range(len(parts)), 2):
            self._count(place, len(shapes[one]) * len(shapes[other]))
            if not self._are_disjoint(shapes[one], shapes[other]):
                overlapping.append((one, other))
        if not holds:
            two = [self._meet(shapes[one], shapes[other], place) for one, other in overlapping]
            return union([*self._all(parts, place, False), *(shape for each in two for shape in each)])
        found = list[Shape]()
        for index, alone in enumerate(shapes):
            for pair in overlapping:
                if index in pair:
                    other = parts[pair[pair[0] == index]]
                    alone = self._meet(alone, self._shapes_of((other, False)), place)
            found += alone
        return union(found)

    def _not(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        number = self._document.number(schema["not"], place)
        if number == 0:
            return () if holds else TOP
        return self._shapes_of((number, not holds))

    def _if(self, schema: dict[str, Any], place: str, outer: str, holds: bool) -> Shapes:
        if "then" not in schema and "else" not in schema:
            return TOP if holds else ()
        condition = self._document.number(schema["if"], place)
        found = list[Shape]()
        for keyword, met in (("then", True), ("else", False)):
            number = self._document.number(schema.get(keyword, True), inside(outer, keyword))
            when = self._shapes_of((condition, met))
            found += self._meet(when, self._shapes_of((number, holds)), place)
        return union(found)

    def _ref(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        return self._shapes_of((self._document.target(schema, "$ref", place), holds))

    def _dynamic_ref(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        return self._shapes_of((self._document.target(schema, "$dynamicRef", place), holds))

    def _recursive_ref(self, schema: dict[str, Any], place: str, _: str, holds: bool) -> Shapes:
        return self._shapes_of((self._document.target(schema, "$recursiveRef", place), holds))


_CONDITIONAL = frozenset({"anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef"})
"""Keywords beside which other members are evaluated from value to value."""

_GROUPS = {
    "type": "type",
    "const": "const",
    "enum": "enum",
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusiveMinimum": "exclusive_minimum",
    "exclusiveMaximum": "exclusive_maximum",
    "multipleOf": "multiple_of",
    "minLength": "min_length",
    "maxLength": "max_length",
    "pattern": "pattern",
    "format": "format",
    "prefixItems": "items",
    "items": "items",
    "additionalItems": "items",
    "minItems": "min_items",
    "maxItems": "max_items",
    "contains": "contains",
    "uniqueItems": "unique_items",
    "properties": "properties",
    "patternProperties": "properties",
    "additionalProperties": "properties",
    "required": "required",
    "minProperties": "min_properties",
    "maxProperties": "max_properties",
    "propertyNames": "property_names",
    "dependencies": "dependencies",
    "dependentRequired": "dependent_required",
    "dependentSchemas": "dependent_schemas",
    "unevaluatedProperties": "unevaluated_properties",
    "allOf": "all_of",
    "anyOf": "any_of",
    "oneOf": "one_of",
    "not": "not",
    "if": "if",
    "$ref": "ref",
    "$dynamicRef": "dynamic_ref",
    "$recursiveRef": "recursive_ref",
}
"""The method of each keyword; those of one method say one thing together."""


def _size_of(shape: Shape) -> int:
    if isinstance(shape, Members):
        return 1 + len(shape.names) + len(shape.required)
    if isinstance(shape, Texts):
        return 1 + len(shape.values or ())
    return 1 + len(shape.prefix) if isinstance(shape, Items) else 1


def _meet_texts(left: Texts, right: Texts, place: str) -> Texts | None:
    listed, other = (left, right) if left.values is not None else (right, left)
    if listed.values is not None:
        known = None if other.values is None else set(other.values)
        values = tuple(v for v in listed.values if (other.holds(v) if known is None else v in known))
        return Texts(values=values) if values else None
    language = both([left.language, right.language])
    try:
        return None if is_empty(language) else Texts(language)
    except TooComplex as error:
        raise SchemaRefused(f"{place}: {error}") from None
    except RecursionError:
        raise SchemaRefused(f"{place}: is nested too deeply") from None


def _numbers(numbers: Numbers, place: str, holds: bool) -> Shapes:
    if holds:
        return instead([numbers], Numbers)
    found = complements(numbers)
    return tuple(found) if found is not None else _cannot_deny(place)


def _texts(language: Language, holds: bool) -> Shapes:
    language = language if holds else complement(language)
    found = [] if language is NOTHING else [Texts(language)]
    return instead(found, Texts) if holds else tuple(found)


def _denied(goal: Goal) -> Goal:
    """The goal of one schema, turned round."""
    if goal in (TRUE, FALSE):
        return FALSE if goal == TRUE else TRUE
    ((number, holds),) = goal
    return ((number, not holds),)


def _cannot_deny(place: str) -> NoReturn:
    raise SchemaRefused(f"{place}: cannot be enforced where it is negated (not, oneOf or if)")


def _least(left: int | None, right: int | None) -> int | None:
    return min((bound for bound in (left, right) if bound is not None), default=None)


def _searched(pattern: Any, place: str) -> Language:
    if not isinstance(pattern, str):
        raise SchemaRefused(f"{place}: expected a regular expression, got {shown(pattern)}")
    try:
        return searched(pattern)
    except PatternError as error:
        raise SchemaRefused(f"{place}: {error}") from None


def _number(value: Any, place: str) -> Any:
    try:
        return exact(value)
    except ValueError as error:
        raise SchemaRefused(f"{place}: {error}, got {shown(value)}") from None


def _size(value: Any, place: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SchemaRefused(f"{place}: expected an integer of at least 0, got {shown(value)}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaRefused(f"{place}: expected a list, got {shown(value)}")
    return value


def _map(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaRefused(f"{place}: expected an object, got {shown(value)}")
    return value


def _names(value: Any, place: str) -> tuple[str, ...]:
    for name in _list(value, place):
        if not isinstance(name, str):
            raise SchemaRefused(f"{place}: expected names, got {shown(name)}")
    return tuple(dict.fromkeys(_writable(name, place) for name in value))


def _writable(value: str, place: str) -> str:
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        raise SchemaRefused(f"{place}: half of a surrogate pair in {shown(value)}")
    return value
