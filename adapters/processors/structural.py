"""Structural tags and tool calls: free text in which a trigger starts what a grammar describes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple, Self

from llguidance import LLMatcher
from pydantic import Field, model_validator

from adapters.contract import ArgumentError, ProcessorArgs
from adapters.grammars.json_schema import MAX_GRAMMAR
from adapters.processors.grammar import MAX_SOURCE, GrammarProcessor, JsonSchema, literal
from adapters.vocabulary import Vocabulary

MAX_TAGS = 128
MAX_TRIGGERS = 32

_ANY = "(?s:.*)"

_Mark = Annotated[str, Field(min_length=1, max_length=256)]


class JsonContent(ProcessorArgs):
    """Compact JSON that a JSON Schema describes."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool = Field(description="A JSON Schema; true allows any JSON.")


class RegexContent(ProcessorArgs):
    """What a regular expression matches as a whole."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, max_length=MAX_SOURCE, description="In the syntax of Rust's regex crate.")


class Tag(ProcessorArgs):
    """One section: what it begins with, what is in it, what it ends with."""

    type: Literal["tag"] = "tag"
    begin: _Mark = Field(description="Begins with one of the triggers.")
    content: JsonContent | RegexContent
    end: str = Field(max_length=256, description="Text behind the content; may be empty.")


class TriggeredTags(ProcessorArgs):
    """Free text with tags in it."""

    type: Literal["triggered_tags"]
    triggers: list[_Mark] = Field(min_length=1, max_length=MAX_TRIGGERS, description="Texts that start a tag.")
    tags: list[Tag] = Field(min_length=1, max_length=MAX_TAGS, description="The tags.")
    at_least_one: bool = Field(default=False, description="The answer begins with a tag.")
    stop_after_first: bool = Field(default=False, description="The answer ends behind the first tag.")


def format_of(response_format: Any) -> Any:
    """The ``format`` of `StructuralTag` for data of a ``response_format``, not checked further.

    Args:
        response_format: ``{"type": "structural_tag", "format": {...}}``; its older form with
            ``structures`` (``begin``, ``schema``, ``end``) and ``triggers``; or the format itself.
    """
    if not isinstance(response_format, dict):
        return response_format
    if "format" in response_format:
        return response_format["format"]
    if "structures" not in response_format:
        return response_format
    structures = response_format["structures"]
    tags = [_tag_of(structure) for structure in structures] if isinstance(structures, list) else structures
    return {"type": "triggered_tags", "triggers": response_format.get("triggers", []), "tags": tags}


def _tag_of(structure: Any) -> Any:
    if not isinstance(structure, dict):
        return structure
    content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
    return {"content": content, **{key: value for key, value in structure.items() if key != "schema"}}


class StructuralTag(GrammarProcessor):
    """Lets the model write freely, and holds it to a grammar wherever it starts a tag.

    Source: ``triggered_tags`` of XGrammar's structural tags, enforced by llguidance's lazy lexemes.
    The free text never contains a trigger; where the model has written one, only the tags that
    begin with it can follow, then free text again. A trigger may begin with a special token, which
    then is the whole trigger; other special tokens are masked. With ``at_least_one`` the answer
    begins with a tag, without free text before it.
    """

    name = "structural_tag"
    argument = "format"

    class Args(ProcessorArgs):
        format: TriggeredTags = Field(description="As in XGrammar's structural tags.")

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        wanted, source = args.format, _Source("format", vocabulary)
        blocks = [_block(trigger, wanted.tags, source) for trigger in wanted.triggers]
        started = sum(len(block.options) for block in blocks)
        if started != len(wanted.tags):
            raise ArgumentError("format", "expected the begin of each tag to begin with exactly one of the triggers")
        return source.grammar(blocks, begins=wanted.at_least_one, many=not wanted.stop_after_first)


class Tool(ProcessorArgs):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64, description="Name of the function.")
    parameters: dict[str, Any] | bool = Field(default=True, description="JSON Schema of its arguments.")


class _Format(NamedTuple):
    """How a family of models writes calls.

    Attributes:
        trigger: What it begins with in free text.
        open: The whole beginning of a block of calls.
        call: One call, around the function's name and before its arguments.
        end: What closes the call.
        between: What separates calls in one block, None if a block holds one.
        close: What closes the block.
    """

    trigger: str
    open: str
    call: tuple[str, str]
    end: str
    between: str | None
    close: str


_CALL = ('{"name": "', '", "arguments": ')

FORMATS: dict[str, _Format] = {
    "hermes": _Format("<tool_call>", "<tool_call>\n", _CALL, "}", None, "\n</tool_call>"),
    "llama3_json": _Format("<|python_tag|>", "<|python_tag|>", ('{"name": "', '", "parameters": '), "}", None, ""),
    "mistral": _Format("[TOOL_CALLS]", "[TOOL_CALLS][", _CALL, "}", ", ", "]"),
    "nemotron_deci": _Format("<TOOLCALL>", "<TOOLCALL>[", _CALL, "}", ", ", "]</TOOLCALL>"),
    "phi4": _Format("functools[", "functools[", _CALL, "}", ", ", "]"),
}
"""By the names that Dynamo's frontend gives their parsers (``--dyn-tool-call-parser``)."""


