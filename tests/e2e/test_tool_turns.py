"""The turn after a tool call: the message with the call comes back without ``content``, as clients
send it, and the prompt is the one that the chat template makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import running_stack
from front_door_process import Door

JOINS = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
"""SmolLM2's and many others: of a message without content it makes nothing but an error."""

CALLS = """{{ '<|im_start|>' + message.role }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or () %}
{{- '\\n<tool_call>' + call.function.name + ' ' + call.function.arguments.city + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}"""
"""As Qwen2.5's and Hermes's: the calls, and the content only if there is some."""

TEMPLATE = (
    f"{{% for message in messages %}}{{% if style == 'joins' %}}{JOINS}{{% else %}}{CALLS}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
PROMPTS = {
    "joins": "<|im_start|>user\nAnd Oslo?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n",
    "calls": "<|im_start|>user\nAnd Oslo?<|im_end|>\n"
    "<|im_start|>assistant\n<tool_call>weather Oslo</tool_call><|im_end|>\n"
    "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("turns")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    with running_stack(directory, tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker("--device", "cpu", "--dtype", "float32", "--custom-jinja-template", str(template))
        yield Door(stack)


def body(style: str, **message: Any) -> dict[str, Any]:
    """A request whose second message has the call."""
    called = {"role": "assistant", "tool_calls": [CALL], **message}
    answered = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    return {
        "messages": [{"role": "user", "content": "And Oslo?"}, called, answered],
        "tools": [TOOL],
        "max_tokens": 4,
        "chat_template_kwargs": {"style": style},
    }


def prompt_of(door: Door, **fields: Any) -> str:
    """What the frontend's chat template made, as it reports it."""
    asked = {"stream": True, "nvext": {"annotations": ["formatted_prompt"]}}
    status, text = door.post("chat/completions", **asked, **fields)
    assert status == 200, text
    lines = text.splitlines()
    reported = lines[lines.index("event: formatted_prompt") + 1]
    return str(json.loads(reported.removeprefix(": ")))


@pytest.mark.parametrize("style", PROMPTS)
@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}], ids=["absent", "null", "empty"])
def test_the_prompt_of_the_turn_after_a_call(door: Door, style: str, message: dict[str, Any]) -> None:
    assert prompt_of(door, **body(style, **message)) == PROMPTS[style]
