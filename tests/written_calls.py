"""Calls as models write them, spelled out by hand for each format."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, NamedTuple

from adapters.calls.xml_values import value_of
from adapters.grammars.json_schema import argument_kinds


class Call(NamedTuple):
    """One call."""

    name: str
    arguments: dict[str, Any]


def _deepseek(text: str) -> str:
    """``text`` with the characters of DeepSeek's special tokens in place of ``!`` and ``~``."""
    return text.replace("!", "\uff5c").replace("~", "\u2581")


_DEEPSEEK_3 = _deepseek("<!tool~call~begin!>function<!tool~sep!>%s\n```json\n%s\n```<!tool~call~end!>")
_DEEPSEEK_3_1 = _deepseek("<!tool~call~begin!>%s<!tool~sep!>%s<!tool~call~end!>")
_COMMAND_R = '{\n        "tool_name": "%s",\n        "parameters": %s\n    }'
_CALLS_BEGIN, _CALLS_END = _deepseek("<!tool~calls~begin!>"), _deepseek("<!tool~calls~end!>")

_SPELLED = {
    "hermes": ("", '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n", ""),
    "llama3_json": ("<|python_tag|>", '{"name": "%s", "parameters": %s}', "; ", ""),
    "llama3_json, bare": ("", '{"name": "%s", "parameters": %s}', "; ", ""),
    "pythonic": ("[", "%s(%s)", ", ", "]"),
    "mistral": ("[TOOL_CALLS][", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "mistral_args": ("", "[TOOL_CALLS]%s[ARGS]%s", "", ""),
    "qwen3_coder": ("", "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>", "\n", ""),
    "glm45": ("", "<tool_call>%s\n%s</tool_call>", "\n", ""),
    "deepseek_v3": (_CALLS_BEGIN, _DEEPSEEK_3, "\n", _CALLS_END),
    "deepseek_v3_1": (_CALLS_BEGIN, _DEEPSEEK_3_1, "", _CALLS_END),
    "harmony": (
        "",
        "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>",
        "<|start|>assistant",
        "",
    ),
    "phi4": ("functools[", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "functionary_v3_1": ("", "<function=%s>%s</function>", "", ""),
    "functionary_v3_2": ("", "%s\n%s", ">>>", ""),
    "nemotron_deci": ("<TOOLCALL>[", '{"name": "%s", "arguments": %s}', ", ", "]</TOOLCALL>"),
    "granite": ("<|tool_call|>[", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "granite_3_1": ("<tool_call>[", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "phi4_mini": ("<|tool_call|>[", '{"name": "%s", "arguments": %s}', ", ", "]<|/tool_call|>"),
    "command_r": ("Action: ```json\n[\n    ", _COMMAND_R, ",\n    ", "\n]```"),
    "command_r, on two lines": ("Action:\n```json\n[\n    ", _COMMAND_R, ",\n    ", "\n]```"),
    "exaone4": ("", '<tool_call>{"name": "%s", "arguments": %s}</tool_call>', "\n", ""),
    "jamba": ("<tool_calls>[", '{"name": "%s", "arguments": %s}', ", ", "]</tool_calls>"),
    "glm47": ("", "<tool_call>%s%s</tool_call>", "", ""),
    "olmo3": ("<function_calls>", "%s(%s)", "\n", "</function_calls>"),
    "cohere2": (
        "<|START_ACTION|>[\n    ",
        '{"tool_call_id": "#", "tool_name": "%s", "parameters": %s}',
        ",\n    ",
        "\n]<|END_ACTION|>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.%s:#<|tool_call_argument_begin|>%s<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "neutral": ("", '<tool_call>{"name": "%s", "arguments": %s}</tool_call>', "\n", ""),
}

SPELLINGS = tuple(_SPELLED)
"""Names of formats, with a remark where one has two spellings."""

ONLY_FIRST = ("llama3_json, bare", "pythonic")
"""Spellings of calls that can only begin an answer."""


def format_of(spelling: str) -> str:
    """Name of the format."""
    return spelling.partition(",")[0]


def written(spelling: str, *calls: Call) -> str:
    """The text of ``calls``, which follow each other."""
    before, call, between, after = _SPELLED[spelling]
    texts = (
        call.replace("#", str(index)) % (each.name, _arguments(spelling, each.arguments))
        for index, each in enumerate(calls)
    )
    return before + between.join(texts) + after


def said(spelling: str, text: str) -> str:
    """Free text at the beginning of an answer."""
    if spelling == "harmony":
        return f"<|channel|>final<|message|>{text}"
    return f"all\n{text}" if spelling == "functionary_v3_2" else text


def said_before_calls(spelling: str, text: str, *calls: Call) -> str:
    """Free text, and calls behind it."""
    behind = written(spelling, *calls)
    if spelling == "harmony":
        return f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant{behind}"
    return f"all\n{text}>>>{behind}" if spelling == "functionary_v3_2" else text + behind


def _arguments(spelling: str, arguments: dict[str, Any]) -> str:
    if spelling == "pythonic":
        return ", ".join(f"{name}={_python(value)}" for name, value in arguments.items())
    if spelling == "olmo3":
        return ", ".join(f"{name}={_json(value)}" for name, value in arguments.items())
    if spelling == "glm47":
        pairs = ((name, _raw(value)) for name, value in arguments.items())
        return "".join(f"<arg_key>{name}</arg_key><arg_value>{value}</arg_value>" for name, value in pairs)
    if spelling == "qwen3_coder":
        return "".join(f"<parameter={name}>\n{_raw(value)}\n</parameter>\n" for name, value in arguments.items())
    if spelling == "glm45":
        pairs = ((name, _raw(value)) for name, value in arguments.items())
        return "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in pairs)
    return _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_python, value)) + "]"
    return _json(value) if isinstance(value, str) else repr(value)


def read_one(spelling: str, text: str, schema: dict[str, Any]) -> Call:
    """The only call of an answer."""
    before, call, _, after = _SPELLED[spelling]
    head, middle, tail = (re.escape(part).replace(r"\#", "[0-9]{1,3}") for part in call.split("%s"))
    middle = middle or "(?=<)"  # what is behind a name alone, too
    found = re.fullmatch(f"{re.escape(before)}{head}([A-Za-z0-9_.-]+?){middle}(.*){tail}{re.escape(after)}", text, re.S)
    assert found, text
    return Call(found[1], _read_arguments(spelling, found[2], schema))


_ARGUMENT = {
    "qwen3_coder": r"<parameter=(.*?)>\n(.*?)\n</parameter>\n",
    "glm45": r"<arg_key>(.*?)</arg_key>\n<arg_value>(.*?)</arg_value>\n",
    "glm47": r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>",
}
"""Regular expressions of one argument between tags."""


def _read_arguments(spelling: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    if spelling == "pythonic":
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    if spelling == "olmo3":
        words = {"null": None, "true": True, "false": False}
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        return {str(each.arg): eval(ast.unparse(each.value), {}, words) for each in call.keywords}
    if spelling in _ARGUMENT:
        kinds = argument_kinds(schema)
        found = re.findall(_ARGUMENT[spelling], text, re.S)
        assert re.fullmatch(f"(?:{_ARGUMENT[spelling]})*", text, re.S)
        return {name: value_of(value, kinds[name]) for name, value in found}
    read: dict[str, Any] = json.loads(text)
    return read
