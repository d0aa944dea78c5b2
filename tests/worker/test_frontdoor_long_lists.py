"""Long lists in a client's request take time in proportion to their length, not to its square."""

from __future__ import annotations

from dataclasses import replace
from time import thread_time
from typing import Any

import pytest
from counted_names import Counted
from hypothesis import given
from hypothesis import strategies as st
from test_frontdoor_tool_texts import WHOLE

from worker.frontdoor.messages.conversation import Conversation
from worker.frontdoor.responses.items import input_items
from worker.frontdoor.responses.messages import Messages
from worker.frontdoor.tool_texts import write_tools_as_text
from worker.frontdoor.tools import ToolCallSettings, tools_as_processor

MANY = 2000
ONE_AT_A_TIME = replace(WHOLE, several=False)
IDS = st.sampled_from(["a", "b", "c", None])


@pytest.fixture(autouse=True)
def _uncounted() -> None:
    Counted.num_comparisons = 0


def chat(call_ids: list[Any], result_ids: list[Any]) -> dict[str, Any]:
    """A chat with a message of calls, and their results."""
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in call_ids]
    results = [{"role": "tool", "tool_call_id": one, "content": str(place)} for place, one in enumerate(result_ids)]
    return {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}, *results]}


@given(st.lists(IDS, min_size=2, max_size=6), st.lists(IDS, max_size=8))
def test_each_result_is_behind_the_first_call_of_its_id(call_ids: list[Any], result_ids: list[Any]) -> None:
    body = chat(call_ids, result_ids)
    results = body["messages"][1:]
    write_tools_as_text(body, ONE_AT_A_TIME, None)
    wanted: list[Any] = []
    for place, one in enumerate(call_ids):
        wanted.append(one)
        if one not in call_ids[:place]:
            wanted += [result for result in results if result["tool_call_id"] == one]
    wanted += [result for result in results if result["tool_call_id"] not in call_ids]
    found = [each["tool_calls"][0]["id"] if "tool_calls" in each else each for each in body["messages"]]
    assert found == wanted


def test_calls_and_results_are_not_compared_with_each_other() -> None:
    ids = [f"call {number}" for number in range(MANY)]
    body = chat([Counted(one) for one in ids], [Counted(one) for one in reversed(ids)])
    write_tools_as_text(body, ONE_AT_A_TIME, None)
    assert [each["role"] for each in body["messages"]] == ["assistant", "tool"] * MANY
    assert Counted.num_comparisons < 20 * MANY


def test_names_of_tools_are_not_compared_with_each_other() -> None:
    tools = [{"type": "function", "function": {"name": Counted(f"tool {number}")}} for number in range(MANY)]
    assert tools_as_processor({"tools": tools}, ToolCallSettings("hermes")) is not None
    assert Counted.num_comparisons < 20 * MANY


@pytest.mark.parametrize(
    ("item", "key"),
    [
        ({"role": "system", "content": "be brief, and polite too"}, "content"),
        (
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "let me see what this is"}]},
            "reasoning_content",
        ),
    ],
)
def test_texts_of_many_items_are_joined_once(item: dict[str, Any], key: str) -> None:
    """Joined with each item, so many took seconds."""
    placed = input_items([item], lambda _: None) * 100_000
    made, began_s = Messages(), thread_time()
    made.add_items(placed)
    assert thread_time() - began_s < 1.5
    (message,) = made.messages
    assert message[key].count("\n\n") == 100_000 - 1


def test_texts_beside_a_picture_are_joined_once() -> None:
    """Joined with each part, so many took seconds."""
    picture = ("picture", {"type": "image_url", "image_url": {"url": "https://pictures.example/a.png"}})
    texts = [(str(place), {"type": "text", "text": "a" * 99}) for place in range(30_000)]
    made, began_s = Conversation(), thread_time()
    made.add_user("messages[0]", [*texts, picture, *texts])
    assert thread_time() - began_s < 1.5
    (message,) = made.messages
    assert [len(part.get("text", "")) for part in message["content"]] == [3_000_000 - 1, 0, 3_000_000 - 1]
    assert made.pictures == {"messages[0].content[1]": "picture"}
