"""Lark grammars of free text in which a trigger starts what a grammar describes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from pydantic import Field

from adapters.calls.xml_values import TagNotation
from adapters.contract import ArgumentError, ProcessorArgs
from adapters.grammars.json_schema import MAX_GRAMMAR, literal
from adapters.grammars.lark import regex_grammar
from adapters.processors.grammar import MAX_SOURCE, JsonSchema, arguments_of_call
from adapters.vocabulary import Vocabulary

MAX_TAGS = 128
"""Tags or tools of one grammar."""

_ANY = "(?s:.*)"


def without(texts: Sequence[str]) -> str:
    """Rest of a terminal's expression by which it holds none of ``texts``."""
    return f" & ~/{_ANY}({'|'.join(map(literal, texts))}){_ANY}/" if texts else ""


class JsonContent(ProcessorArgs):
    """Compact JSON that a JSON Schema describes."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool = Field(description="A JSON Schema; true allows any JSON.")


class RegexContent(ProcessorArgs):
    """Text that a regular expression matches as a whole."""

    type: Literal["regex"]
    pattern: str = Field(
        min_length=1, max_length=MAX_SOURCE, description="Regular expression in the syntax of Rust's regex crate."
    )


@dataclass(frozen=True, slots=True)
class Trigger:
    """End of free text.

    Attributes:
        text: The text that ends it, if it is not a special token.
        token: Lark expression of the special token.
        spelling: The text of either, which free text never holds: who reads an answer cannot tell
            a special token from its text.
    """

    text: str = ""
    token: str = ""
    spelling: str = ""


@dataclass(slots=True)
class Block:
    """A trigger with all that may follow it.

    Attributes:
        trigger: The trigger.
        lark: Lark of the trigger where no free text is before it.
        options: Lark expressions of what may follow.
    """

    trigger: Trigger
    lark: str
    options: list[str] = field(default_factory=list)

    @property
    def whole(self) -> str:
        """The trigger and what follows, without free text."""
        return f"{self.lark} ({' | '.join(self.options)})"


class MarkedText:
    """Texts in Lark, in which special tokens are named by their ids.

    Args:
        argument: Argument of the processor, for errors.
        vocabulary: Vocabulary that has the special tokens.
    """

    def __init__(self, argument: str, vocabulary: Vocabulary) -> None:
        self._argument, self._vocabulary = argument, vocabulary

    def lark(self, text: str) -> str:
        """Lark expression of ``text``; special tokens in it are those tokens."""
        return " ".join(part if is_token else f"/{literal(part)}/" for is_token, part in self._pieces(text))

    def trigger(self, text: str) -> tuple[Trigger, str]:
        """Trigger at the beginning of ``text``, and the rest of the text."""
        pieces = self._pieces(text)
        if not pieces[0][0]:
            if len(pieces) > 1:
                problem = "a trigger with a special token must begin with it"
                raise ArgumentError(self._argument, problem)
            return Trigger(text=text, spelling=text), ""
        behind = pieces[1:]
        if any(is_token for is_token, _ in behind):
            raise ArgumentError(self._argument, "a trigger may hold one special token")
        rest = "".join(part for _, part in behind)
        return Trigger(token=pieces[0][1], spelling=text.removesuffix(rest)), rest

    def end(self, text: str) -> tuple[str, str]:
        """Lark expressions of ``text`` up to its first special token, and of the rest."""
        pieces = [part if is_token else f"/{literal(part)}/" for is_token, part in self._pieces(text)]
        count = int(bool(pieces) and not self.starts_special(text))
        return " ".join(pieces[:count]), " ".join(pieces[count:])

    def starts_special(self, text: str) -> bool:
        """Whether ``text`` begins with a special token."""
        return bool(text) and self._pieces(text)[0][0]

    def _pieces(self, text: str) -> list[tuple[bool, str]]:
        """Runs of ``text``: a special token's Lark expression with True, or a text with False."""
        if not text:
            return []
        try:
            token_ids = self._vocabulary.encode(text)
        except ValueError as error:
            raise ArgumentError(self._argument, str(error)) from error
        found: list[tuple[bool, str]] = []
        for is_text, run in groupby(token_ids, lambda token_id: bool(self._vocabulary.token_bytes[token_id])):
            ids = list(run)
            if is_text:
                spelled = b"".join(self._vocabulary.token_bytes[token_id] for token_id in ids)
                found.append((False, spelled.decode()))
            else:
                found += [(True, f"<[{token_id}]>") for token_id in ids]
        return found


