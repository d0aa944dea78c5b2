"""The format of a model's tool calls, found by rendering its chat template.

A template that writes an earlier call into the prompt writes it as the model does. Where it writes
none, what it tells the model of calls is evidence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from adapters.calls.formats import FORMATS, NEUTRAL, NUMBER, CallFormat
from adapters.calls.template import ChatTemplate, TemplateFailed
from adapters.calls.writing import written_calls
from adapters.calls.xml_values import TAGS

_TOOL, _KEY, _VALUE, _RESULT, _SYSTEM = "zqtool", "zqkey", "zqvalue", "zqresult", "zqsystem"
"""Words that no template has of its own."""

_SHORT_ID, _LONG_ID = "zq3456789", "call_zq3456789012345678901"
_USER = {"role": "user", "content": "Hello"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
        },
    }
]
_BEFORE = 12
"""Characters of the prompt's end by which the beginning of an answer is known."""

_DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_MARKS: tuple[tuple[str, str], ...] = (
    ("harmony", r"to=functions\..*<\|channel\|>|<\|channel\|>.*to=functions"),
    ("qwen3_coder", r"<tool_call>.*<function=.*<parameter="),
    ("functionary_v3_1", r"<function=(?!.*<parameter=)"),
    ("phi4", r"functools\["),
    ("nemotron_deci", r"<TOOLCALL>"),
    ("kimi_k2", r"<\|tool_calls_section_begin\|>"),
    ("cohere2", r"<\|START_ACTION\|>"),
    ("command_r", r"Action:.*```json.*\"tool_name\""),
    ("phi4_mini", r"<\|tool_call\|>.*<\|/tool_call\|>"),
    ("granite_3_1", r"<tool_call>\["),
    ("granite", r"<\|tool_call\|>(?!.*<\|/tool_call\|>)"),
    ("olmo3", r"<function_calls>(?!.*<invoke)"),
    ("jamba", r"<tool_calls>(?!.*<tool_call>)"),
    ("mistral_args", r"\[TOOL_CALLS\].*\[(?:ARGS|CALL_ID)\]"),
    ("mistral", r"\[TOOL_CALLS\]|\[AVAILABLE_TOOLS\]"),
    ("deepseek_v3", f"{_DEEPSEEK}.*```json"),
    ("deepseek_v3_1", _DEEPSEEK),
    ("functionary_v3_2", r">>>(?:\$\{recipient\}|all|'|\{)"),
    ("exaone4", r'<tool_call>\{\s*\\?"name\\?".*\\?"arguments\\?"'),
    ("hermes", r'<tool_call>\s*\\?n?\s*\{\s*\\?"name\\?".*\\?"arguments\\?"'),
    ("pythonic", r"\[func(?:tion)?_name1?\("),
    ("llama3_json", r'\{\s*\\?"name\\?": function name, \\?"parameters\\?":'),
)
"""Regular expressions by which a format is known where a template writes no call, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSupport:
    """Tools as a chat template knows them.

    Attributes:
        format: Name of the format of calls.
        evidence: Reason for that format, for the operator.
        tools: Whether the template tells the model which tools there are.
        calls: Whether it writes earlier calls.
        several: Whether it writes several calls of one message.
        results: Whether it writes results of calls, messages of the role ``tool``.
        system: Whether it writes a system message.
        short_ids: Whether it refuses ids of calls but those of nine letters and digits.
        named_ids: Whether it writes the id of a call, ``functions.NAME:NUMBER``, for its name.
    """

    format: str
    evidence: str
    tools: bool = False
    calls: bool = False
    several: bool = False
    results: bool = False
    system: bool = True
    short_ids: bool = False
    named_ids: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the template writes all that a client may send."""
        writes_all = self.tools and self.calls and self.several and self.results
        return writes_all and not self.short_ids and not self.named_ids


def tool_support(
    template: ChatTemplate | None, added_tokens: Collection[str] = (), wanted: str | None = None
) -> ToolSupport:
    """The format of calls, and what the template knows of tools.

    Args:
        template: The checkpoint's template, None if it has none.
        added_tokens: Texts of the tokens that were added to the tokenizer's vocabulary.
        wanted: Name of a format that is not to be looked for.
    """
    if template is None:
        return ToolSupport(format=wanted or NEUTRAL, evidence="there is no chat template")
    system = _writes(template, [{"role": "system", "content": _SYSTEM}, _USER], _SYSTEM)
    if not _writes(template, [_USER], _TOOL, tools=True):
        return ToolSupport(format=wanted or NEUTRAL, evidence="the chat template writes no tools", system=system)
    shown, short_ids = _with_a_call(template)
    found, evidence = _format(template, shown, added_tokens) if wanted is None else (wanted, "it is named")
    if found == NEUTRAL:
        return ToolSupport(format=NEUTRAL, evidence=evidence, system=system)
    return ToolSupport(
        format=found,
        evidence=evidence,
        tools=True,
        calls=shown is not None,
        several=_writes_several(template, _SHORT_ID if short_ids else _LONG_ID),
        results=shown is not None and _RESULT in shown,
        system=system,
        short_ids=short_ids,
        named_ids=shown is not None and _named_id(found) is not None and _spelled_format(template, shown) != found,
    )


