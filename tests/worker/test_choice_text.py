"""The answer of one choice with its text is the same however its tokens come in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.errors import InvalidRequest
from worker.runtimes.direct.answer import ChoiceText
from worker.runtimes.direct.request import parse

PIECES = (b"a", b"b", b"ab", b" b", b"\xc3", b"\xa9", "é".encode(), b"")
PROMPT = [0, 1, 2]


def decoded(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    return b"".join(PIECES[each] for each in token_ids).decode(errors="replace")


TOKENIZER: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(decode=decoded))


def chunked(token_ids: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The engine's chunks of an answer that its length ends, the last one with the usage of all."""
    chunks, at = [], 0
    for size in [*sizes, len(token_ids)]:
        part = list(token_ids[at : at + size])
        at += len(part)
        chunks.append({"token_ids": part, "index": 0, "log_probs": [-float(each) for each in part]})
        if at == len(token_ids):
            break
    count = len(token_ids)
    usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count, "prompt_tokens_details": {}}
    chunks[-1] |= {"finish_reason": "length", "completion_usage": usage}
    return chunks


def answer_of(chunks: Sequence[dict[str, Any]], message: dict[str, Any]) -> dict[str, Any]:
    choice = ChoiceText(parse({"token_ids": PROMPT, **message}, TOKENIZER), TOKENIZER)
    found: dict[str, Any] = {"text": "", "token_ids": [], "log_probs": []}
    for chunk in chunks:
        sent = choice.chunk(chunk) or {}
        found = {
            **found,
            **sent,
            **{key: found[key] + sent.get(key, type(found[key])()) for key in found if key in KEYS},
        }
        if choice.has_stopped:
            break
    found["completion_usage"].pop("prompt_tokens_details", None)  # which nothing has said where a stop string ends it
    return found


KEYS = ("text", "token_ids", "log_probs")
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=16)
SIZES = st.lists(st.integers(1, 4), max_size=16)
STOPS = st.lists(st.text("abé ", min_size=1, max_size=4), max_size=2)


@given(TOKENS, SIZES, STOPS, st.booleans(), st.integers(0, 4))
@example([0, 0, 1, 0], [], ["b"], False, 0)
def test_chunks_of_any_size_are_the_same_answer(
    token_ids: list[int], sizes: list[int], stops: list[str], includes: bool, least: int
) -> None:
    """The usage counted tokens behind a stop string that came together with it."""
    message = {
        "stop_conditions": {"stop": stops, "min_tokens": least},
        "sampling_options": {"include_stop_str_in_output": includes},
    }
    found = answer_of(chunked(token_ids, sizes), message)
    assert found == answer_of(chunked(token_ids, [1] * len(token_ids)), message)
    usage = found["completion_usage"]
    assert usage["total_tokens"] == len(PROMPT) + usage["completion_tokens"]
    if "stop_string" not in found:
        assert (found["token_ids"], found["text"]) == (token_ids, decoded(token_ids))


def test_the_worker_ends_an_answer_at_its_stop_strings() -> None:
    """Its request has them, too: else there is no receipt of an answer that one ends."""
    request = parse({"token_ids": PROMPT, "stop_conditions": {"stop": ["ab"]}}, TOKENIZER)
    assert request.fields["stop_conditions"]["stop"] == ["ab"] == list(request.stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be a text that is not empty") as caught:
        parse({"token_ids": PROMPT, "stop_conditions": {"stop": ["ab", ""]}}, TOKENIZER)
    assert caught.value.field == "stop_conditions.stop[1]"
