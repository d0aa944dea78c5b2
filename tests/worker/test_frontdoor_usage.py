"""``usage`` of several answers as that of one."""

from __future__ import annotations

from typing import Any

import pytest

from worker.frontdoor.usage import usage_of_choices, usage_of_prompts, usage_without_answer

ONE: dict[str, Any] = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": 4},
    "completion_tokens_details": {"audio_tokens": None, "reasoning_tokens": 1},
}
WITHOUT = {**ONE, "completion_tokens_details": None}


def test_the_prompt_of_choices_counts_once() -> None:
    assert usage_of_choices([ONE]) == usage_of_prompts([ONE]) == ONE
    assert usage_of_choices([ONE, WITHOUT, ONE]) == {
        **ONE,
        "completion_tokens": 6,
        "total_tokens": 11,
        "completion_tokens_details": {"audio_tokens": None, "reasoning_tokens": 2},
    }
    assert usage_of_choices([WITHOUT, WITHOUT]) == {**WITHOUT, "completion_tokens": 4, "total_tokens": 9}


@pytest.mark.parametrize("cached", [[0, 4, 4], [4, 0, 4], [4, 4, 0]])
def test_what_one_choice_computed_is_cached_for_none(cached: list[int]) -> None:
    """Whichever of them came first to a worker."""
    found = usage_of_choices([{**ONE, "prompt_tokens_details": {"cached_tokens": number}} for number in cached])
    assert found["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage_of_choices([ONE, {**ONE, "prompt_tokens_details": None}])["prompt_tokens_details"] is not None


def test_prompts_add_up() -> None:
    assert usage_of_prompts([ONE, WITHOUT, ONE]) == {
        "prompt_tokens": 15,
        "completion_tokens": 6,
        "total_tokens": 21,
        "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": 12},
        "completion_tokens_details": {"audio_tokens": None, "reasoning_tokens": 2},
    }
    uncounted = {name: value for name, value in ONE.items() if name != "prompt_tokens_details"}
    for usages in ([uncounted, ONE], [ONE, uncounted]):
        assert usage_of_prompts(usages)["prompt_tokens_details"] is None


def test_a_prompt_alone_has_no_thinking() -> None:
    made = usage_without_answer(ONE)
    assert (made["completion_tokens"], made["total_tokens"]) == (0, 5)
    assert "completion_tokens_details" not in made
