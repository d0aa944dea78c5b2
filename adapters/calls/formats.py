"""Spellings of tool calls by format: all that a grammar or a parser needs to know.

An answer is text with blocks of calls in it. A block is

    opening  name_prefix NAME name_suffix ARGUMENTS call_suffix  closing

with further calls before ``closing``, ``between`` them, if the format puts several into one block;
another block may follow behind ``again``. Calls are written exactly so, since the processor
`tool_calls` allows nothing else: not a space more, and JSON is compact. What looks similar is text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Notation: TypeAlias = Literal["json", "python", "keywords", "xml", "pairs", "tight_pairs"]
"""Notation of arguments.

``json``: one compact JSON object. ``python``: keyword arguments as in ``a=1, b="x"``, whose values
are Python literals: JSON with ``None``, ``True`` and ``False``. ``keywords``: the same with JSON.
``xml``: for each argument ``<parameter=KEY>\\nVALUE\\n</parameter>\\n``. ``pairs``: for each
argument ``<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n``. ``tight_pairs``: the same
without line ends; see `adapters.calls.xml_values`.
"""

NUMBER = "#"
"""Place of a call's number, of one to three digits, in texts before and behind its name."""

NAME = "[A-Za-z0-9_.-]{1,64}"
"""Regular expression of a function's name."""

WHITE_SPACE = " \t\r\n"
"""Characters that may be before a block that begins an answer."""

NEUTRAL = "neutral"
"""The format for models whose chat template knows no tools: plain text, explained in the prompt."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Beginning of a block of calls.

    Attributes:
        text: The beginning; empty where a call has a beginning of its own.
        trigger: Text that tells a block from free text, which therefore never has it; it or `text`
            begins with the other. Empty: no less than all up to the name of a function and
            the character behind it, whatever the name (`CallFormat.triggers`).
        anywhere: Whether free text may be before it. Otherwise a block begins the answer, with
            nothing before it but `WHITE_SPACE`, and the same text later on is free text.
    """

    text: str
    trigger: str = ""
    anywhere: bool = True


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages that an answer consists of, each in a channel, as GPT-OSS writes them.

    A message is ``channel NAME message TEXT end``; ``start`` is before every one but the first,
    since the prompt ends in it. The last one may lack its ``end``.

    Attributes:
        start: Text before the channel.
        channel: Text before the name of the channel.
        message: Text between the name and what the message says.
        end: End of a message that is no call.
        thinking: Channel of the thinking.
        text: Channels of what the user is told.
    """

    start: str
    channel: str
    message: str
    end: str
    thinking: str
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Spelling of the calls of one family of models.

    Attributes:
        name: Name of the format; of those that Dynamo's frontend parses, its parser's name.
        openings: Beginnings of a block, any of which may stand there.
        name_prefix: Text before a function's name; may hold `NUMBER`.
        name_suffix: Text between the name and the arguments; may hold `NUMBER`.
        call_suffix: Text behind the arguments.
        between: Separator of the calls of one block; None if a block holds one call.
        closing: End of a block.
        again: Text between two blocks that follow each other.
        arguments: Notation of the arguments.
        ends: Whether nothing but further calls follows a call: no text.
        special: Texts within the spelling that are special tokens where the tokenizer has them as
            such. An engine leaves those out of an answer unless it is asked for them
            (``skip_special_tokens: false``), and then no call can be found.
        may_end: `call_suffix` may be a token that ends the answer, which is not in its text then.
        prose: Text before free text at the beginning of an answer.
        channels: Messages around text and calls, None if there are none.
    """

    name: str
    openings: tuple[Opening, ...]
    name_prefix: str = '{"name": "'
    name_suffix: str = '", "arguments": '
    call_suffix: str = "}"
    between: str | None = None
    closing: str = ""
    again: str = "\n"
    arguments: Notation = "json"
    ends: bool = False
    special: tuple[str, ...] = ()
    may_end: bool = False
    prose: str = ""
    channels: Channels | None = None

    def triggers(self, opening: Opening, names: Iterable[str]) -> tuple[str, ...]:
        """Texts of which each begins a block.

        Args:
            opening: One of `openings`.
            names: Names of the tools that there are.
        """
        if opening.trigger:
            return (opening.trigger,)
        return tuple(f"{opening.text}{self.name_prefix}{name}{self.name_suffix[:1]}" for name in names)


_CALLS_BEGIN, _CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL_BEGIN, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)

