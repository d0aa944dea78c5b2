"""Bodies of batch requests: whatever they hold, they are read or refused with a field."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.errors import InvalidRequest
from worker.runtimes.direct.request import parse
from worker.runtimes.nats.batch.layout import URLS, QueuedRequest
from worker.runtimes.nats.batch.openai import CHAT, message_of, response_body

DIGEST = "0123456789abcdef"

_SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from(["", "5", "text", "none"])
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["5", "processors", "type", "order", "schema"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_FIELDS = (
    *("messages", "prompt", "stop", "stream", "logprobs", "top_logprobs", "response_format", "max_tokens", "seed"),
    *("max_completion_tokens", "tools", "tool_choice", "n", "temperature"),
)
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": _VALUES | st.dictionaries(st.sampled_from(["5", "7", "x"]), st.integers(-101, 101), min_size=1),
        "logits_processors": _VALUES,
        **dict.fromkeys(_FIELDS, _VALUES),
    },
)


@settings(max_examples=examples(2000), deadline=None)
@given(st.sampled_from(URLS), _BODIES)
def test_any_body_is_read_or_refused_with_a_field(url: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):  # which names a field
        parse(message_of(url, body, DIGEST), None)


@pytest.mark.parametrize("chosen", ["x", 5, True, {"processors": 5}, {"processors": {"name": "ban"}}])
def test_processors_of_another_form_beside_a_bias(chosen: Any) -> None:
    """They are left to the reader of processors, which refuses them."""
    message = message_of(URLS[1], {"prompt": [9], "logit_bias": {"5": 1}, "logits_processors": chosen}, DIGEST)
    assert message["logits_processors"] == chosen


@pytest.mark.parametrize("chosen", ["", 0, False, "x"])
def test_processors_that_are_no_list_are_refused(chosen: Any) -> None:
    with pytest.raises(InvalidRequest, match="logits_processors: must be a list"):
        parse(message_of(URLS[1], {"prompt": [9], "logits_processors": chosen}, DIGEST), None)


@pytest.mark.parametrize(("name", "value"), [("logprobs", 1), ("logprobs", 0), ("stream", 0), ("logit_bias", [])])
def test_values_that_python_takes_for_others_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        message_of(URLS[0], {"messages": [], name: value}, DIGEST)
    assert caught.value.field == f"body.{name}"


def test_a_token_is_decoded_once_for_an_answer() -> None:
    """A long answer with twenty alternatives for each token took seconds."""
    decoded = Counter[int]()

    class Letters:
        def decode(self, ids: list[int]) -> str:
            decoded.update(ids)
            return "".join(chr(ord("a") + one) for one in ids)

    top = [{"token_id": one, "logprob": -1.0} for one in range(3)]
    chunk = {"index": 0, "text": "ab", "token_ids": [0, 1], "log_probs": [-1.0, -2.0], "top_logprobs": [top, top]}
    request = QueuedRequest("batch", 0, "one", CHAT)
    answer = response_body(request, {}, [chunk, {**chunk, "finish_reason": "stop"}], Letters())
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "abab"
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a", "b", "a", "b"]
    assert [[each["token"] for each in one["top_logprobs"]] for one in choice["logprobs"]["content"]] == [
        ["a", "b", "c"]
    ] * 4
    assert decoded == {0: 1, 1: 1, 2: 1}
