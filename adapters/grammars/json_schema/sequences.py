"""Members of an object in Lark, in order and counted."""

from __future__ import annotations

from collections.abc import Callable

from adapters.grammars.json_schema.grammar_shapes import Object
from adapters.grammars.json_schema.shapes import SchemaRefused

_BLOCK = 8
"""Members that one rule lists before it names the next: chained rules take llguidance's stack."""

MAX_STATES = 4_096
"""States of one object: next member, and number of members so far."""


def repeated(source: str, low: int, high: int | None) -> str:
    """Lark of ``source`` from ``low`` to ``high`` times."""
    if high == 0:
        return ""
    usual = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((low, high))
    times = usual if usual is not None else f"{{{low},{'' if high is None else high}}}"
    return f"({source}){times}"


class MemberSequence:
    """Source of the members of one object, counted as far as its bounds require.

    Args:
        new_rule: Adds a rule and returns its name.
        names: Sources of the named members, and whether each is required.
        extra: Sources of other members.
        shape: The object.
        place: Place of the object's schema, for errors.
        separator: Source of what is between two members; may be empty.
    """

    def __init__(
        self,
        new_rule: Callable[[str], str],
        names: list[tuple[str, bool]],
        extra: list[str],
        shape: Object,
        place: str,
        separator: str = "COMMA",
    ) -> None:
        self._comma = f"{separator} " if separator else ""
        self._new_rule, self._names, self._shape, self._place = new_rule, names, shape, place
        self._extra = extra[0] if len(extra) == 1 else f"({' | '.join(extra)})" if extra else ""
        self._cap = max(shape.low, 1) if shape.high is None else shape.high + 1
        self._rules: dict[tuple[int, int], str | None] = {}
        required = [index for index, (_, is_required) in enumerate(names) if is_required]
        self._num_first = min(required, default=len(names))

    def whole(self) -> str:
        """Source of all members."""
        # From the end, so that no member of a long list is a call inside another one's call.
        last = min(self._num_first + 1, len(self._names)) if self._cap == 1 else len(self._names)
        num_required = sum(required for _, required in self._names[:last])
        for index in range(last, 0, -1):
            num_required -= self._names[index][1] if index < last else 0
            for count in range(min(num_required, self._cap), min(index, self._cap) + 1):
                if count or index % _BLOCK == 0 or index == len(self._names):
                    self._from(index, count)
        found = self._from(0, 0)
        assert found is not None
        return found

    def _from(self, index: int, count: int) -> str | None:
        """Source of the members after ``count``: the named ones from ``index`` on, and others.

        None if no object is left.
        """
        shape = self._shape
        if shape.high is not None and count > shape.high:
            return None
        count = min(count, self._cap)
        if index == len(self._names):
            return self._tail(count)
        if shape.high is None and count == self._cap:  # only the order matters from here on
            return self._ordered(index)
        if (index, count) not in self._rules:
            if len(self._rules) > MAX_STATES:
                raise SchemaRefused(f"{self._place}: too many members to count them")
            self._rules[index, count] = self._choice(index, count)
        return self._rules[index, count]

    def _ordered(self, index: int) -> str:
        """The named members from ``index`` on, and others, once there are as many as required."""
        if self._cap == 1 and index > self._num_first and index % _BLOCK:  # reached from one place
            return self._listed(index, len(self._names))
        if (index, self._cap) not in self._rules:
            last = len(self._names)
            if self._cap > 1 or index <= self._num_first:
                last = min(index - index % _BLOCK + _BLOCK, last)
            self._rules[index, self._cap] = self._new_rule(self._listed(index, last))
        return self._rules[index, self._cap] or ""

    def _listed(self, index: int, last: int) -> str:
        """The named members from ``index`` to ``last``, and those after them."""
        parts = [
            f"{self._comma}{source}" if required else f"({self._comma}{source})?"
            for source, required in self._names[index:last]
        ]
        return " ".join([*parts, self._from(last, self._cap) or ""]).rstrip()

    def _choice(self, index: int, count: int) -> str | None:
        comma = self._comma if count else ""
        options = list[str]()
        while True:
            source, required = self._names[index]
            taken = self._from(index + 1, count + 1)
            if taken is not None:
                options.append(f"{comma}{source} {taken}".rstrip())
            if required:
                break
            index += 1
            if index % _BLOCK == 0 or index == len(self._names):
                left = self._from(index, count)
                options += [left or '""'] if left is not None else []
                break
        return self._new_rule(" | ".join(options)) if options else None

    def _tail(self, count: int) -> str | None:
        shape = self._shape
        low = max(shape.low - count, shape.extra_low)
        high = None if shape.high is None else shape.high - count
        if not self._extra:
            return None if low > 0 else ""
        if low > 1:
            raise SchemaRefused(f"{self._place}: minProperties cannot be enforced where names may be repeated")
        if high is not None and high < low:
            return None
        if high == 0:
            return ""
        if count:
            return repeated(f"{self._comma}{self._extra}", max(low, 0), high)
        more = " ".join([self._extra, repeated(f"{self._comma}{self._extra}", 0, None if high is None else high - 1)])
        return more if low > 0 else f"({more})?"
