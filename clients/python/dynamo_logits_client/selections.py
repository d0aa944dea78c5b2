# Copied from adapters/client.py by scripts/generate_clients.py of dynamo-logits-worker.
"""Client helpers: select logits processors in a request to the OpenAI-compatible endpoint.

    client.chat.completions.create(
        model=..., messages=...,
        extra_body=logits_processors(processor("min_tokens", n=8), receipt=True),
    )

Needs only the standard library: the file may be copied into a client's own code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

ANNOTATION = "logits_processors:"
HEADER = "x-dynamo-meta-logits-processors"


def processor(name: str, /, **args: Any) -> dict[str, Any]:
    """One entry of a selection, such as ``processor("min_tokens", n=8, scope="answer")``."""
    return {"name": name, "args": args}


def from_openai_logit_bias(logit_bias: Mapping[str, float] | Mapping[int, float]) -> dict[str, Any]:
    """OpenAI's ``logit_bias`` as a processor, since Dynamo's frontend silently drops the field.

    Raises:
        ValueError: a key is not a token id, or one that occurs before, or a value is not between
            -100 and 100.
    """
    bias = {}
    for token_id, value in logit_bias.items():
        text = str(token_id)
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"logit_bias: expected token ids as keys, got {token_id!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ValueError(f"logit_bias[{token_id}]: expected a number between -100 and 100, got {value!r}")
        number = text.lstrip("0") or "0"
        if number in bias:
            raise ValueError(f"logit_bias: the token id {number} occurs twice")
        bias[number] = value
    return processor("logit_bias", bias=bias)


def from_openai_tools(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] = "auto",
    *,
    format: str,
    parallel_tool_calls: bool = True,
    **args: Any,
) -> dict[str, Any]:
    """OpenAI's ``tools`` and ``tool_choice`` as the processor ``tool_calls``.

    Args:
        tools: Chat tools: ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
        tool_choice: ``none``, ``auto``, ``required``, or the function that must be called. Without
            ``parameters`` a function takes none.
        format: Format in which the model writes calls, such as ``hermes``.
        parallel_tool_calls: More than one call is allowed.
        **args: Further arguments, such as ``scope="answer"`` for a model that thinks.

    Raises:
        ValueError: a tool is no function, or the choice is none of these.
    """
    functions = [_function(tool) for tool in tools]
    wanted: dict[str, Any] = {"format": format, "parallel": parallel_tool_calls, **args}
    wanted["tools"] = [{"name": each["name"], "parameters": _parameters(each)} for each in functions]
    if not isinstance(tool_choice, str):
        wanted |= {"choice": "required", "tool": _function(tool_choice)["name"]}
    elif tool_choice in ("none", "auto", "required"):
        wanted["choice"] = tool_choice
    else:
        raise ValueError(f"tool_choice: expected none, auto, required or a function, got {tool_choice!r}")
    return {"name": "tool_calls", "args": wanted}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping) or "name" not in function:
        raise ValueError(f"expected a function with a name, got {tool!r:.80}")
    return function


_TAIL = re.compile(r"(?:\s{1,64}|\s?\S{1,64})\Z")


def healed(prompt: str) -> tuple[str, dict[str, Any]]:
    """Token healing at the end of a prompt: the prompt to send instead, and a processor.

    A tokenizer ends a token where the text ends, and a model has rarely seen the rest of a longer
    one behind it: ``//`` behind ``http:``, say. So the last word (at most 64 characters), or the
    white space at the end, is taken off the prompt, and the processor ``forced_prefix`` writes it
    at the beginning of the answer, with ``heal``: the model may end it within a token that goes on
    with it. The answer begins with what was taken off the prompt, and those
    tokens count as generated.

    Raises:
        ValueError: there would be no prompt left.
    """
    tail = _TAIL.search(prompt)
    if tail is None or tail.start() == 0:
        raise ValueError("expected a prompt of more than one word")
    return prompt[: tail.start()], processor("forced_prefix", text=tail[0], heal=True)


def _parameters(function: Mapping[str, Any]) -> Any:
    given = function.get("parameters")
    return {"type": "object", "properties": {}, "additionalProperties": False} if given is None else given


def selection(
    *processors: Mapping[str, Any],
    receipt: bool | Literal["debug"] = False,
    deadline: float | None = None,
    order: Sequence[str] = (),
    speculation: bool = True,
    prediction: str = "",
) -> str:
    """The selection as ASCII JSON: the value of the annotation, or of the header `HEADER`.

    Arguments are those of `logits_processors`.

    Raises:
        ValueError: a number is NaN or infinite.
        TypeError: an argument is not JSON data.
    """
    data: dict[str, Any] = {"version": 1, "processors": list(processors), "receipt": receipt}
    if deadline is not None:
        data["deadline"] = deadline
    if order:
        data["order"] = list(order)
    if not speculation:
        data["speculation"] = False
    if prediction:
        data["prediction"] = prediction
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def logits_processors(
    *processors: Mapping[str, Any],
    receipt: bool | Literal["debug"] = False,
    deadline: float | None = None,
    order: Sequence[str] = (),
    speculation: bool = True,
    prediction: str = "",
    nvext: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``extra_body`` that selects ``processors``, in this order within a stage.

    Args:
        processors: Results of `processor` and `from_openai_logit_bias`.
        receipt: Ask for the receipt, in ``nvext.engine_data`` of the reply; "debug" adds, at the
            end of the answer, what was done to each token.
        deadline: Latest end of the answer, seconds since 1970.
        order: Names of processors of temperature and truncation (fields of the same name
            included), in the order in which they are applied; by default the order law's.
        speculation: False drafts no tokens for this request, which changes none of them.
        prediction: Text that much of the answer is likely to be: tokens are drafted from it, which
            changes none of them.
        nvext: Further fields of ``nvext``; annotations and extra fields are kept.

    Raises:
        ValueError: a number is NaN or infinite.
        TypeError: an argument is not JSON data.
    """
    fields = dict(nvext or {})
    annotation = ANNOTATION + selection(
        *processors, receipt=receipt, deadline=deadline, order=order, speculation=speculation, prediction=prediction
    )
    fields["annotations"] = [*(fields.get("annotations") or ()), annotation]
    if receipt:
        fields["extra_fields"] = list(dict.fromkeys([*(fields.get("extra_fields") or ()), "engine_data"]))
    return {"nvext": fields}