class StructuralSource:
    """A Lark grammar in the making, with the grammars of the contents beside it.

    Args:
        argument: Argument of the processor, for errors.
        vocabulary: Vocabulary of the grammar.

    Attributes:
        rules: Lines of rules and terminals.
    """

    def __init__(self, argument: str, vocabulary: Vocabulary) -> None:
        self._argument, self._vocabulary = argument, vocabulary
        self._contents: list[dict[str, Any]] = []
        self._size = 0  # of all contents
        self.rules: list[str] = []

    def json(self, schema: dict[str, Any] | bool, of: str) -> str:
        """Lark expression of compact JSON that matches ``schema``.

        Args:
            schema: A JSON Schema.
            of: Owner of the schema, for errors.
        """
        try:
            made = JsonSchema.kept_grammar(JsonSchema.Args.model_validate({"schema": schema}), self._vocabulary)
        except ArgumentError as error:
            raise ArgumentError(self._argument, f"{of}: {error.problem}") from error
        return self._added(made)

    def arguments(self, schema: dict[str, Any], notation: Literal["python", "keywords"] | TagNotation, of: str) -> str:
        """Lark expression of the arguments of a call that are written one by one.

        Args:
            schema: A JSON Schema of objects.
            notation: Notation of `adapters.calls`.
            of: Owner of the schema, for errors.
        """
        try:
            made = arguments_of_call(schema, notation)
        except ArgumentError as error:
            raise ArgumentError(self._argument, f"{of}: {error.problem}, in the notation {notation}") from error
        return self._added(made)

    def content(self, content: JsonContent | RegexContent, of: str, end: tuple[str, str] = ("", "")) -> str:
        """Lark expression of a content, and of what is behind it.

        Args:
            content: The content.
            of: Owner of the content, for errors.
            end: Result of `MarkedText.end` for the text behind it.
        """
        text, rest = end
        if isinstance(content, JsonContent):
            return " ".join(filter(None, (self.json(content.json_schema, of), text, rest)))
        try:
            made = regex_grammar(content.pattern, text, at_first=not rest)
        except ValueError as error:
            raise ArgumentError(self._argument, f"{of}: {error}") from error
        return f"{self._added(made)} {rest}".rstrip()

    def _added(self, grammar: str) -> str:
        """Lark expression of a grammar in llguidance's JSON form, which is added."""
        self._size += len(grammar)
        self._check(self._size)  # before there are more: each may be as large as all together
        name = f"content_{len(self._contents)}"
        self._contents.append({**json.loads(grammar)["grammars"][0], "name": name})
        return f"@{name}"

    def add(self, name: str, source: str) -> None:
        """Add a rule or a terminal, unless there is the same already."""
        line = f"{name}: {source}"
        if line not in self.rules:
            self.rules.append(line)

    def grammar(self, blocks: Sequence[Block], *, begins: bool, many: bool) -> str:
        """The grammar of free text with ``blocks`` in it.

        Args:
            blocks: A block for each trigger.
            begins: Whether a block comes first.
            many: Whether more than one may come.

        Raises:
            ArgumentError: one trigger contains another, or the grammar is too long.
        """
        texts = [block.trigger.text for block in blocks if block.trigger.text]
        for text in texts:
            if sum(text.count(other) > 0 for other in texts) > 1:
                raise ArgumentError(self._argument, "no trigger may contain another one")
        self._free([block.trigger.spelling for block in blocks])
        special = [block.trigger.spelling for block in blocks if block.trigger.token]
        for index, block in enumerate(blocks):
            if block.trigger.text:
                self.rules.append(f"TRIGGER_{index}: /{_ANY}{literal(block.trigger.text)}/{without(special)}")
                self.rules.append(f"trigger_{index}[lazy]: TRIGGER_{index}")
            before = f"trigger_{index}" if block.trigger.text else f"FREE {block.trigger.token}"
            self.rules.append(f"block_{index}: {before} ({' | '.join(block.options)})")
        any_block = " | ".join(f"block_{index}" for index in range(len(blocks)))
        first = " | ".join(block.whole for block in blocks)
        if begins:
            return self.finished(f"({first}) ({any_block})* FREE" if many else f"{first}")
        return self.finished(f"({any_block})* FREE" if many else f"FREE | {any_block}")

    def free_text(self, blocks: Sequence[Block]) -> str:
        """The grammar of free text in which no block starts."""
        self._free([block.trigger.spelling for block in blocks])
        return self.finished("FREE")

    def _free(self, texts: Sequence[str]) -> None:
        """Add the rule of free text that holds none of ``texts``."""
        self.rules.append(f"FREE: /{_ANY}/{without(texts)}")

    def finished(self, start: str) -> str:
        """The grammar of start rule ``start``, in llguidance's JSON form."""
        lark = "\n".join([f"start: {start}", *self.rules])
        made = json.dumps({"grammars": [{"name": "structure", "lark_grammar": lark}, *self._contents]})
        self._check(len(made))
        return made

    def _check(self, size: int) -> None:
        """Raises `ArgumentError` if a grammar of so many characters is too long."""
        if size > MAX_GRAMMAR:
            raise ArgumentError(self._argument, f"expected a grammar of at most {MAX_GRAMMAR} characters in all")
