"""Grammars of JSON Schemas in llguidance's Lark dialect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from adapters.grammars.json_schema.arrays import Arrays
from adapters.grammars.json_schema.decimals import Numbers, expression
from adapters.grammars.json_schema.distinct import ListedValues
from adapters.grammars.json_schema.documents import inside, shown
from adapters.grammars.json_schema.goals import ProductiveGoals, ReachableGoals
from adapters.grammars.json_schema.grammar_shapes import Object
from adapters.grammars.json_schema.lark_source import LarkSource
from adapters.grammars.json_schema.patterns import ANYTHING, TooComplex, limited
from adapters.grammars.json_schema.scalars import JSON_WORDS, Scalars, Words
from adapters.grammars.json_schema.sequences import MemberSequence
from adapters.grammars.json_schema.shapes import TRUE, Goal, Items, SchemaRefused
from adapters.grammars.json_schema.terminals import listed_terminal, terminal

MAX_WORK = 1_000_000
"""Parts of patterns that are looked at for one document: about a second."""

MAX_WORK_OF_ALL = 2 * MAX_WORK
"""The same for all the documents of a request together, such as the schemas of its tools."""

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
    with limited_document():
        found = Grammar(schema, _is_compact(schema, compact))
        # As llguidance's own: within another grammar there is none before the first token.
        return found.lark(before=f"/{_WHITE_SPACE}+/? " if compact is False else "")


@contextmanager
def limited_document() -> Iterator[None]:
    """Limits the work on one document. Raises `SchemaRefused` for one beyond a limit."""
    try:
        with limited(MAX_WORK):
            yield
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


class Grammar:
    """The grammar of one document, a rule for each goal that the root leads to.

    Args:
        schema: The document.
        compact: See `lark_grammar`.
    """

    words: ClassVar = JSON_WORDS
    """Words of null and the booleans."""

    def __init__(self, schema: Any, compact: bool) -> None:
        declared = schema.get("$schema") if isinstance(schema, dict) else None
        is_draft_4 = isinstance(declared, str) and "draft-04" in declared  # in which 1.0 is no integer
        self._compact = compact
        self._source = LarkSource()
        self._scalars = Scalars(self._source, with_fraction=not compact and not is_draft_4, words=self.words)
        self._goals = ReachableGoals(schema)
        listed = ListedValues(self._goals.shapes, self._scalars)
        self._productive = ProductiveGoals(self._goals, listed)
        self._arrays = Arrays(self._source, self._productive, listed, self._rule)
        self._rules: dict[Goal, str] = {}
        self._waiting = deque[Goal]()
        self._uses_any = False

    def lark(self, before: str = "") -> str:
        """Source of the grammar, with ``before`` at the beginning of its start rule."""
        if self._goals.root not in self._productive:
            raise SchemaRefused(f"{self._productive.unproductive_place()}: no JSON matches it")
        start = self._root()
        while self._waiting:
            goal = self._waiting.popleft()
            self._source.add(self._rules[goal], self._options(goal))
        any_json = _any_json(self.words) if self._uses_any else ()
        return self._source.whole(before + start, [*any_json, *_structure(self._compact)])

    def _root(self) -> str:
        """Source of the whole value."""
        return self._rule(self._goals.root)

    def _rule(self, goal: Goal) -> str:
        """Name of the rule of ``goal``, which is written later."""
        if goal == TRUE:
            self._uses_any = True
            return "any"
        name = self._rules.get(goal)
        if name is None:
            name = self._rules[goal] = f"v{len(self._rules)}"
            self._waiting.append(goal)
        return name

    def _options(self, goal: Goal) -> str:
        place = self._goals.place(goal)
        scalars, size, options = dict[str, None](), 0, list[str]()
        for shape in filter(self._productive.has_value, self._goals.shapes(goal)):
            if isinstance(shape, Object):
                options.append(self._object(shape, place))
            elif isinstance(shape, Items):
                options.append(self._arrays.array(shape, place))
            elif isinstance(shape, Numbers) and (source := self._scalars.multiples(shape, place)):
                options.append(source)
            elif (source := self._scalars.expression(shape)) not in scalars:
                scalars[source], size = None, size + len(source)
                self._source.check(size)  # before they are joined
        if scalars:
            sources = list(scalars)
            source = sources[0] if len(sources) == 1 else " | ".join(f"({s})" for s in sources)
            options.append(self._source.terminal(source))
        return " | ".join(options)

    def _object(self, shape: Object, place: str) -> str:
        names = [
            (f"{listed_terminal([name])} COLON {self._rule(goal)}", required)
            for name, goal, required in shape.names
            if goal in self._productive
        ]
        extra = [
            f"{self._source.terminal(terminal(language))} COLON {self._rule(goal)}"
            for language, goal in shape.extra
            if goal in self._productive
        ]
        return f"BEGIN_OBJECT {MemberSequence(self._source.rule, names, extra, shape, place).whole()} END_OBJECT"


def _any_json(words: Words) -> Iterator[str]:
    """Rules and terminals of any JSON."""
    yield _ANY
    yield f"ANY_TEXT: {terminal(ANYTHING)}"
    yield f"ANY_OTHER: {expression(Numbers(), with_fraction=False)} | /{words.true}|{words.false}|{words.null}/"
