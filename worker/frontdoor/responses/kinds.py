"""Types of items, parts, tools, choices of tools and ``include`` values of a Responses request.

`docs/responses.md` has these tables, and tests compare them with the document and with the types of
the installed `openai` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.values import shown
from worker.requests.fields import Fate


@dataclass(frozen=True, slots=True)
class Kind:
    """One value of a type.

    Attributes:
        name: The value.
        fate: One of `Fate`.
        why: Meaning here, or reason for the refusal.
        keys: Fields of an object of this type.
    """

    name: str
    fate: Fate
    why: str
    keys: tuple[str, ...] = ()


def _table(*kinds: Kind) -> Mapping[str, Kind]:
    return {kind.name: kind for kind in kinds}


def _refused(why: str, *names: str) -> tuple[Kind, ...]:
    return tuple(Kind(name, "refused", why) for name in names)


_NO_SUCH_PART = "this worker serves text and pictures"
_NO_SUCH_TOOL = "there are no built-in tools"
_NO_COMPACTION = "contexts are not compacted here"
_NO_PROGRAMS = "tools are called by the model alone"
_NO_CUSTOM = "custom tools are not supported; use a function"

ITEMS = _table(
    Kind(
        "message",
        "honoured",
        "A message. Roles: user, assistant, system, and developer, which is given to the chat template as system. "
        "phase has no effect.",
        ("type", "role", "content", "id", "status", "phase"),
    ),
    Kind(
        "function_call",
        "honoured",
        "A call of the assistant's; it joins the message before it. parsed_arguments, which the openai package adds, "
        "has no effect.",
        (
            *("type", "id", "call_id", "name", "arguments", "parsed_arguments", "status", "caller", "namespace"),
            *("async", "created_by"),
        ),
    ),
    Kind(
        "function_call_output",
        "honoured",
        "The result of a call that stands before it: a text, or parts of type input_text. name has no effect.",
        ("type", "id", "call_id", "output", "status", "caller", "name", "namespace", "created_by"),
    ),
    Kind(
        "reasoning",
        "honoured",
        "Is given to the chat template as reasoning_content: the text of content, or of summary if there is none. "
        "Refused: encrypted_content.",
        ("type", "id", "summary", "content", "encrypted_content", "status"),
    ),
    Kind("item_reference", "honoured", "An item of a stored response, by its id.", ("type", "id")),
    *_refused(
        _NO_SUCH_TOOL,
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "web_search_call",
        "tool_search_call",
        "tool_search_output",
        "image_generation_call",
        "code_interpreter_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
    ),
    *_refused(_NO_CUSTOM, "custom_tool_call", "custom_tool_call_output"),
    *_refused(_NO_COMPACTION, "compaction", "compaction_trigger"),
    *_refused("the tools of a request are those of its field tools", "additional_tools"),
    *_refused("the configuration of a request is that of its fields", "configuration_update"),
    *_refused(_NO_PROGRAMS, "program", "program_output"),
)

PARTS = _table(
    Kind(
        "input_text",
        "honoured",
        "Text of a message or of a call's result. prompt_cache_breakpoint, a hint, has no effect.",
        ("type", "text", "prompt_cache_breakpoint"),
    ),
    Kind(
        "output_text",
        "honoured",
        "Text of an assistant's message. annotations, logprobs and parsed, which an answer had, have no effect.",
        ("type", "text", "annotations", "logprobs", "parsed"),
    ),
    Kind("refusal", "honoured", "Text of an assistant's message, as output_text.", ("type", "refusal")),
    Kind(
        "input_image",
        "honoured",
        "A picture of a user's message, by its image_url. Refused: file_id, a detail but auto, and pictures where the "
        "engine takes none. prompt_cache_breakpoint has no effect.",
        ("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint"),
    ),
    *_refused(_NO_SUCH_PART, "input_file", "input_audio"),
)

TOOLS = _table(
    Kind(
        "function",
        "honoured",
        "As in chat. Refused: defer_loading, async, output_schema, and allowed_callers other than direct.",
        (
            "type",
            "name",
            "description",
            "parameters",
            "strict",
            "allowed_callers",
            "defer_loading",
            "output_schema",
            "async",
        ),
    ),
    *_refused(
        _NO_SUCH_TOOL,
        "file_search",
        "computer",
        "computer_use_preview",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "mcp",
        "code_interpreter",
        "image_generation",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
    ),
    *_refused(_NO_CUSTOM, "custom"),
    *_refused("tools have no namespaces here", "namespace"),
    *_refused(_NO_PROGRAMS, "programmatic_tool_calling"),
)

TOOL_CHOICES = _table(
    Kind("none", "honoured", "No call."),
    Kind("auto", "honoured", "The model decides."),
    Kind("required", "honoured", "At least one call."),
    Kind("function", "honoured", "Calls of this function alone.", ("type", "name")),
    Kind(
        "allowed_tools",
        "honoured",
        "These tools alone, by mode auto or required: the model is not told of the others.",
        ("type", "mode", "tools"),
    ),
    *_refused(
        _NO_SUCH_TOOL,
        "file_search",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "computer",
        "computer_use",
        "computer_use_preview",
        "image_generation",
        "code_interpreter",
        "mcp",
        "shell",
        "apply_patch",
    ),
    *_refused(_NO_CUSTOM, "custom"),
    *_refused(_NO_PROGRAMS, "programmatic_tool_calling"),
)

LOGPROBS = "message.output_text.logprobs"

INCLUDES = _table(
    Kind(LOGPROBS, "honoured", "Log probabilities of the tokens of messages; top_logprobs adds alternatives."),
    Kind(
        "reasoning.encrypted_content",
        "no effect",
        "Reasoning items have their text in content, which a client sends back.",
    ),
    *_refused(
        _NO_SUCH_TOOL,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    ),
    Kind("message.input_image.image_url", "no effect", "Input items have the image_url that the client sent."),
)

FORMATS = _table(
    Kind("text", "honoured", "Free text.", ("type",)),
    Kind("json_object", "honoured", "A JSON object, by the processor json_schema.", ("type",)),
    Kind(
        "json_schema",
        "honoured",
        "JSON that matches the schema, by the processor json_schema, whatever strict says.",
        ("type", "name", "schema", "description", "strict"),
    ),
)


def kind_at(path: str, name: Any, table: Mapping[str, Kind]) -> Kind:
    """The row of a value that is not refused.

    Raises:
        FieldRefused: naming ``path``, if there is no row, or one that says so.
    """
    kind = table.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(each.name for each in table.values() if each.fate != "refused")
        raise FieldRefused(path, f"must be one of {known}, got {shown(name)}")
    if kind.fate == "refused":
        raise FieldRefused(path, f"{kind.name} is refused: {kind.why}", code="unsupported_value")
    return kind
