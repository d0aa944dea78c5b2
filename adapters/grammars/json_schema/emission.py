"""Grammars of JSON Schemas in llguidance's Lark dialect."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from adapters.grammars.json_schema.decimals import Numbers, digits, expression, multiples
from adapters.grammars.json_schema.distinct import Steps, TooMany, steps_of
from adapters.grammars.json_schema.documents import SchemaDocument, inside, shown
from adapters.grammars.json_schema.keywords import RULES
from adapters.grammars.json_schema.patterns import ANYTHING, Language, TooComplex, limited
from adapters.grammars.json_schema.sequences import MemberSequence, repeated
from adapters.grammars.json_schema.settled import Object, settled
from adapters.grammars.json_schema.shapes import (
    FALSE,
    TRUE,
    Booleans,
    Goal,
    Items,
    Members,
    Null,
    SchemaRefused,
    Shape,
    Texts,
    joined,
)
from adapters.grammars.json_schema.solver import Solver
from adapters.grammars.json_schema.terminals import listed_terminal, terminal

MAX_GOALS = 20_000
"""Goals of one document."""

MAX_GRAMMAR = 4 * 1024 * 1024
"""Characters of one grammar."""

MAX_WORK = 1_000_000
"""Parts of patterns that are looked at for one document: a few seconds."""

MAX_MULTIPLES = 4_096
"""Multiples that are listed."""

_EXACT = 2**53
"""Integers below it are float64's, which llguidance counts multiples with."""

_ANY = r"""
any: any_scalar | any_array | any_object
any_scalar: ANY_TEXT | ANY_OTHER
any_array: BEGIN_ARRAY (any (COMMA any)*)? END_ARRAY
any_object: BEGIN_OBJECT (ANY_TEXT COLON any (COMMA ANY_TEXT COLON any)*)? END_OBJECT
"""

_STRUCTURE = {
    "BEGIN_ARRAY": "[_",
    "BEGIN_OBJECT": "{_",
    "END_ARRAY": "_]",
    "END_OBJECT": "_}",
    "COMMA": "_,_",
    "COLON": "_:_",
}
"""Structural characters by terminal, with ``_`` where white space may be (RFC 8259, section 2).

It is a part of them, and not ignored by llguidance: what is ignored may be inside a number that is
written by two terminals, and llguidance fails where it is before a grammar within the grammar.
"""

_WHITE_SPACE = r"[\x20\x0A\x0D\x09]"

Settled = Shape | Object


def lark_grammar(schema: Any, *, compact: bool | None = None) -> str:
    """A grammar in Lark of the JSON that ``schema`` describes.

    Every value of the schema can be written, and every text of the grammar is a value of it.
    Members are written in the order of the schema.

    Args:
        schema: A JSON Schema, as Python's `json` reads it.
        compact: No white space, and an integer has no fraction; otherwise both are possible. By
            default as llguidance's ``x-guidance`` says, or not.

    Raises:
        SchemaRefused: it is malformed, no value meets it, or it cannot be enforced exactly.
    """
    try:
        with limited(MAX_WORK):
            found = _Emission(schema, _is_compact(schema, compact))
            # As llguidance's own: within another grammar there is none before the first token.
            return found.source(before=f"/{_WHITE_SPACE}+/? " if compact is False else "")
    except TooComplex as error:
        raise SchemaRefused(f"#: a pattern {error}") from None
    except RecursionError:
        raise SchemaRefused("#: is nested too deeply") from None


def _is_compact(schema: Any, wanted: bool | None) -> bool:
    """Check llguidance's options, of which none may weaken the schema."""
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if not isinstance(options, dict):
        raise SchemaRefused(f"#/x-guidance: expected an object, got {shown(options)}")
    for key, value in options.items():
        place = inside("#/x-guidance", key)
        if key in ("lenient", "coerce_one_of"):
            if value is not False:
                raise SchemaRefused(f"{place}: expected false: every keyword is enforced, or refused")
        elif key != "whitespace_flexible" or not isinstance(value, bool):
            raise SchemaRefused(f"{place}: cannot be honoured")
        elif wanted is not None and value is wanted:
            raise SchemaRefused(f"{place}: contradicts the argument compact")
    return not options.get("whitespace_flexible", True) if wanted is None else wanted


