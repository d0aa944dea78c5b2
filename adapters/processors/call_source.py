"""Lark grammars of answers with tool calls in them, in the formats of `adapters.calls`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from adapters.calls import NAME, NUMBER, WHITE_SPACE, CallFormat, Opening
from adapters.grammars.json_schema import literal
from adapters.processors.structural_source import Block, MarkedText, StructuralSource

_SPACES = f"[{literal(WHITE_SPACE)}]*"
_ANY = "(?s:.*)"
_JSON_LEXEMES = re.compile(r'"[^"]*"|[^\w.-]|[\w.-]+\(?')
"""Parts of a text that end where lexemes of JSON end."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A tool as a grammar knows it.

    Attributes:
        name: Name of the function.
        arguments: Lark expression of its arguments.
    """

    name: str
    arguments: str


class CallSource:
    """Sources of calls and of the text around them, for the grammar of one answer.

    Args:
        wanted: Format of the calls.
        source: The grammar, to which rules are added.
        texts: Writes texts with special tokens in them.
        tools: The tools that may be called.
        parallel: Whether there may be more than one call.
    """

    def __init__(
        self,
        wanted: CallFormat,
        source: StructuralSource,
        texts: MarkedText,
        tools: Sequence[Signature],
        *,
        parallel: bool,
    ) -> None:
        self._format, self._source, self._texts = wanted, source, texts
        self._tools, self._parallel = tools, parallel
        self._anywhere = list(self._blocks(anywhere=True))
        self._first = list(self._blocks(anywhere=False))
        if wanted.between is not None and parallel and tools:
            self._add_call(wanted.name_prefix)

    def free_text(self) -> str:
        """Start rule of text without a call."""
        return f"{self._prose()} {self._free(first=True)}"

    def calls(self) -> str:
        """Start rule of calls alone, at least one."""
        return self._repeated(self._wholes(self._first + self._anywhere))

    def text_and_calls(self) -> str:
        """Start rule of text, calls or both."""
        options = [self.free_text()]
        first = [f"{self._leading(block)} ({' | '.join(block.options)})" for block in self._first if block.options]
        if first:
            options.append(self._repeated(f"({' | '.join(first)})"))
        if self._callable():
            begun = f"{self._prose()} ({self._after_text(first=True)})"
            if not self._parallel:
                options.append(begun)
            elif self._format.ends:
                options.append(self._repeated(begun))
            else:
                options.append(f"{begun} ({self._after_text(first=False)})* {self._free(first=False)}")
            if self._prose():
                options.append(self._repeated(self._wholes(self._anywhere)))
        return " | ".join(options)

    def text_before(self, answer: str) -> str:
        """Source of ``answer``, an expression, as text of this format."""
        return f"{self._prose()} {answer}"

    def _prose(self) -> str:
        return self._texts.lark(self._format.prose)

    def _callable(self) -> list[Block]:
        return [block for block in self._anywhere if block.options]

    def _wholes(self, blocks: Iterable[Block]) -> str:
        return f"({' | '.join(block.whole for block in blocks if block.options)})"

    def _repeated(self, begun: str) -> str:
        """Source of ``begun``, which ends in a block, with further blocks behind it."""
        if not self._parallel or not self._callable():
            return begun
        return f"{begun} ({self._texts.lark(self._format.again)} {self._wholes(self._anywhere)})*"

    def _openings(self, *, anywhere: bool) -> Iterator[Opening]:
        return (opening for opening in self._format.openings if opening.anywhere is anywhere)

    def _blocks(self, *, anywhere: bool) -> Iterator[Block]:
        """Blocks by trigger, one for each tool where only its name tells."""
        for opening in self._openings(anywhere=anywhere):
            if opening.trigger:
                yield self._block(opening, opening.trigger, self._tools)
                continue
            for tool in self._tools:
                (trigger,) = self._format.triggers(opening, [tool.name])
                yield self._block(opening, trigger, [tool])

    def _block(self, opening: Opening, trigger: str, tools: Sequence[Signature]) -> Block:
        start, behind = self._texts.trigger(trigger)
        # A JSON answer may begin as a call does, and llguidance does not go back behind a lexeme.
        parts = [trigger] if opening.anywhere else _JSON_LEXEMES.findall(trigger)
        block = Block(start, start.token or " ".join(map(self._texts.lark, parts)))
        begun = opening.text + self._format.name_prefix
        for tool in tools:
            head = behind + f"{begun}{tool.name}{self._format.name_suffix}"[len(trigger) :]
            block.options.append(" ".join([self._numbered(head), *self._rest_of_block(tool)]))
        return block

    def _rest_of_block(self, tool: Signature) -> Iterator[str]:
        """The arguments of the first call of a block, and what is behind them."""
        between = self._format.between
        yield f"{tool.arguments} {self._texts.lark(self._format.call_suffix)}"
        if between is not None and self._parallel:
            yield f"({self._texts.lark(between)} call)*"
        yield self._texts.lark(self._format.closing)

    def _add_call(self, prefix: str) -> None:
        """Add the rule of a call that follows another one in its block."""
        suffix, behind = self._format.name_suffix, self._texts.lark(self._format.call_suffix)
        calls = [f"{self._numbered(prefix + tool.name + suffix)} {tool.arguments} {behind}" for tool in self._tools]
        self._source.rules.append(f"call: {' | '.join(calls)}")

    def _numbered(self, text: str) -> str:
        """Source of a text that may have the number of a call in it."""
        before, number, behind = text.partition(NUMBER)
        source = self._texts.lark(before)
        return f"{source} /[0-9]{{1,3}}/ {self._texts.lark(behind)}" if number else source

    def _leading(self, block: Block) -> str:
        """The trigger of a block that begins an answer, with white space before it."""
        return f"/{_SPACES}{literal(block.trigger.text)}/"

    def _free(self, *, first: bool) -> str:
        """Name of the terminal of text without a call."""
        name = "FIRST_FREE" if first else "FREE"
        self._source.add(name, f"{self._text()}{self._not_first() if first else ''}")
        return name

    def _after_text(self, *, first: bool) -> str:
        """Source of text up to a trigger, and of the block behind it."""
        found = []
        for index, block in enumerate(self._anywhere):
            if not block.options:
                continue
            before = f"{self._free(first=first)} {block.trigger.token}"
            if block.trigger.text:
                before = f"{'first' if first else 'next'}_{index}"
                whole = f"({self._text()}) /{literal(block.trigger.text)}/"
                self._source.add(before.upper(), f"({whole}){self._not_first() if first else ''}")
                self._source.add(f"{before}[lazy]", before.upper())
            found.append(f"{before} ({' | '.join(block.options)})")
        return " | ".join(found)

    def _text(self) -> str:
        """Expression of text in which no block begins."""
        found = self._patterns(anywhere=True)
        return f"/{_ANY}/" + (f" & ~/{_ANY}({'|'.join(found)}){_ANY}/" if found else "")

    def _not_first(self) -> str:
        """Expression of what free text at the beginning of an answer does not begin with."""
        found = self._patterns(anywhere=False)
        return f" & ~/{_SPACES}({'|'.join(found)}){_ANY}/" if found and not self._format.prose else ""

    def _patterns(self, *, anywhere: bool) -> list[str]:
        """Regular expressions of the triggers, also of those that are special tokens: who reads the
        answer cannot tell one from its text.
        """
        found = []
        for opening in self._openings(anywhere=anywhere):
            if opening.trigger:
                found.append(literal(opening.trigger))
            else:
                begun = literal(opening.text + self._format.name_prefix)
                found.append(f"{begun}{NAME}{literal(self._format.name_suffix[:1])}")
        return found