def _format(template: ChatTemplate, shown: str | None, added_tokens: Collection[str]) -> tuple[str, str]:
    """The format of a template that writes tools, and the reason."""
    spelled = None if shown is None else _spelled_format(template, shown) or _id_format(template)
    if spelled is not None:
        return spelled, "the chat template writes a call so"
    marked = _marked_format(template, added_tokens)
    if marked is not None:
        return marked, "the chat template describes calls so"
    return NEUTRAL, "the chat template writes tools, in a format that is not known"


def _writes(template: ChatTemplate, messages: Sequence[dict[str, Any]], word: str, *, tools: bool = False) -> bool:
    try:
        return word in template.render(messages, _TOOLS if tools else None)
    except TemplateFailed:
        return False


def _history(call_id: str, arguments: Any, *, result: bool) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    messages: list[dict[str, Any]] = [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = {"role": "tool", "tool_call_id": call_id, "name": _TOOL, "content": _RESULT}
    return [*messages, answer] if result else messages


def _with_a_call(template: ChatTemplate) -> tuple[str | None, bool]:
    """The prompt of a chat with a call in it, None if the template does not write it; and whether
    ids must be short.
    """
    for result in (True, False):
        for call_id in (_LONG_ID, _SHORT_ID):
            for arguments in ({_KEY: _VALUE}, json.dumps({_KEY: _VALUE})):
                try:
                    shown = template.render(_history(call_id, arguments, result=result), _TOOLS)
                except TemplateFailed:
                    continue
                if _VALUE in shown:
                    return shown, call_id == _SHORT_ID
    return None, False


def _named_id(format: str) -> str | None:
    """The id of the sentinel's call in a format whose calls have their ids for names, or None."""
    wanted = FORMATS[format]
    _, begun, function = wanted.name_prefix.rpartition("functions.")
    ending, number, _ = wanted.name_suffix.partition(NUMBER)
    return f"{begun}{function}{_TOOL}{ending}0" if begun and number else None


def _id_format(template: ChatTemplate) -> str | None:
    """The format of a template that writes a call's id for its name."""
    ids = {format: call_id for format in FORMATS if (call_id := _named_id(format)) is not None}
    for format, call_id in ids.items():
        for arguments in ({_KEY: _VALUE}, json.dumps({_KEY: _VALUE})):
            try:
                shown = template.render(_history(call_id, arguments, result=False), _TOOLS)
            except TemplateFailed:
                continue
            if _spelled_format(template, shown) == format:
                return format
    return None


def _writes_several(template: ChatTemplate, call_id: str) -> bool:
    for write in (dict, json.dumps):
        chats = [_history(call_id[:-1] + last, write({_KEY: _VALUE + last}), result=True) for last in "12"]
        (user, first, answer), (_, second, other) = chats
        messages = [user, {**first, "tool_calls": [*first["tool_calls"], *second["tool_calls"]]}, answer, other]
        if all(_writes(template, messages, _VALUE + last, tools=True) for last in "12"):
            return True
    return False


def _spelled_format(template: ChatTemplate, shown: str) -> str | None:
    """The format in which ``shown`` has the call: of several, the one that says most of it."""
    text = _squeezed(shown)
    before = _squeezed(template.render([_USER], _TOOLS))[-_BEFORE:]
    found = [
        (len(head), _is_opened(wanted, shown), _squeezed(wanted.closing) in text, len(wanted.closing), wanted.name)
        for wanted in FORMATS.values()
        if wanted.name != NEUTRAL
        for head in _heads(wanted, before)
        if head in text and (wanted.arguments not in TAGS or _beginning(wanted) in shown)
    ]
    return max(found, key=itemgetter(0, 1, 2, 3))[4] if found else None


def _is_opened(wanted: CallFormat, shown: str) -> bool:
    """Whether the opening is there with its white space, which tells hermes and EXAONE apart."""
    return f"{wanted.openings[0].text}{wanted.name_prefix[:1]}" in shown


def _beginning(wanted: CallFormat) -> str:
    """Beginning of the sentinel's call, with the white space that tells some formats apart."""
    call = written_calls(wanted, [(_TOOL, {_KEY: _VALUE})])
    return call[: call.index(_VALUE)] + _VALUE


def _heads(wanted: CallFormat, before: str) -> list[str]:
    """Beginnings of the sentinel's call, without white space."""
    behind = _squeezed(_beginning(wanted).removeprefix(wanted.openings[0].text))
    if wanted.channels is not None:  # a template writes the recipient before the channel
        return [f"assistantto=functions.{_TOOL}{wanted.channels.channel}commentary"]
    return [
        f"{_squeezed(opening.text)}{behind}" if opening.anywhere else f"{before}{_squeezed(opening.text)}{behind}"
        for opening in wanted.openings
    ]


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _marked_format(template: ChatTemplate, added_tokens: Collection[str]) -> str | None:
    try:
        shown = template.render([_USER], _TOOLS)
    except TemplateFailed:
        shown = ""
    text = "\n".join([shown, *template.sources.values()])
    for name, mark in _MARKS:
        if re.search(mark, text, re.DOTALL):
            return "mistral_args" if name == "mistral" and "[ARGS]" in added_tokens else name
    return None