class ToolCalls(GrammarProcessor):
    """Holds every tool call to the name of a tool and to the JSON Schema of its parameters.

    Source: ``tools`` and ``tool_choice`` of OpenAI's API reference; the formats are those of
    Dynamo's tool-call parsers, enforced as `StructuralTag` enforces tags. With ``auto`` the model
    may write free text, calls, or both; with ``required`` the answer is calls alone, at least one;
    with ``none`` it is free text without a call. With ``answer`` an automatic choice is between
    calls alone and what ``answer`` describes. ``tool`` names the only one that may be called.
    Without ``parallel`` there is at most one call, and nothing behind it. The arguments of a call
    are a JSON object, whether or not the schema says so.
    """

    name = "tool_calls"
    argument = "tools"

    class Args(ProcessorArgs):
        format: Literal["hermes", "llama3_json", "mistral", "nemotron_deci", "phi4"] = Field(
            description="How the model writes calls."
        )
        tools: list[Tool] = Field(min_length=1, max_length=MAX_TAGS, description="The functions.")
        choice: Literal["auto", "required", "none"] = Field(
            default="auto", description="Whether the model may or must call."
        )
        tool: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
            default=None, description="The only function that may be called."
        )
        parallel: bool = Field(default=True, description="More than one call is allowed.")
        answer: JsonContent | RegexContent | None = Field(
            default=None, description="What an answer without calls is; by default free text."
        )

        @model_validator(mode="after")
        def _answer_may_come(self) -> Self:
            if self.answer is not None and self.choice != "auto":
                raise ValueError("answer needs the choice auto")
            return self

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        tools = [tool for tool in args.tools if args.tool in (None, tool.name)]
        if not tools:
            raise ArgumentError("tool", "expected the name of one of the tools")
        if len({tool.name for tool in args.tools}) < len(args.tools):
            raise ArgumentError("tools", "expected each name once")
        wanted, source = FORMATS[args.format], _Source("tools", vocabulary)
        start, rest = source.trigger(wanted.trigger)
        block = _Block(start, start.token or source.text(wanted.trigger))
        if args.choice == "none":
            return source.free_text([block])
        head, behind = wanted.call
        calls = [
            f"{source.text(head + tool.name + behind)} {source.arguments(tool)} {source.text(wanted.end)}"
            for tool in tools
        ]
        source.rules.append(f"call: {' | '.join(calls)}")
        more = f" ({source.text(wanted.between)} call)*" if wanted.between and args.parallel else ""
        opening = source.text(rest + wanted.open[len(wanted.trigger) :])
        block.options.append(f"{opening} call{more} {source.text(wanted.close)}")
        again = f' ("\\n" {block.whole})*' if args.parallel else ""
        if args.choice == "required":
            return source.finished(f"{block.whole}{again}")
        if args.answer is not None:
            answer = source.content(args.answer, "the answer")
            return source.finished(f"{block.whole}{again} | {answer}")
        return source.grammar([block], begins=False, many=args.parallel)


@dataclass(frozen=True, slots=True)
class _Trigger:
    """What ends the free text: a text, or a special token (its Lark expression)."""

    text: str = ""
    token: str = ""


@dataclass(slots=True)
class _Block:
    """What one trigger starts.

    Attributes:
        trigger: It.
        lark: It, as it is written where no free text is before it.
        options: Lark expressions of what may follow.
    """

    trigger: _Trigger
    lark: str
    options: list[str] = field(default_factory=list)

    @property
    def whole(self) -> str:
        """The trigger and what follows, without free text."""
        return f"{self.lark} ({' | '.join(self.options)})"


