"""The answer of one choice with its text is the same however its tokens come in chunks."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.engines import TokenDelta
from worker.errors import InvalidRequest
from worker.runtimes.direct.answer import ChoiceText
from worker.runtimes.direct.request import parse
from worker.text.stop_text import StopText

PIECES = (b"a", b"b", b"ab", b" b", b"\xc3", b"\xa9", "é".encode(), b"", b"\xa9a")
PROMPT = [0, 1, 2]


def decoded(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    return b"".join(PIECES[each] for each in token_ids).decode(errors="replace")


TOKENIZER: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(decode=decoded))


def chunked(token_ids: Sequence[int], sizes: Sequence[int], num_begun: int = 0) -> list[dict[str, Any]]:
    """The engine's chunks of an answer that its length ends, the last one with the usage of all;
    ``num_begun`` tokens are another worker's.
    """
    chunks, at = [], 0
    for size in [*sizes, len(token_ids)]:
        part = list(token_ids[at : at + size])
        at += len(part)
        chunks.append({"token_ids": part, "index": 0, "log_probs": [-float(each) for each in part]})
        if at == len(token_ids):
            break
    count = num_begun + len(token_ids)
    usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count, "prompt_tokens_details": {}}
    chunks[-1] |= {"finish_reason": "length", "completion_usage": usage}
    return chunks


def choice_of(message: dict[str, Any]) -> ChoiceText:
    return ChoiceText(parse({"token_ids": PROMPT, **message}, TOKENIZER), TOKENIZER)


def answer_of(chunks: Sequence[dict[str, Any]], message: dict[str, Any]) -> dict[str, Any]:
    choice = choice_of(message)
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


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_a_token_copies_no_text_before_it(stops: list[str]) -> None:
    """Each copied all of it: of 60,000 tokens one took five times as long as of 3,000."""
    texts = ("a" * 2**22, "b")
    decode = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(texts[each] for each in ids))
    tokenizer: Any = SimpleNamespace(backend_tokenizer=decode)
    choice = ChoiceText(parse({"token_ids": PROMPT[1:2], "stop_conditions": {"stop": stops}}, tokenizer), tokenizer)
    sizes = [len((choice.chunk({"token_ids": [each], "index": 0}) or {})["text"]) for each in [0, *[1] * 40]]
    assert sizes == [2**22, *[1] * 40]
    tracemalloc.start()
    try:
        for _ in range(2):  # with the first one the text is known to it
            tracemalloc.reset_peak()
            assert choice.chunk({"token_ids": [1], "index": 0}) == {"token_ids": [1], "index": 0, "text": "b"}
        assert tracemalloc.get_traced_memory()[1] < 1.5 * 2**22  # one text, rather than two
    finally:
        tracemalloc.stop()


def told(chunks: Sequence[dict[str, Any]], *, is_first: bool) -> list[dict[str, Any]]:
    """The same with data of each token, as trainers ask for them."""
    for index, chunk in enumerate(chunks):
        prompt = {"prompt_token_ids": PROMPT} if is_first and not index else {}
        chunk["engine_data"] = {"rollout": json.dumps({**prompt, "token_ids": chunk["token_ids"]})}
    return list(chunks)


def sent_of(choice: ChoiceText, chunks: Sequence[dict[str, Any]], most: int = 99) -> list[dict[str, Any]]:
    """The first chunks that are sent, up to the end of the answer."""
    found: list[dict[str, Any]] = []
    for chunk in chunks:
        if len(found) == most or choice.has_stopped:
            break
        sent = choice.chunk(chunk)
        found += [] if sent is None else [sent]
    return found


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client has of an answer."""
    data = [json.loads(one["engine_data"]["rollout"]) for one in chunks if "engine_data" in one]
    return {
        **{key: chunks[-1].get(key) for key in ("finish_reason", "stop_string")},
        **{key: [each for one in chunks for each in one.get(key, ())] for key in ("token_ids", "log_probs")},
        "text": "".join(one.get("text", "") for one in chunks),
        "num_tokens": chunks[-1]["completion_usage"]["completion_tokens"],
        **{key: [each for one in data for each in one.get(key, ())] for key in ("prompt_token_ids",)},
        "sampled": [each for one in data for each in one["token_ids"]],
    }


