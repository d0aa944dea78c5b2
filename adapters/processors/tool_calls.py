"""Tool calls: a call holds the name of a tool and the arguments that its schema describes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from adapters.calls import FORMATS, NAME, CallFormat
from adapters.contract import ArgumentError, ProcessorArgs
from adapters.processors.call_source import CallSource, Signature
from adapters.processors.channel_source import ChannelSource
from adapters.processors.grammar import GrammarProcessor
from adapters.processors.structural_source import (
    MAX_TAGS,
    JsonContent,
    MarkedText,
    RegexContent,
    StructuralSource,
)
from adapters.vocabulary import Vocabulary


class Tool(ProcessorArgs):
    """A function that the model may call."""

    name: str = Field(pattern=f"^{NAME}$", max_length=64, description="Name of the function.")
    parameters: dict[str, Any] | bool = Field(default=True, description="JSON Schema of its arguments.")


_FormatName: TypeAlias = Literal[
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "mistral_args",
    "qwen3_coder",
    "glm45",
    "deepseek_v3",
    "deepseek_v3_1",
    "harmony",
    "phi4",
    "functionary_v3_1",
    "functionary_v3_2",
    "nemotron_deci",
    "granite",
    "granite_3_1",
    "phi4_mini",
    "command_r",
    "exaone4",
    "jamba",
    "glm47",
    "olmo3",
    "cohere2",
    "kimi_k2",
    "neutral",
]
"""The names of `FORMATS`."""


class ToolCalls(GrammarProcessor):
    """Holds every tool call to the name of a tool and to the JSON Schema of its parameters.

    Source: ``tools`` and ``tool_choice`` of OpenAI's API reference; the formats are those of the
    models' chat templates (`adapters.calls`), enforced as `StructuralTag` enforces tags. With
    ``auto`` the model may write free text, calls, or both; with ``required`` the answer is calls
    alone, at least one; with ``none`` it is free text without a call. With ``answer`` an automatic
    choice is between calls alone and what ``answer`` describes. ``tool`` names the only one that
    may be called. Without ``parallel`` there is at most one call, and nothing behind it. The
    arguments of a call are an object, whether or not the schema says so, and where ``properties``
    names arguments, only those are written.
    """

    name = "tool_calls"
    version = 6  # what a reference leads to is open, unless the reference stands alone
    argument = "tools"

    class Args(ProcessorArgs):
        format: _FormatName = Field(description="Format in which the model writes calls.")
        tools: list[Tool] = Field(min_length=1, max_length=MAX_TAGS, description="The functions.")
        choice: Literal["auto", "required", "none"] = Field(
            default="auto", description="Whether the model may or must call."
        )
        tool: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
            default=None, description="The only function that may be called."
        )
        parallel: bool = Field(default=True, description="More than one call is allowed.")
        answer: JsonContent | RegexContent | None = Field(
            default=None, description="Format of an answer without calls; by default free text."
        )

        @model_validator(mode="after")
        def _answer_may_come(self) -> Self:
            if self.answer is not None and self.choice != "auto":
                raise ValueError("answer needs the choice auto")
            return self

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        wanted, names = FORMATS[args.format], [tool.name for tool in args.tools]
        if args.tool is not None and args.tool not in names:
            raise ArgumentError("tool", "expected the name of one of the tools")
        if len(set(names)) < len(names):
            raise ArgumentError("tools", "expected each name once")
        if wanted.prose and wanted.prose[:-1] in names:
            raise ArgumentError("tools", f"the name {wanted.prose[:-1]} means text in the format {wanted.name}")
        source = StructuralSource("tools", vocabulary)
        signatures = [
            Signature(tool.name, _arguments_of(place, tool, wanted, source))
            for place, tool in enumerate(args.tools)
            if args.tool in (None, tool.name) and args.choice != "none"
        ]
        made = _answer_source(args, wanted, source, vocabulary, signatures)
        if args.choice == "none":
            return source.finished(made.free_text())
        if args.choice == "required":
            return source.finished(made.calls())
        if args.answer is not None:
            answer = _answer(args.answer, source)
            return source.finished(f"{made.calls()} | {made.text_before(answer)}")
        return source.finished(made.text_and_calls())


_OF_ANSWER = "the answer"


def _answer_source(
    args: ToolCalls.Args,
    wanted: CallFormat,
    source: StructuralSource,
    vocabulary: Vocabulary,
    tools: list[Signature],
) -> CallSource | ChannelSource:
    texts = MarkedText("tools", vocabulary)
    if wanted.channels is not None:
        ends = wanted.may_end and not vocabulary.eos_token_ids.isdisjoint(vocabulary.tag(wanted.call_suffix))
        return ChannelSource(wanted, source, texts, tools, parallel=args.parallel, ends_with_call=ends)
    return CallSource(wanted, source, texts, tools, parallel=args.parallel)


def _answer(wanted: JsonContent | RegexContent, source: StructuralSource) -> str:
    """Lark expression of an answer without calls; an error names its argument."""
    try:
        return source.content(wanted, _OF_ANSWER)
    except ArgumentError as error:
        argument = "answer.json_schema" if isinstance(wanted, JsonContent) else "answer.pattern"
        raise ArgumentError(argument, error.problem.removeprefix(f"{_OF_ANSWER}: ")) from error


def _arguments_of(place: int, tool: Tool, wanted: CallFormat, source: StructuralSource) -> str:
    """See `_arguments`; an error names the tool by its place."""
    try:
        return _arguments(tool, wanted, source)
    except ArgumentError as error:
        raise ArgumentError(f"tools[{place}].parameters", error.problem) from error


def _arguments(tool: Tool, wanted: CallFormat, source: StructuralSource) -> str:
    """Lark expression of the arguments of a call, an object."""
    of = f"the parameters of {tool.name}"
    if tool.parameters is False:
        return source.json(False, of)
    schema = {} if tool.parameters is True else tool.parameters
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise ArgumentError("tools", f"expected the arguments of {tool.name} to be an object")
    closed = {**schema, "type": "object"}
    closed = _closed(closed) if _may_be_closed(closed) else closed
    if wanted.arguments != "json":
        return source.arguments(closed, wanted.arguments, of)
    return source.json(closed, of)


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

_DEFINITIONS = ("#/$defs/", "#/definitions/")
"""Beginnings of references to what `_closed` leaves as it is."""

_SAYS_NO_MORE = frozenset(("$comment", "$ref", "default", "deprecated", "description", "examples", "title"))
"""Keywords beside which a reference is all that is said of a value."""

_SAYS_MORE = frozenset(
    (
        *_REFERENCES,
        "allOf",
        "anyOf",
        "const",
        "contains",
        "dependencies",
        "dependentSchemas",
        "enum",
        "if",
        "not",
        "oneOf",
        "patternProperties",
    )
)
"""Keywords by which the members and items of a value may need more than ``properties`` and
``items`` say of them.
"""

_OPEN = frozenset(("additionalProperties", "dependentRequired", "minProperties", "unevaluatedProperties"))
"""Further keywords by which an object may have, or need, properties that ``properties`` does not
name.
"""


def _may_be_closed(schema: dict[str, Any]) -> bool:
    """Whether no reference of a schema needs open what `_closed` closes: each leads to a
    definition, or is all that is said of a property, of an item or of one option for either.
    """
    alone, waiting = set[int](), [schema]
    while waiting:
        each = waiting.pop()
        options = each.get("anyOf")
        if each.keys() <= _SAYS_NO_MORE:
            alone.add(id(each))
        elif isinstance(options, list) and each.keys() - _SAYS_NO_MORE == {"anyOf"} and "$ref" not in each:
            waiting += [one for one in options if isinstance(one, dict)]
        elif not _SAYS_MORE & each.keys():
            named = each.get("properties")
            inner = [*(named.values() if isinstance(named, dict) else ()), each.get("items")]
            waiting += [one for one in inner if isinstance(one, dict)]
    found: list[Any] = [schema]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            references = [one[key] for key in _REFERENCES if isinstance(one.get(key), str)]
            if id(one) not in alone and not all(reference.startswith(_DEFINITIONS) for reference in references):
                return False
            found += one.values()
        elif isinstance(one, list):
            found += one
    return True


def _closed(schema: Any) -> Any:
    """The schema, of whose objects none has properties that are not named, but where keywords of
    `_SAYS_MORE` are beside them: what is closed may then be what another keyword needs open.

    Most clients do not say ``additionalProperties: false``, and a small model then invents
    properties without an end. What is generated is valid for the given schema all the same.
    """
    if not isinstance(schema, dict) or _SAYS_MORE & schema.keys():
        return schema
    closed = dict(schema)
    named = schema.get("properties")
    if isinstance(named, dict):
        closed["properties"] = {name: _closed(each) for name, each in named.items()}
        required = schema.get("required", [])
        is_named = isinstance(required, list) and all(isinstance(one, str) and one in named for one in required)
        if is_named and not _OPEN & schema.keys():
            closed["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    return closed