def _structure(compact: bool) -> Iterator[str]:
    """The terminals of structural characters."""
    for name, text in _STRUCTURE.items():
        space = "" if compact else f"{_WHITE_SPACE}*"
        parts = [space if char == "_" else rf"\x{{{ord(char):X}}}" for char in text]
        yield f"{name}: /{''.join(parts)}/"


class _Emission:
    def __init__(self, schema: Any, compact: bool) -> None:
        document = SchemaDocument(schema)
        declared = schema.get("$schema") if isinstance(schema, dict) else None
        self._compact = compact
        # Draft 4 knows 1.0 as no integer.
        self._with_fraction = not compact and not (isinstance(declared, str) and "draft-04" in declared)
        self._document, self._solver = document, Solver(document, RULES)
        self._root = self._solver.goal(schema, "#")
        self._settled: dict[Goal, tuple[Settled, ...]] = {}
        self._productive: set[Goal] = {TRUE}
        self._terminals: dict[str, str] = {}
        self._rules: dict[Goal, str] = {}
        self._lines: list[str] = []
        self._size = 0
        self._waiting = deque[Goal]()
        self._num_rules = 0
        self._uses_any = False

    def source(self, before: str = "") -> str:
        self._reach()
        self._prove()
        if self._root not in self._productive:
            raise SchemaRefused(f"{self._unsatisfiable()}: no JSON matches it")
        start = self._rule(self._root)
        while self._waiting:
            goal = self._waiting.popleft()
            self._line(self._rules[goal], self._options(goal))
        terminals = [f"{name}: {source}" for source, name in self._terminals.items()]
        if self._uses_any:
            number = expression(Numbers(), with_fraction=False)
            terminals += [_ANY, f"ANY_TEXT: {terminal(ANYTHING)}", f"ANY_OTHER: {number} | /true|false|null/"]
        terminals += _structure(self._compact)
        found = "\n".join([f"start: {before}{start}", *self._lines, *terminals])
        if len(found) > MAX_GRAMMAR:
            raise SchemaRefused("#: the schema is too large")
        return found

    # --- what there is

    def _reach(self) -> None:
        waiting = [self._root]
        while waiting:
            goal = waiting.pop()
            if goal in self._settled or goal in (TRUE, FALSE):
                continue
            place = self._place(goal)
            if len(self._settled) == MAX_GOALS:
                raise SchemaRefused(f"{place}: the schema has too many cases")
            shapes = tuple(each for shape in self._solver.shapes(goal) for each in settled(shape, place))
            self._settled[goal] = shapes
            waiting += [inner for shape in shapes for inner in _goals_of(shape)]

    def _place(self, goal: Goal) -> str:
        return self._document.place(goal[0][0]) if goal else "#"

    def _prove(self) -> None:
        """Find the goals that some value meets: the productive symbols of a grammar."""
        users: defaultdict[Goal, set[Goal]] = defaultdict(set)
        for goal, shapes in self._settled.items():
            for shape in shapes:
                for inner in _goals_of(shape):
                    users[inner].add(goal)
        waiting = deque(self._settled)
        while waiting:
            goal = waiting.popleft()
            if goal not in self._productive and any(map(self._is_possible, self._settled[goal])):
                self._productive.add(goal)
                waiting.extend(users[goal])

    def _is_possible(self, shape: Settled) -> bool:
        if isinstance(shape, Object):
            return self._is_possible_object(shape)
        if isinstance(shape, Items):
            if _is_distinct(shape) and self._listed(shape) is not None:
                return self._is_possible_set(shape)
            needed = len(shape.prefix) if shape.contains else shape.low
            if not all(item in self._productive for item in shape.prefix[:needed]) or (
                shape.contains and shape.high is not None and shape.high <= len(shape.prefix)
            ):
                return False
            if shape.low > len(shape.prefix) and shape.rest not in self._productive:
                return False
            return all(joined([goal, shape.rest]) in self._productive for goal, _ in shape.contains)
        return True

    def _is_possible_set(self, items: Items) -> bool:
        try:
            return bool(self._steps(items))
        except TooMany:
            raise SchemaRefused("#: uniqueItems can only be enforced for a few listed values") from None

    def _is_possible_object(self, shape: Object) -> bool:
        if not all(goal in self._productive for _, goal, required in shape.names if required):
            return False
        num_named = sum(goal in self._productive for _, goal, _ in shape.names)
        has_extra = any(goal in self._productive for _, goal in shape.extra)
        num_required = sum(required for _, _, required in shape.names)
        if shape.high is not None and max(shape.low, num_required + shape.extra_low) > shape.high:
            return False
        return has_extra or (shape.low <= num_named and not shape.extra_low)

    def _unsatisfiable(self) -> str:
        """The place of a schema that no value meets, for which the whole document fails."""
        goal, seen = self._root, set[Goal]()
        while goal not in seen and self._settled.get(goal):
            seen.add(goal)
            for inner in _needed(self._settled[goal][0]):
                if inner not in self._productive and inner != FALSE:
                    goal = inner
                    break
        return self._place(goal)

    # --- how it is written

    def _line(self, name: str, source: str) -> None:
        self._lines.append(f"{name}: {source}")
        self._size += len(name) + len(source)
        if self._size > MAX_GRAMMAR:
            raise SchemaRefused("#: the schema is too large")

    def _new_rule(self, source: str) -> str:
        name = f"r{self._num_rules}"
        self._num_rules += 1
        self._line(name, source)
        return name

    def _terminal(self, source: str) -> str:
        return self._terminals.setdefault(source, f"T{len(self._terminals)}")

    def _rule(self, goal: Goal) -> str:
        if goal == TRUE:
            self._uses_any = True
            return "any"
        name = self._rules.get(goal)
        if name is None:
            name = self._rules[goal] = f"v{len(self._rules)}"
            self._waiting.append(goal)
        return name

    def _options(self, goal: Goal) -> str:
        scalars, options = list[str](), list[str]()
        for shape in self._settled[goal]:
            if not self._is_possible(shape):
                continue
            if isinstance(shape, Object):
                options.append(self._object(shape, self._place(goal)))
            elif isinstance(shape, Items):
                options.append(self._array(shape, self._place(goal)))
            elif isinstance(shape, Numbers) and (source := self._multiples(shape, self._place(goal))):
                options.append(source)
            else:
                scalars.append(self._scalar(shape))
        if scalars:
            sources = list(dict.fromkeys(scalars))
            options.append(self._terminal(sources[0] if len(sources) == 1 else " | ".join(f"({s})" for s in sources)))
        return " | ".join(options)

    def _scalar(self, shape: Shape) -> str:
        if isinstance(shape, Null):
            return "/null/"
        if isinstance(shape, Booleans):
            return "/" + "|".join("true" if value else "false" for value in sorted(shape.values)) + "/"
        if isinstance(shape, Numbers):
            return expression(shape, with_fraction=self._with_fraction) or ""
        assert isinstance(shape, Texts)
        return terminal(shape.language) if shape.values is None else listed_terminal(shape.values)

    def _multiples(self, numbers: Numbers, place: str) -> str | None:
        """The rule of multiples of what is no power of ten; None for other numbers."""
        if numbers.step is None or expression(numbers, with_fraction=False) is not None:
            return None
        first, last = multiples(numbers)
        zeros = "(?:[.]0+)?" if self._with_fraction and numbers.step.denominator == 1 else ""
        if first is not None and last is not None and last - first < MAX_MULTIPLES:
            listed = (digits(factor * numbers.step).replace(".", "[.]") for factor in range(first, last + 1))
            return self._terminal(f"/(?:{'|'.join(listed)}){zeros}/")
        coefficient = _coefficient(float(numbers.step))
        ends = [end * numbers.step for end in (first, last) if end is not None]
        if numbers.fractional or coefficient != numbers.step or any(abs(end) > _EXACT for end in ends):
            raise SchemaRefused(f"{place}: multipleOf cannot be enforced exactly beside the other bounds")
        schema = f'"type": "{"integer" if numbers.step.denominator == 1 else "number"}"'
        schema += f', "multipleOf": {digits(numbers.step)}, "x-guidance": {{"whitespace_flexible": false}}'
        for keyword, factor in (("minimum", first), ("maximum", last)):
            schema += f', "{keyword}": {digits(factor * numbers.step)}' if factor is not None else ""
        return self._new_rule(f"%json {{{schema}}}") + (f" /{zeros[3:-2]}/?" if zeros else "")

    def _key(self, name: str) -> str:
        return f"{listed_terminal([name])} COLON"

    def _member(self, name: str, goal: Goal) -> str:
        return f"{self._key(name)} {self._rule(goal)}"

    def _extra_member(self, language: Language, goal: Goal) -> str:
        return f"{self._terminal(terminal(language))} COLON {self._rule(goal)}"

    def _object(self, shape: Object, place: str) -> str:
        names = [(self._member(name, goal), required) for name, goal, required in self._kept(shape.names)]
        extra = [self._extra_member(names_of, goal) for names_of, goal in shape.extra if goal in self._productive]
        return f"BEGIN_OBJECT {MemberSequence(self._new_rule, names, extra, shape, place).whole()} END_OBJECT"

    def _kept(self, names: Iterable[tuple[str, Goal, bool]]) -> Iterator[tuple[str, Goal, bool]]:
        return (each for each in names if each[1] in self._productive)

    def _array(self, items: Items, place: str) -> str:
        if _is_distinct(items):
            return self._distinct(items, place)
        if items.contains:
            return f"BEGIN_ARRAY {self._containing(items, place)} END_ARRAY"
        behind = self._rest(items, len(items.prefix))
        for index in range(len(items.prefix) - 1, -1, -1):
            goal = items.prefix[index]
            if goal not in self._productive or (items.high is not None and index >= items.high):
                behind = ""
                continue
            comma = "COMMA " if index else ""
            behind = f"{comma}{self._rule(goal)} {behind}".rstrip()
            if index >= items.low:
                behind = f"({behind})?"
            if len(behind) > 400:
                behind = self._new_rule(behind)
        return f"BEGIN_ARRAY {behind} END_ARRAY"

    def _rest(self, items: Items, index: int) -> str:
        """Source of the items behind the first ``index``."""
        low = max(items.low - index, 0)
        high = None if items.high is None else items.high - index
        if items.rest not in self._productive or (high is not None and high <= 0):
            return ""
        item = self._rule(items.rest)
        if index:
            return repeated(f"COMMA {item}", low, high)
        more = " ".join([item, repeated(f"COMMA {item}", max(low - 1, 0), None if high is None else high - 1)])
        return more if low else f"({more})?"

    def _containing(self, items: Items, place: str) -> str:
        """Items of which at least ``least`` meet a goal."""
        ((goal, least),) = items.contains
        if items.prefix:
            num_first = len(items.prefix)
            high = None if items.high is None else items.high - num_first
            rest = replace(items, prefix=(), low=max(items.low - num_first, 0), high=high)
            return " ".join(f"{self._rule(item)} COMMA" for item in items.prefix) + f" {self._containing(rest, place)}"
        item, wanted = self._rule(items.rest), self._rule(joined([goal, items.rest]))
        if items.high is None and items.low <= least:
            first = f"({item} COMMA)* {wanted}"
            return " ".join([first, repeated(f"COMMA {first}", least - 1, least - 1), f"(COMMA {item})*"])
        if least > 1 or max(items.low, items.high or 0) > 64:
            raise SchemaRefused(f"{place}: contains cannot be enforced beside these numbers of items")
        return self._new_rule(" | ".join(self._contains_at(items, item, wanted)))

    def _contains_at(self, items: Items, item: str, wanted: str) -> Iterator[str]:
        high = items.high
        for index in range(high if high is not None else max(items.low, 1)):
            is_last = high is None and index == max(items.low, 1) - 1
            before = repeated(f"{item} COMMA", index, None if is_last else index)
            left = None if high is None else high - index - 1
            yield " ".join([before, wanted, repeated(f"COMMA {item}", max(items.low - index - 1, 0), left)])

    def _distinct(self, items: Items, place: str) -> str:
        """Items that differ, of a few values."""
        listed = self._listed(items)
        if listed is None:
            raise SchemaRefused(f"{place}: uniqueItems can only be enforced for a few listed values")
        steps, sources = self._steps(items), {value: source for values in listed for value, source in values.items()}
        names = {used: f"r{self._num_rules + index}" for index, used in enumerate(steps)}
        self._num_rules += len(names)
        for used, following in steps.items():
            if following is not None:
                comma = "COMMA " if used else ""
                options = ['""'] if len(used) >= items.low else []
                options += [f"{comma}{sources[value]} {names[then]}" for value, then in following.items()]
                self._line(names[used], " | ".join(options))
        return f"BEGIN_ARRAY {names[frozenset()]} END_ARRAY"

    def _steps(self, items: Items) -> Steps:
        listed = self._listed(items)
        assert listed is not None
        return steps_of(items, listed)

    def _listed(self, items: Items) -> list[dict[str, str]] | None:
        """The values of each item of a prefix, and of every other; None if they are not listed."""
        listed = [self._values(goal) for goal in (*items.prefix, items.rest)]
        found = [values for values in listed if values is not None]
        return None if items.contains or len(found) < len(listed) else found

    def _values(self, goal: Goal) -> dict[str, str] | None:
        """The values of ``goal`` as terminals, by what tells them apart; None if it lists none."""
        found = dict[str, str]()
        for shape in self._settled.get(goal, ()) if goal != TRUE else (Members(),):
            if isinstance(shape, Texts) and shape.values is not None:
                found |= {f'"{value}': listed_terminal([value]) for value in shape.values}
            elif isinstance(shape, Numbers) and shape.value is not None:
                found[digits(shape.value)] = self._terminal(self._scalar(shape))
            elif isinstance(shape, Booleans):
                found |= {str(value): f'"{str(value).lower()}"' for value in shape.values}
            elif isinstance(shape, Null):
                found["null"] = '"null"'
            else:
                return None
        return found


def _is_distinct(items: Items) -> bool:
    return items.unique and (items.high is None or items.high > 1)


def _goals_of(shape: Settled) -> Iterator[Goal]:
    if isinstance(shape, Object):
        yield from (goal for _, goal, _ in shape.names)
        yield from (goal for _, goal in shape.extra)
    elif isinstance(shape, Items):
        yield from shape.prefix
        yield shape.rest
        for goal, _ in shape.contains:
            yield joined([goal, shape.rest])


def _needed(shape: Settled) -> Iterator[Goal]:
    if isinstance(shape, Object):
        yield from (goal for _, goal, required in shape.names if required)
    elif isinstance(shape, Items):
        yield from (shape.item(index) for index in range(min(shape.low, len(shape.prefix) + 1)))


def _coefficient(step: float) -> Any:
    """The step that llguidance finds in a float64."""
    value, exponent = step, 0
    while not value.is_integer():
        value, exponent = value * 10, exponent + 1
    return Fraction(int(value), 10**exponent) if value < 2**32 else None