@given(TOKENS, SIZES, STOPS, st.booleans(), st.integers(0, 4), st.integers(0, 8))
@example([0, 4, 5, 0], [1, 1], [], False, 0, 2)
@example([0, 0, 0, 1, 0, 0, 0], [1] * 8, ["b"], False, 3, 2)
@example([0, 2, 0], [1] * 3, ["abb"], False, 0, 1)
@example([4, 8, 1, 0], [1] * 4, ["abb"], False, 0, 1)
def test_an_answer_that_was_cut_after_any_chunk_goes_on(
    token_ids: list[int], sizes: list[int], stops: list[str], includes: bool, least: int, cut: int
) -> None:
    """Another worker has the tokens that were sent, and no token or text is sent twice."""
    message = {
        "stop_conditions": {"stop": stops, "min_tokens": least},
        "sampling_options": {"include_stop_str_in_output": includes, "seed": 1},
    }
    whole = sent_of(choice_of(message), told(chunked(token_ids, sizes), is_first=True))
    parts = sent_of(choice_of(message), told(chunked(token_ids, sizes), is_first=True), cut)
    if not parts or "finish_reason" not in parts[-1]:
        count = sum(len(one["token_ids"]) for one in parts)
        begun = {"token_ids": PROMPT + token_ids[:count], "continues": {"generated_tokens": count}} if count else {}
        rest = chunked(token_ids[count:], sizes, count)
        parts += sent_of(choice_of({**message, **begun}), told(rest, is_first=not count))
    assert joined(parts) == joined(whole)
    for one in whole[:-1]:
        assert json.loads(one["engine_data"]["rollout"])["token_ids"] == one["token_ids"]


def test_the_worker_ends_an_answer_at_its_stop_strings() -> None:
    """Its request has them, too: else there is no receipt of an answer that one ends."""
    request = parse({"token_ids": PROMPT, "stop_conditions": {"stop": ["ab"]}}, TOKENIZER)
    assert request.fields["stop_conditions"]["stop"] == ["ab"] == list(request.stops)


def ended(token_ids: list[int], stops: list[str], least: int) -> bool:
    """Whether the worker ends an answer within these tokens."""
    stop_text = StopText(PIECES, stops, least)
    stop_text.end(TokenDelta(list(token_ids)))
    return stop_text.found


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8]), min_size=1, max_size=16),
    STOPS,
    st.integers(0, 6),
    st.integers(0, 8),
)
@example([0, 1, 0, 1], ["ba"], 3, 0)
@example([0, 4, 5, 0], ["é"], 3, 0)
@example([0, 4, 5, 0], ["é"], 3, 2)
def test_the_text_ends_where_the_worker_ends_it(
    token_ids: list[int], stops: list[str], least: int, num_begun: int
) -> None:
    """A stop string that began before min_tokens ended the text, and the worker went on: the
    answer had no receipt. So it was where the token before had a part of its first character.
    """
    begun, rest = token_ids[:num_begun], token_ids[num_begun:]
    if ended(begun, stops, least) or not rest:
        return
    delta = TokenDelta(list(rest))
    stop_text = StopText(PIECES, stops, least, begun)
    stop_text.end(delta)
    continues = {"token_ids": PROMPT + begun, "continues": {"generated_tokens": len(begun)}} if begun else {}
    choice = choice_of({"stop_conditions": {"stop": stops, "min_tokens": least}, **continues})
    choice.chunk({"token_ids": delta.token_ids, "index": 0})
    assert choice.has_stopped == stop_text.found
    before = choice_of({"stop_conditions": {"stop": stops, "min_tokens": least}, **continues})
    before.chunk({"token_ids": delta.token_ids[:-1], "index": 0})
    assert not before.has_stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be a text that is not empty") as caught:
        parse({"token_ids": PROMPT, "stop_conditions": {"stop": ["ab", ""]}}, TOKENIZER)
    assert caught.value.field == "stop_conditions.stop[1]"


@pytest.mark.parametrize("includes", [None, False, True])
def test_a_stop_string_that_is_not_to_be_trimmed_is_shown(includes: bool | None) -> None:
    """A frontend's field, which no frontend reads here: it had no effect."""
    message = {
        "stop_conditions": {"stop": ["b"]},
        "output_options": {"no_stop_trim": True},
        "sampling_options": {"include_stop_str_in_output": includes},
    }
    found = answer_of(chunked([0, 0, 1, 0], []), message)
    assert found["text"] == ("aa" if includes is False else "aab")


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("sizes", [[], [1, 1]])
def test_a_stop_string_that_the_worker_has_found_is_cut(most: int | None, sizes: list[int]) -> None:
    """The fewest tokens are ``max_tokens`` at most, and may have been on another worker: the answer
    ended, and its text had the stop string.
    """
    message = {"stop_conditions": {"stop": ["ab"], "min_tokens": 9, "max_tokens": most}}
    chunks = chunked([1, 0, 1], sizes)
    chunks[-1] |= {"finish_reason": "stop", "stop_string": "ab"}
    found = answer_of(chunks, message)
    assert (found["text"], found["token_ids"], found["stop_string"]) == ("b", [1], "ab")


def test_a_stop_string_counts_at_the_last_token_of_any_answer() -> None:
    """The front door hears of it in a chunk behind the tokens."""
    message = {"stop_conditions": {"stop": ["b"], "min_tokens": 9, "max_tokens": 2}}
    found = answer_of(chunked([0, 1], []), message)
    assert (found["text"], found["token_ids"], found["stop_string"]) == ("a", [0], "b")
