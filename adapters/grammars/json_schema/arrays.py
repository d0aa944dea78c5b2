"""Arrays in Lark: items in order and counted, ``contains``, and distinct items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from adapters.grammars.json_schema.distinct import ListedValues, is_distinct
from adapters.grammars.json_schema.goals import ProductiveGoals
from adapters.grammars.json_schema.lark_source import LarkSource
from adapters.grammars.json_schema.sequences import repeated
from adapters.grammars.json_schema.shapes import Goal, Items, SchemaRefused, joined

_LONG = 400
"""Characters of a source of items, above which it becomes a rule."""


class Arrays:
    """Sources of arrays.

    Args:
        source: The grammar, to which rules are added.
        productive: Goals that some value meets.
        listed: Values of the goals that list them.
        rule: Returns the name of a goal's rule.
    """

    def __init__(
        self, source: LarkSource, productive: ProductiveGoals, listed: ListedValues, rule: Callable[[Goal], str]
    ) -> None:
        self._source, self._productive, self._listed, self._rule = source, productive, listed, rule

    def array(self, items: Items, place: str) -> str:
        """Source of ``items``.

        Raises:
            SchemaRefused: a grammar cannot count what the schema requires.
        """
        if is_distinct(items):
            return f"BEGIN_ARRAY {self._distinct(items, place)} END_ARRAY"
        if items.contains:
            return f"BEGIN_ARRAY {self._containing(items, place)} END_ARRAY"
        following = self._rest(items, len(items.prefix))
        for index in range(len(items.prefix) - 1, -1, -1):
            goal = items.prefix[index]
            if goal not in self._productive or (items.high is not None and index >= items.high):
                following = ""
                continue
            comma = "COMMA " if index else ""
            following = f"{comma}{self._rule(goal)} {following}".rstrip()
            if index >= items.low:
                following = f"({following})?"
            if len(following) > _LONG:
                following = self._source.rule(following)
        return f"BEGIN_ARRAY {following} END_ARRAY"

    def _rest(self, items: Items, index: int) -> str:
        """Source of the items after the first ``index``."""
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
        return self._source.rule(" | ".join(_contains_at(items, item, wanted)))

    def _distinct(self, items: Items, place: str) -> str:
        """Items that differ, of a few values."""
        listed = self._listed.of_items(items)
        if listed is None:
            raise SchemaRefused(f"{place}: uniqueItems can only be enforced for a few listed values")
        steps, sources = self._listed.steps(items), {value: each for values in listed for value, each in values.items()}
        names = dict(zip(steps, self._source.names(len(steps)), strict=True))
        for used, following in steps.items():
            if following is not None:
                comma = "COMMA " if used else ""
                options = ['""'] if len(used) >= items.low else []
                options += [f"{comma}{sources[value]} {names[then]}" for value, then in following.items()]
                self._source.add(names[used], " | ".join(options))
        return names[frozenset()]


def _contains_at(items: Items, item: str, wanted: str) -> Iterator[str]:
    """Source of the items for each index at which the first that is ``wanted`` may be."""
    high = items.high
    for index in range(high if high is not None else max(items.low, 1)):
        is_last = high is None and index == max(items.low, 1) - 1
        before = repeated(f"{item} COMMA", index, None if is_last else index)
        left = None if high is None else high - index - 1
        yield " ".join([before, wanted, repeated(f"COMMA {item}", max(items.low - index - 1, 0), left)])
