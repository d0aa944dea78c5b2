"""Lark grammars as llguidance reads them, as far as it must be known which tokens they name.

llguidance knows tokens by their bytes and ids alone (`adapters.grammars.compiler.load_tokenizer`),
so names are replaced by ids before it reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from adapters.strict_json import decoder

_LEXEME = re.compile(
    r"""(?P<literal> "(?:\\.|[^"\\])*" | /(?:\\.|[^/\\])+/ | (?://|\#)[^\n]* )
    | (?P<json> %(?:json|regex|llguidance)\s* )
    | (?P<token> <[^<>\s]+> )
    | (?P<open> ["/] )""",
    re.DOTALL | re.VERBOSE,
)
_NAMED = re.compile(r"@([A-Za-z_][\w-]*)")
_OPTIONS = "%llguidance"
_KNOWN_OPTIONS = ("no_forcing", "allow_initial_skip", "allow_invalid_utf8")
_NO_FORCING = '%llguidance {"no_forcing": true}'
_RANGES = re.compile(r"<\[(?P<ranges>[^^*\]][^\]]*)\]>")
_ESCAPE = re.compile(r"\\.|/", re.DOTALL)
_IN_SLASHES = {"/": r"\/", "\\\n": r"\n"}
_JSON = json.JSONDecoder()
_STRICT_JSON = decoder()

Ranges = tuple[range, ...]


def as_grammar(source: str, others: Sequence[dict[str, str]] = ()) -> str:
    """A Lark grammar in llguidance's JSON form, with ``others`` that it names."""
    return json.dumps({"grammars": [{"lark_grammar": source}, *others]})


def regex_grammar(pattern: str, end: str = "", *, at_first: bool = True) -> str:
    """A regular expression as a grammar in llguidance's JSON form.

    llguidance's own ``grammar_from_regex`` drops a backslash at the end, and writes line breaks as
    ``\\n``, which flag ``x`` does not ignore.

    Args:
        pattern: The regular expression.
        end: Expression of a terminal behind it, over which a lexeme of ``pattern`` alone could go
            on.
        at_first: Whether the text ends with the first ``end`` that may be one; otherwise a token
            that is no text has to follow.

    Raises:
        ValueError: it ends in a backslash that escapes nothing.
    """
    if _ESCAPE.sub("", pattern).endswith("\\"):
        raise ValueError("incomplete escape sequence: it ends in a backslash")
    found = f"/{_ESCAPE.sub(lambda found: _IN_SLASHES.get(found[0], found[0]), pattern)}/"
    if not end:
        return as_grammar(f"start: {found}")
    return as_grammar(f"start: text\ntext{'[lazy]' if at_first else ''}: TEXT\nTEXT: {found} {end}")


def in_one(grammar: str) -> str:
    """One Lark text for a grammar in llguidance's JSON form, with the grammars that it names in it.

    Masks of it hold all tokens that can continue, as those of `adapters.grammars.compiler`: what is
    forced may be written in any tokens.

    Raises:
        ValueError: it has options of its own, which would stand twice.
    """
    first, *others = json.loads(grammar)["grammars"]
    named = {each["name"]: each["lark_grammar"] for each in others}
    return f"{_NO_FORCING}\n{_with_grammars(first['lark_grammar'], named)}"


def _with_grammars(source: str, named: dict[str, str]) -> str:
    """The source with grammars in the place of their names."""

    def inlined(found: re.Match[str]) -> str:
        return f"%lark {{\n{_with_grammars(named[found[1]], named)}\n}}"

    parts, at = list[str](), 0
    for lexeme in lexemes(source):
        text = source[lexeme.start : lexeme.end]
        if text.startswith("%llguidance"):
            raise ValueError("has options of its own, %llguidance")
        parts += [_NAMED.sub(inlined, source[at : lexeme.start]), text]
        at = lexeme.end
    return "".join([*parts, _NAMED.sub(inlined, source[at:])])


class Lexeme(NamedTuple):
    """A part of a grammar's source that is no rule, name or operator.

    Attributes:
        kind: ``literal``: a string, a regular expression or a comment; ``json``: a directive and
            the JSON behind it; ``token``: a token's name, or ids.
        start: Index of its first character.
        end: Index after its last one.
    """

    kind: str
    start: int
    end: int


def lexemes(source: str) -> Iterator[Lexeme]:
    """The literals, JSON values and tokens of a grammar, in order.

    As in llguidance's lexer; a source that llguidance refuses may be read in any way.

    Raises:
        ValueError: there is no JSON where there must be, or a literal has no end.
    """
    at = 0
    while found := _LEXEME.search(source, at):
        kind, at = found.lastgroup, found.end()
        assert kind is not None
        if kind == "open":  # a search for its end after each of its quotes would be quadratic
            raise ValueError(f"expected an end of what begins at {source[at - 1 : at + 20]!r}")
        if kind == "json":
            try:
                at = _JSON.raw_decode(source, at)[1]
            except RecursionError:
                raise ValueError("its JSON is nested too deeply") from None
            except ValueError:
                raise ValueError(f"expected JSON behind {found[0].strip()}") from None
        yield Lexeme(kind, found.start(), at)


def without_literals(source: str) -> str:
    """The source, of which its literals, JSON values and tokens are left out.

    Raises:
        ValueError: as `lexemes`.
    """
    return _replaced(source, lambda lexeme, text: "")


def with_ids(source: str, id_of: Callable[[str], int | None]) -> str:
    """The source with ids in the place of names of tokens: ``<[5]>`` for ``<name>``.

    Args:
        source: Source of a grammar.
        id_of: The id of the token with a name, None if there is none.

    Raises:
        ValueError: as `lexemes`, or a token has no id.
    """
    known: dict[str, str] = {}

    def replaced(lexeme: Lexeme, text: str) -> str:
        if lexeme.kind != "token" or (text.startswith("<[") and text.endswith("]>")):
            return text
        if text not in known:
            token_id = id_of(text)
            if token_id is None:
                raise ValueError(f"names the token {text[:64]}, which this model does not have")
            known[text] = f"<[{token_id}]>"
        return known[text]

    return _replaced(source, replaced)


def with_schemas(source: str, grammar_of: Callable[[Any], str], most: int) -> tuple[str, list[dict[str, str]]]:
    """The source with the names of grammars in the place of JSON Schemas, and those grammars.

    Args:
        source: Source of a grammar.
        grammar_of: A grammar in Lark of a JSON Schema.
        most: Characters of those grammars together.

    Raises:
        ValueError: as `lexemes` and ``grammar_of``, or a schema can be read in two ways, or all of
            them together are too large.
    """
    found: list[dict[str, str]] = []
    left = most

    def replaced(lexeme: Lexeme, text: str) -> str:
        nonlocal left
        if lexeme.kind != "json" or not text.startswith("%json"):
            return text
        schema, _ = _STRICT_JSON.raw_decode(text.removeprefix("%json").lstrip())
        name, grammar = f"json_schema_{len(found)}", grammar_of(schema)
        left -= len(grammar)
        if left < 0:  # of a short pattern a long one is made, and there may be hundreds
            raise ValueError(f"expected schemas whose grammars have at most {most} characters in all")
        found.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    return _replaced(source, replaced), found


def check_options(source: str) -> None:
    """Refuse options that llguidance would ignore.

    Args:
        source: Source of a grammar.

    Raises:
        ValueError: as `lexemes`, or ``%llguidance`` sets an option that is unknown, or one twice.
    """
    for lexeme in lexemes(source):
        text = source[lexeme.start : lexeme.end]
        if lexeme.kind == "json" and text.startswith(_OPTIONS):
            options, _ = _STRICT_JSON.raw_decode(text.removeprefix(_OPTIONS).lstrip())
            for name in options if isinstance(options, dict) else ():
                if name not in _KNOWN_OPTIONS:
                    raise ValueError(f"{_OPTIONS} has no option {name[:64]!r}, only {', '.join(_KNOWN_OPTIONS)}")


def token_ranges(source: str) -> Iterator[Ranges]:
    """The ids that each token of the grammar may have, of those that are given as ids.

    Args:
        source: Source of a grammar that llguidance has compiled.
    """
    for lexeme in lexemes(source):
        found = _RANGES.fullmatch(source, lexeme.start, lexeme.end) if lexeme.kind == "token" else None
        if found is not None:
            yield tuple(_range(each) for each in found["ranges"].split(",") if each.strip())


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _replaced(source: str, replace: Callable[[Lexeme, str], str]) -> str:
    parts, at = list[str](), 0
    for lexeme in lexemes(source):
        parts += [source[at : lexeme.start], replace(lexeme, source[lexeme.start : lexeme.end])]
        at = lexeme.end
    return "".join([*parts, source[at:]])
