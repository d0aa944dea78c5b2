"""Tool calls: a call holds the name of a tool and the arguments that its schema describes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from adapters.contract import ArgumentError, ProcessorArgs
from adapters.processors.grammar import GrammarProcessor
from adapters.processors.structural_source import (
    MAX_TAGS,
    Block,
    JsonContent,
    MarkedText,
    RegexContent,
    StructuralSource,
)
from adapters.vocabulary import Vocabulary


class Tool(ProcessorArgs):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64, description="Name of the function.")
    parameters: dict[str, Any] | bool = Field(default=True, description="JSON Schema of its arguments.")


class _Format(NamedTuple):
    """Spelling of calls of one family of models.

    Attributes:
        trigger: Beginning that tells a block of calls from free text.
        open: The whole beginning of a block of calls.
        call: One call, around the function's name and before its arguments.
        end: End of the call.
        between: Separator of the calls of one block, None if a block holds one.
        close: End of the block.
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
"""Formats by the names that Dynamo's frontend gives their parsers (``--dyn-tool-call-parser``)."""


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
        wanted = FORMATS[args.format]
        source, texts = StructuralSource("tools", vocabulary), MarkedText("tools", vocabulary)
        start, rest = texts.trigger(wanted.trigger)
        block = Block(start, start.token or texts.lark(wanted.trigger))
        if args.choice == "none":
            return source.free_text([block])
        head, behind = wanted.call
        calls = [
            f"{texts.lark(head + tool.name + behind)} {_arguments(tool, source)} {texts.lark(wanted.end)}"
            for tool in tools
        ]
        source.rules.append(f"call: {' | '.join(calls)}")
        more = f" ({texts.lark(wanted.between)} call)*" if wanted.between and args.parallel else ""
        opening = texts.lark(rest + wanted.open[len(wanted.trigger) :])
        block.options.append(f"{opening} call{more} {texts.lark(wanted.close)}")
        again = f' ("\\n" {block.whole})*' if args.parallel else ""
        if args.choice == "required":
            return source.finished(f"{block.whole}{again}")
        if args.answer is not None:
            answer = source.content(args.answer, "the answer")
            return source.finished(f"{block.whole}{again} | {answer}")
        return source.grammar([block], begins=False, many=args.parallel)


def _arguments(tool: Tool, source: StructuralSource) -> str:
    """Lark expression of the arguments of a call, an object."""
    of = f"the parameters of {tool.name}"
    if tool.parameters is False:
        return source.json(False, of)
    schema = {} if tool.parameters is True else tool.parameters
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise ArgumentError("tools", f"expected the arguments of {tool.name} to be an object")
    return source.json({**schema, "type": "object"}, of)
