"""Null, booleans, numbers and strings in Lark, and the values that a goal lists."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from adapters.grammars.json_schema.decimals import Numbers, digits, expression, meet, multiples, single, written
from adapters.grammars.json_schema.grammar_shapes import GrammarShape
from adapters.grammars.json_schema.lark_source import LarkSource
from adapters.grammars.json_schema.shapes import Booleans, Null, SchemaRefused, Shape, Texts, count_cases
from adapters.grammars.json_schema.terminals import listed_terminal, terminal

MAX_MULTIPLES = 4_096
"""Multiples that are listed."""

_MULTIPLE_WORK = 3
"""Work for a multiple that is listed."""

_EXACT = 2**53
"""Bound below which every integer is a float64, with which llguidance counts multiples."""


class Words(NamedTuple):
    """Words of the values that have one."""

    null: str = "null"
    true: str = "true"
    false: str = "false"

    def of(self, value: bool) -> str:
        """Word of a boolean."""
        return self.true if value else self.false


JSON_WORDS = Words()


class Scalars:
    """Sources of scalar values.

    Args:
        source: The grammar, to which rules and terminals are added.
        with_fraction: An integer may be written with a fraction of zeros (``1.0``).
        words: Words of null and the booleans.
    """

    def __init__(self, source: LarkSource, *, with_fraction: bool, words: Words = JSON_WORDS) -> None:
        self._words = words
        self._source = source
        self._with_fraction = with_fraction
        self._expressions: dict[int, tuple[Shape, str]] = {}  # by identity: schemas share what they refer to
        self._multiples: dict[int, tuple[Numbers, str | None]] = {}  # likewise

    def expression(self, shape: Shape) -> str:
        """Expression of a terminal."""
        if id(shape) not in self._expressions:
            self._expressions[id(shape)] = shape, self._written(shape)
        return self._expressions[id(shape)][1]

    def _written(self, shape: Shape) -> str:
        if isinstance(shape, Null):
            return f"/{self._words.null}/"
        if isinstance(shape, Booleans):
            return "/" + "|".join(map(self._words.of, sorted(shape.values))) + "/"
        if isinstance(shape, Numbers):
            return expression(shape, with_fraction=self._with_fraction) or ""
        assert isinstance(shape, Texts)
        return terminal(shape.language) if shape.values is None else listed_terminal(shape.values)

    def multiples(self, numbers: Numbers, place: str) -> str | None:
        """Source of the multiples of a step that `expression` has none of; None for other numbers.

        Raises:
            SchemaRefused: llguidance cannot count these multiples exactly, or there are too many.
        """
        if id(numbers) not in self._multiples:
            self._multiples[id(numbers)] = numbers, self._written_multiples(numbers, place)
        return self._multiples[id(numbers)][1]

    def _written_multiples(self, numbers: Numbers, place: str) -> str | None:
        if numbers.step is None or expression(numbers, with_fraction=False) is not None:
            return None
        first, last = multiples(numbers)
        if first is not None and last is not None and last - first < MAX_MULTIPLES:
            count_cases(_MULTIPLE_WORK * (last - first + 1))
            values = (factor * numbers.step for factor in range(first, last + 1))
            kept = (each for each in values if each.denominator > 1 or not numbers.fractional)
            listed = (written(each, with_fraction=self._with_fraction) for each in kept)
            return self._source.terminal(f"/(?:{'|'.join(listed)})/")
        ends = [end * numbers.step for end in (first, last) if end is not None]
        if numbers.fractional or not _is_exact(numbers.step) or any(abs(end) > _EXACT for end in ends):
            raise SchemaRefused(f"{place}: multipleOf cannot be enforced exactly beside the other bounds")
        rules = list[str]()
        for places in range(len(digits(numbers.step % 1)) - 1 or 1):
            found = meet(numbers, Numbers(step=Fraction(1, 10**places)))
            if found is not None and found.step is not None and _is_exact(found.step):
                rules.append(self._source.rule(f"%json {{{_json_schema(found)}}}"))
        if not self._with_fraction:
            return " | ".join(rules)
        if numbers.step.denominator == 1:
            return f"{rules[0]} /[.]0+/?"
        if meet(numbers, single(Fraction(0))):  # which llguidance does not write as 0.0 at a bound
            rules.append(self._source.terminal("/0[.]0+/"))
        return " | ".join(rules)

    def listed(self, shape: GrammarShape) -> dict[str, str] | None:
        """Source of each value of ``shape`` by what tells values apart; None if it lists none."""
        if isinstance(shape, Texts) and shape.values is not None:
            return {f'"{value}': listed_terminal([value]) for value in shape.values}
        if isinstance(shape, Numbers) and shape.value is not None:
            return {digits(shape.value): self._source.terminal(self.expression(shape))}
        if isinstance(shape, Booleans):
            return {str(value): f'"{self._words.of(value)}"' for value in shape.values}
        return {"null": f'"{self._words.null}"'} if isinstance(shape, Null) else None


def _json_schema(numbers: Numbers) -> str:
    """Members of the JSON Schema by which llguidance counts the multiples of a step: those without
    a fraction, or with as many digits behind the point as the step has.
    """
    step, (first, last) = numbers.step, multiples(numbers)
    assert step is not None
    schema = f'"type": "{"integer" if step.denominator == 1 else "number"}"'
    schema += f', "multipleOf": {digits(step)}, "x-guidance": {{"whitespace_flexible": false}}'
    for keyword, factor in (("minimum", first), ("maximum", last)):
        schema += f', "{keyword}": {digits(factor * step)}' if factor is not None else ""
    return schema


def _is_exact(step: Fraction) -> bool:
    return _step_of_llguidance(step) == step


def _step_of_llguidance(step: Fraction) -> Fraction | None:
    """The step that llguidance reads from the float64 of ``step``; None if it overflows."""
    if step >= 2**32:  # it may be no float64 at all
        return None
    value, exponent = float(step), 0
    while not value.is_integer():
        value, exponent = value * 10, exponent + 1
    return Fraction(int(value), 10**exponent) if value < 2**32 else None
