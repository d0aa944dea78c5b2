"""The smoke test, through the whole stack."""

from __future__ import annotations

import pytest
from e2e_stack import MODEL, Stack

from worker.processors.smoke import SMOKE_VARIABLES


@pytest.mark.parametrize("variable", [pytest.param(SMOKE_VARIABLES[0], marks=pytest.mark.smoke), *SMOKE_VARIABLES[1:]])
def test_every_chat_says_hello_world(stack: Stack, variable: str) -> None:
    stack.start_frontend()
    stack.start_worker("--device", "cpu", **{variable: "1"})  # type: ignore[arg-type]
    client = stack.client()
    for text, options in (
        ("hi", {}),
        ("what is the capital of France?", {"temperature": 1.3, "seed": 4}),
        ("a" * 200, {"top_p": 0.5, "temperature": 0.7}),
    ):
        messages = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, **options)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "Hello world!"
        assert answer.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True, **options)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "Hello world!"


def test_false_leaves_answers_alone(stack: Stack) -> None:
    stack.start_frontend()
    stack.start_worker("--device", "cpu", DYN_ENABLE_TEST_LOGITS_PROCESSOR="0")
    status, text = stack.post("completions", prompt="hi", max_tokens=8)
    assert status == 200
    assert "Hello world!" not in text