_ALL = (
    CallFormat(name="hermes", openings=(Opening("<tool_call>\n", "<tool_call>"),), closing="\n</tool_call>"),
    CallFormat(
        name="llama3_json",
        ends=True,
        openings=(Opening("<|python_tag|>", "<|python_tag|>"), Opening("", '{"name": "', anywhere=False)),
        name_suffix='", "parameters": ',
        between="; ",
        special=("<|python_tag|>",),
    ),
    CallFormat(
        name="pythonic",
        ends=True,
        openings=(Opening("[", anywhere=False),),
        name_prefix="",
        name_suffix="(",
        call_suffix=")",
        between=", ",
        closing="]",
        arguments="python",
    ),
    CallFormat(
        name="mistral",
        openings=(Opening("[TOOL_CALLS][", "[TOOL_CALLS]"),),
        between=", ",
        closing="]",
        special=("[TOOL_CALLS]",),
    ),
    CallFormat(
        name="mistral_args",
        ends=True,
        openings=(Opening("[TOOL_CALLS]", "[TOOL_CALLS]"),),
        name_prefix="",
        name_suffix="[ARGS]",
        call_suffix="",
        again="",
        special=("[TOOL_CALLS]", "[ARGS]"),
    ),
    CallFormat(
        name="qwen3_coder",
        openings=(Opening("<tool_call>\n", "<tool_call>"),),
        name_prefix="<function=",
        name_suffix=">\n",
        call_suffix="</function>",
        closing="\n</tool_call>",
        arguments="xml",
    ),
    CallFormat(
        name="glm45",
        openings=(Opening("<tool_call>", "<tool_call>"),),
        name_prefix="",
        name_suffix="\n",
        call_suffix="</tool_call>",
        arguments="pairs",
    ),
    CallFormat(
        name="deepseek_v3",
        openings=(Opening(_CALLS_BEGIN, _CALLS_BEGIN),),
        name_prefix=f"{_CALL_BEGIN}function{_SEPARATOR}",
        name_suffix="\n```json\n",
        call_suffix=f"\n```{_CALL_END}",
        between="\n",
        closing=_CALLS_END,
        special=_DEEPSEEK,
    ),
    CallFormat(
        name="deepseek_v3_1",
        openings=(Opening(_CALLS_BEGIN, _CALLS_BEGIN),),
        name_prefix=_CALL_BEGIN,
        name_suffix=_SEPARATOR,
        call_suffix=_CALL_END,
        between="",
        closing=_CALLS_END,
        special=_DEEPSEEK,
    ),
    CallFormat(
        name="harmony",
        ends=True,
        openings=(Opening("<|channel|>commentary to=functions.", "<|channel|>commentary to="),),
        name_prefix="",
        name_suffix=" <|constrain|>json<|message|>",
        call_suffix="<|call|>",
        again="<|start|>assistant",
        special=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
        may_end=True,
        channels=Channels(
            start="<|start|>assistant",
            channel="<|channel|>",
            message="<|message|>",
            end="<|end|>",
            thinking="analysis",
            text=("final", "commentary"),
        ),
    ),
    CallFormat(name="phi4", openings=(Opening("functools[", "functools["),), between=", ", closing="]"),
    CallFormat(
        name="functionary_v3_1",
        openings=(Opening("", "<function="),),
        name_prefix="<function=",
        name_suffix=">",
        call_suffix="</function>",
        again="",
    ),
    CallFormat(
        name="functionary_v3_2",
        ends=True,
        openings=(Opening(">>>"), Opening("", anywhere=False)),
        name_prefix="",
        name_suffix="\n",
        call_suffix="",
        again="",
        prose="all\n",
    ),
    CallFormat(
        name="nemotron_deci",
        openings=(Opening("<TOOLCALL>[", "<TOOLCALL>"),),
        between=", ",
        closing="]</TOOLCALL>",
    ),
    CallFormat(
        name="granite",
        openings=(Opening("<|tool_call|>[", "<|tool_call|>"),),
        between=", ",
        closing="]",
        special=("<|tool_call|>",),
    ),
    CallFormat(name="granite_3_1", openings=(Opening("<tool_call>[", "<tool_call>"),), between=", ", closing="]"),
    CallFormat(
        name="phi4_mini",
        openings=(Opening("<|tool_call|>[", "<|tool_call|>"),),
        between=", ",
        closing="]<|/tool_call|>",
        special=("<|tool_call|>", "<|/tool_call|>"),
    ),
    CallFormat(
        name="command_r",
        openings=tuple(Opening(f"{mark}\n[\n    ", mark) for mark in ("Action: ```json", "Action:\n```json")),
        name_prefix='{\n        "tool_name": "',
        name_suffix='",\n        "parameters": ',
        call_suffix="\n    }",
        between=",\n    ",
        closing="\n]```",
    ),
    CallFormat(name="exaone4", openings=(Opening("<tool_call>", "<tool_call>"),), closing="</tool_call>"),
    CallFormat(
        name="jamba",
        openings=(Opening("<tool_calls>[", "<tool_calls>"),),
        between=", ",
        closing="]</tool_calls>",
    ),
    CallFormat(
        name="glm47",
        openings=(Opening("<tool_call>", "<tool_call>"),),
        name_prefix="",
        name_suffix="",
        call_suffix="</tool_call>",
        again="",
        arguments="tight_pairs",
    ),
    CallFormat(
        name="olmo3",
        openings=(Opening("<function_calls>", "<function_calls>"),),
        name_prefix="",
        name_suffix="(",
        call_suffix=")",
        between="\n",
        closing="</function_calls>",
        arguments="keywords",
    ),
    CallFormat(
        name="cohere2",
        openings=(Opening("<|START_ACTION|>[\n    ", "<|START_ACTION|>"),),
        name_prefix=f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
        name_suffix='", "parameters": ',
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
        special=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    CallFormat(
        name="kimi_k2",
        openings=(Opening("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>"),),
        name_prefix="<|tool_call_begin|>functions.",
        name_suffix=f":{NUMBER}<|tool_call_argument_begin|>",
        call_suffix="<|tool_call_end|>",
        between="",
        closing="<|tool_calls_section_end|>",
        special=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    CallFormat(name=NEUTRAL, openings=(Opening("<tool_call>", "<tool_call>"),), closing="</tool_call>"),
)

FORMATS: dict[str, CallFormat] = {each.name: each for each in _ALL}
"""Formats by name.

Sources: the chat templates of the models; vLLM's and Dynamo's parsers of tool calls; for harmony
OpenAI's description of the format; for ``mistral_args`` mistral-common from tokenizer version 11.
"""
