"""Arguments of a call as keyword arguments or between tags, in place of one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeAlias

from adapters.calls.xml_values import TAGS, Kind, TagNotation, Tags, no_strings
from adapters.grammars.json_schema.decimals import Numbers
from adapters.grammars.json_schema.emission import Grammar, limited_document
from adapters.grammars.json_schema.goals import ReachableGoals
from adapters.grammars.json_schema.grammar_shapes import GrammarShape, Object
from adapters.grammars.json_schema.patterns import ANYTHING, Language
from adapters.grammars.json_schema.scalars import Words
from adapters.grammars.json_schema.sequences import MemberSequence
from adapters.grammars.json_schema.shapes import TRUE, Booleans, Goal, Items, Null, SchemaRefused, Texts
from adapters.grammars.json_schema.terminals import literal, literal_terminal, terminal

Notation: TypeAlias = Literal["python", "keywords"] | TagNotation

_KINDS: dict[type[GrammarShape], Kind] = {
    Null: "null",
    Booleans: "boolean",
    Numbers: "number",
    Texts: "string",
    Items: "array",
    Object: "object",
}
_ALL_KINDS = frozenset(_KINDS.values())


def arguments_grammar(schema: Any, notation: Notation) -> str:
    """A grammar in Lark of the arguments that ``schema``, of objects, describes.

    Every text of the grammar stands for a value of the schema. Only members that the schema names
    are written, and no string that the notation would have to read as something else.

    Args:
        schema: A JSON Schema, as Python's `json` reads it.
        notation: ``python``, ``keywords``: ``a=1, b="x"``; others: see `adapters.calls.xml_values`.

    Raises:
        SchemaRefused: it is malformed, or cannot be enforced exactly in this notation.
    """
    with limited_document():
        if notation == "python":
            return _PythonArguments(schema, compact=True).lark()
        if notation == "keywords":
            return _KeywordArguments(schema, compact=True).lark()
        return _TaggedArguments(schema, TAGS[notation]).lark()


def argument_kinds(schema: Any) -> dict[str, frozenset[Kind]]:
    """Types that each named argument may have, by its name.

    Args:
        schema: A JSON Schema of objects.

    Raises:
        SchemaRefused: as `arguments_grammar`.
    """
    with limited_document():
        return _kinds_of(ReachableGoals(schema))


def _kinds_of(goals: ReachableGoals) -> dict[str, frozenset[Kind]]:
    found: dict[str, frozenset[Kind]] = {}
    for shape in goals.shapes(goals.root):
        if isinstance(shape, Object):
            for name, goal, _ in shape.names:
                kinds = _ALL_KINDS if goal == TRUE else {_KINDS[type(each)] for each in goals.shapes(goal)}
                found[name] = found.get(name, frozenset()) | kinds
    return found


class _NamedArguments(Grammar):
    """The grammar of arguments that are written one by one."""

    separator: ClassVar[str]
    """Source of what is between two of them."""

    def _root(self) -> str:
        goal = self._goals.root
        place = self._goals.place(goal)
        options = list[str]()
        for shape in self._goals.shapes(goal):
            if isinstance(shape, Object) and self._is_writable(shape):
                names = [
                    (self._member(name, value, place), required)
                    for name, value, required in shape.names
                    if value in self._productive
                ]
                options.append(MemberSequence(self._source.rule, names, [], shape, place, self.separator).whole())
        if not options:
            raise SchemaRefused(f"{place}: needs an argument that it does not name")
        return " | ".join(f"({option})" if option else '""' for option in options)

    def _is_writable(self, shape: Object) -> bool:
        named = {name for name, value, _ in shape.names if value in self._productive}
        has_all = all(name in named for name, _, required in shape.names if required)
        return has_all and shape.low <= len(named) and not shape.extra_low

    def _member(self, name: str, value: Goal, place: str) -> str:
        """Source of one argument."""
        raise NotImplementedError


class _KeywordArguments(_NamedArguments):
    """Keyword arguments of a call, whose values are JSON."""

    separator: ClassVar = '", "'

    def _member(self, name: str, value: Goal, place: str) -> str:
        if not name.isidentifier():
            raise SchemaRefused(f"{place}/properties: {name!r} cannot be written as the name of a keyword argument")
        return f"{self._source.terminal(literal_terminal(f'{name}='))} {self._rule(value)}"


class _PythonArguments(_KeywordArguments):
    """Keyword arguments of a call in Python."""

    words: ClassVar = Words("None", "True", "False")


class _TaggedArguments(_NamedArguments):
    """Arguments between tags."""

    separator: ClassVar = ""

    def __init__(self, schema: Any, tags: Tags) -> None:
        super().__init__(schema, compact=True)
        self._tags = tags
        self._kinds = _kinds_of(self._goals)
        self._raw_texts: dict[tuple[int, frozenset[Kind]], str] = {}  # by identity: schemas share what they refer to

    def _member(self, name: str, value: Goal, place: str) -> str:
        if set(name) & set(">\n"):
            raise SchemaRefused(f"{place}/properties: {name!r} cannot be written in a tag")
        opening = self._source.terminal(literal_terminal(f"{self._tags.open}{name}{self._tags.opened}"))
        return f"{opening} ({' | '.join(self._values(name, value))})"

    def _values(self, name: str, goal: Goal) -> Iterator[str]:
        """Sources of the values of an argument, each with the end of the tag."""
        place, kinds = self._goals.place(goal), self._kinds[name]
        if "string" not in kinds:
            yield f"{self._rule(goal)} {self._source.terminal(literal_terminal(self._tags.close))}"
            return
        closing = self._source.terminal(literal_terminal(self._tags.close))
        if goal == TRUE:
            self._uses_any = True
            yield f"(any_array | any_object) {closing}"
        texts = [_raw(ANYTHING, kinds, self._tags.stop)] if goal == TRUE else list[str]()
        texts += ["ANY_OTHER"] if goal == TRUE else []
        for shape in filter(self._productive.has_value, self._goals.shapes(goal)):
            if isinstance(shape, Texts):
                key = id(shape), kinds
                if key not in self._raw_texts:
                    self._raw_texts[key] = _raw(shape.as_language(), kinds, self._tags.stop)
                texts.append(self._raw_texts[key])
            elif isinstance(shape, Object):
                yield f"{self._object(shape, place)} {closing}"
            elif isinstance(shape, Items):
                yield f"{self._arrays.array(shape, place)} {closing}"
            else:
                if isinstance(shape, Numbers) and self._scalars.multiples(shape, place):
                    raise SchemaRefused(f"{place}: multipleOf cannot be enforced beside strings")
                texts.append(self._scalars.expression(shape))
        if texts:
            # One lexeme, which ends at the first end of a tag: a number may also begin a text.
            whole = " | ".join(f"({text})" for text in texts)
            yield self._lazy(f"({whole}) {literal_terminal(self._tags.close)}")

    def _lazy(self, source: str) -> str:
        (name,) = self._source.names(1)
        self._source.add(f"{name}[lazy]", self._source.terminal(source))
        return name


def _raw(language: Language, kinds: frozenset[Kind], stop: str) -> str:
    other = no_strings(kinds)
    without = f" & ~/{other}/" if other else ""
    return f"({terminal(language, raw=True)}) & ~/(?s:.*){literal(stop)}(?s:.*)/{without}"
