"""Rules and terminals of a Lark grammar in the making."""

from __future__ import annotations

from collections.abc import Iterable

from adapters.grammars.json_schema.shapes import SchemaRefused

MAX_GRAMMAR = 4 * 1024 * 1024
"""Characters of one grammar."""


class LarkSource:
    """Named rules and terminals, at most `MAX_GRAMMAR` characters."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self._num_rules = 0
        self._terminals: dict[str, str] = {}

    def add(self, name: str, source: str) -> None:
        """Add the rule ``name``.

        Raises:
            SchemaRefused: the grammar is too large.
        """
        self._lines.append(f"{name}: {source}")
        self._size += len(name) + len(source)
        self.check(self._size)

    def rule(self, source: str) -> str:
        """Name of a new rule."""
        (name,) = self.names(1)
        self.add(name, source)
        return name

    def names(self, count: int) -> list[str]:
        """``count`` names for rules that are added later."""
        first = self._num_rules
        self._num_rules += count
        return [f"r{number}" for number in range(first, self._num_rules)]

    def terminal(self, source: str) -> str:
        """Name of a terminal, the same for equal sources. Raises `SchemaRefused` as `add`."""
        if source not in self._terminals:
            self._size += len(source)
            self.check(self._size)
        return self._terminals.setdefault(source, f"T{len(self._terminals)}")

    def whole(self, start: str, terminals: Iterable[str]) -> str:
        """Source of the grammar, with more lines of ``terminals``.

        Raises:
            SchemaRefused: the grammar is too large.
        """
        named = (f"{name}: {source}" for source, name in self._terminals.items())
        found = "\n".join([f"start: {start}", *self._lines, *named, *terminals])
        self.check(len(found))
        return found

    @staticmethod
    def check(size: int) -> None:
        """Raises `SchemaRefused` if sources of ``size`` characters in all are too many."""
        if size > MAX_GRAMMAR:
            raise SchemaRefused("#: the schema is too large")