class _Source:
    """A Lark grammar in the making, with the grammars of the contents beside it.

    Args:
        argument: Of the processor, for errors.
        vocabulary: For special tokens, which a grammar names by id.
    """

    def __init__(self, argument: str, vocabulary: Vocabulary) -> None:
        self._argument, self._vocabulary = argument, vocabulary
        self._contents: list[dict[str, Any]] = []
        self.rules: list[str] = []

    def json(self, schema: dict[str, Any] | bool, of: str) -> str:
        """Lark expression of compact JSON that matches ``schema``.

        Args:
            schema: A JSON Schema.
            of: What has it, for errors.
        """
        try:
            made = JsonSchema.grammar(JsonSchema.Args.model_validate({"schema": schema}), self._vocabulary)
        except ArgumentError as error:
            raise ArgumentError(self._argument, f"{of}: {error.problem}") from error
        return self._content(made)

    def arguments(self, tool: Tool) -> str:
        """Lark expression of the arguments of a call, an object."""
        of = f"the parameters of {tool.name}"
        if tool.parameters is False:
            return self.json(False, of)
        schema = {} if tool.parameters is True else tool.parameters
        types = schema.get("type", "object")
        if "object" not in (types if isinstance(types, list) else [types]):
            raise ArgumentError(self._argument, f"expected the arguments of {tool.name} to be an object")
        return self.json({**schema, "type": "object"}, of)

    def content(self, content: JsonContent | RegexContent, of: str) -> str:
        """Lark expression of a content.

        Args:
            content: The content.
            of: What has it, for errors.
        """
        return self.json(content.json_schema, of) if isinstance(content, JsonContent) else self.regex(content.pattern)

    def regex(self, pattern: str) -> str:
        """Lark expression of what ``pattern`` matches."""
        return self._content(str(LLMatcher.grammar_from_regex(pattern)))

    def _content(self, grammar: str) -> str:
        name = f"content_{len(self._contents)}"
        self._contents.append({**json.loads(grammar)["grammars"][0], "name": name})
        return f"@{name}"

    def text(self, text: str) -> str:
        """Lark expression of ``text``; special tokens in it are those tokens."""
        return " ".join(part if is_token else f"/{literal(part)}/" for is_token, part in self._pieces(text))

    def trigger(self, text: str) -> tuple[_Trigger, str]:
        """What ends the free text, and what of ``text`` is behind it."""
        pieces = self._pieces(text)
        if not pieces[0][0]:
            if len(pieces) > 1:
                problem = "a trigger with a special token must begin with it"
                raise ArgumentError(self._argument, problem)
            return _Trigger(text=text), ""
        behind = pieces[1:]
        if any(is_token for is_token, _ in behind):
            raise ArgumentError(self._argument, "a trigger may hold one special token")
        return _Trigger(token=pieces[0][1]), "".join(part for _, part in behind)

    def starts_special(self, text: str) -> bool:
        """Whether ``text`` begins with a special token."""
        return bool(text) and self._pieces(text)[0][0]

    def _pieces(self, text: str) -> list[tuple[bool, str]]:
        """Runs of ``text``: whether one is a token without bytes, hence a special one, and its Lark
        expression or the text.
        """
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

    def grammar(self, blocks: Sequence[_Block], *, begins: bool, many: bool) -> str:
        """The grammar of free text with ``blocks`` in it.

        Args:
            blocks: What each trigger starts.
            begins: A block comes first.
            many: More than one may come.

        Raises:
            ArgumentError: one trigger contains another, or the grammar is too long.
        """
        texts = [block.trigger.text for block in blocks if block.trigger.text]
        for text in texts:
            if sum(text.count(other) > 0 for other in texts) > 1:
                raise ArgumentError(self._argument, "no trigger may contain another one")
        self._free(texts)
        for index, block in enumerate(blocks):
            if block.trigger.text:
                self.rules.append(f"trigger_{index}[lazy]: /{_ANY}{literal(block.trigger.text)}/")
            before = f"trigger_{index}" if block.trigger.text else f"FREE {block.trigger.token}"
            self.rules.append(f"block_{index}: {before} ({' | '.join(block.options)})")
        any_block = " | ".join(f"block_{index}" for index in range(len(blocks)))
        first = " | ".join(block.whole for block in blocks)
        if begins:
            return self.finished(f"({first}) ({any_block})* FREE" if many else f"{first}")
        return self.finished(f"({any_block})* FREE" if many else f"FREE | {any_block}")

    def free_text(self, blocks: Sequence[_Block]) -> str:
        """The grammar of free text in which no block starts."""
        self._free([block.trigger.text for block in blocks if block.trigger.text])
        return self.finished("FREE")

    def _free(self, texts: Sequence[str]) -> None:
        """The rule of free text that holds none of ``texts``."""
        without = f" & ~/{_ANY}({'|'.join(map(literal, texts))}){_ANY}/" if texts else ""
        self.rules.append(f"FREE: /{_ANY}/{without}")

    def finished(self, start: str) -> str:
        """The whole, in llguidance's JSON form."""
        lark = "\n".join([f"start: {start}", *self.rules])
        made = json.dumps({"grammars": [{"name": "structure", "lark_grammar": lark}, *self._contents]})
        if len(made) > MAX_GRAMMAR:
            raise ArgumentError(self._argument, f"expected a grammar of at most {MAX_GRAMMAR} characters in all")
        return made


def _block(trigger: str, tags: Sequence[Tag], source: _Source) -> _Block:
    """What ``trigger`` starts."""
    found, rest = source.trigger(trigger)
    block = _Block(found, found.token or source.text(trigger))
    for tag in tags:
        if not tag.begin.startswith(trigger):
            continue
        inner = source.content(tag.content, f"the tag {json.dumps(tag.begin)[:40]}")
        begin = source.text(rest + tag.begin[len(trigger) :])
        if source.starts_special(tag.begin) and not found.token:
            raise ArgumentError("format", "a trigger must not end inside a special token of a tag")
        block.options.append(f"{begin} {inner} {source.text(tag.end)}".strip())
    if not block.options:
        raise ArgumentError("format", f"no tag begins with the trigger {json.dumps(trigger)[:40]}")
    return block
