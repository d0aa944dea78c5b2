"""An answer ends at the token that completes a stop string, however it comes in deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from served_worker import serving

from adapters.client import processor
from adapters.vocabulary import Vocabulary
from worker.engines import TokenDelta, TokenLogprob
from worker.models.tokenizer_copy import load_vocabulary
from worker.text.stop_strings import StopStrings
from worker.text.stop_text import StopText
from worker.tiny_model import write_tiny_model

SPECIAL = 0


class Bytes:
    """Token n is byte n twice, `SPECIAL` has none."""

    def __getitem__(self, token_id: int) -> bytes:
        return bytes([token_id, token_id]) if token_id != SPECIAL else b""


def ended(token_ids: list[int], sizes: list[int], stops: list[str], **limits: Any) -> list[int] | None:
    """The answer up to its stop string, given in deltas of ``sizes``; None if there is none."""
    stop_text, answer = StopText(Bytes(), stops, **limits), []
    for size in [*sizes, len(token_ids)]:
        part, token_ids = token_ids[:size], token_ids[size:]
        delta = TokenDelta(list(part), logprobs=[[TokenLogprob(one, -1.0, 1)] for one in part])
        stop_text.end(delta)
        answer += delta.token_ids
        assert delta.logprobs is not None
        assert [entries[0].token_id for entries in delta.logprobs] == delta.token_ids
        assert (delta.finish_reason == "stop") is stop_text.found
        if stop_text.found:
            return answer
    return None


TOKENS = st.lists(st.sampled_from([*b"ab", SPECIAL]), max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(TOKENS, st.lists(st.integers(1, 4), max_size=10), STOPS)
def test_an_answer_ends_with_the_first_completed_stop_string(
    token_ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    text = Bytes()

    def has_stop(num_tokens: int) -> bool:
        parts = b"".join(text[one] or b"|" for one in token_ids[:num_tokens]).split(b"|")
        return any(stop.encode() in part for part in parts for stop in stops)

    first = next((count for count in range(len(token_ids) + 1) if has_stop(count)), None)
    assert ended(token_ids, sizes, stops) == (None if first is None else token_ids[:first])


@given(TOKENS, st.lists(st.integers(1, 4), max_size=10), STOPS)
def test_a_hidden_end_token_completes_no_stop_string(token_ids: list[int], sizes: list[int], stops: list[str]) -> None:
    """An engine gives it with the answer where the request shows other end tokens."""
    expected = ended(token_ids, sizes, stops)
    end = [ord("c")]
    assert ended(token_ids + end, sizes, [*stops, "c", "ac", "bc"], hidden=end) == expected


@pytest.mark.parametrize("shown", [[], [5]])
async def test_a_hidden_end_token_is_none_of_the_text(tmp_path: Path, shown: list[int]) -> None:
    """Whether another one is shown or not: then it completed a stop string, or a banned phrase."""
    model = write_tiny_model(tmp_path)
    vocabulary: Vocabulary = load_vocabulary(model, 1024, (4,), "off")
    (end,) = vocabulary.encode(" fox")
    ends = {"max_tokens": 3, "stop_token_ids_hidden": [end], "stop_token_ids_visible": shown}
    sampling = {"temperature": 0.0, "seed": 1}
    fox, phrase = processor("logit_bias", bias={str(end): 100.0}), processor("phrase_ban", phrases=[" fox"])
    async with serving(model) as client:
        for processors, stops in (([fox], {"stop": [" fox"]}), ([fox, phrase], {})):
            asked: dict[str, Any] = {"sampling_options": sampling, "stop_conditions": ends | stops}
            answer = await client.ask(vocabulary.encode("the quick brown"), *processors, **asked)
            assert (answer.token_ids, answer.finish_reason) == ([], "stop")
            assert answer.receipt["generated_tokens"] == 1


@given(TOKENS, STOPS, st.integers(0, 6), st.integers(0, 20))
def test_an_answer_that_goes_on_ends_where_it_would_have(
    token_ids: list[int], stops: list[str], least: int, cut: int
) -> None:
    """Whatever the worker before it has sent of a stop string."""
    whole = ended(token_ids, [], stops, min_tokens=least)
    begun = token_ids[:cut]
    if whole is None or len(begun) < len(whole):
        rest = ended(token_ids[cut:], [], stops, min_tokens=least, generated=begun)
        assert (None if rest is None else begun + rest) == whole


class SingleBytes:
    """Token n is byte n."""

    def __getitem__(self, token_id: int) -> bytes:
        return bytes([token_id])


LETTERS = st.text("aé€😀", max_size=6)


@settings(max_examples=examples(500))
@example("😀a", ["😀"], 4, 3)
@example("😀a", ["😀"], 4, 0)
@given(LETTERS, st.lists(LETTERS.filter(bool), min_size=1, max_size=3), st.integers(0, 9), st.integers(0, 20))
def test_a_character_may_begin_in_too_few_tokens(text: str, stops: list[str], least: int, cut: int) -> None:
    """A stop string counts whose first character the tokens before leave incomplete."""
    data = text.encode()
    incomplete = data[: max(0, least - 1)].decode(errors="ignore").encode()
    counted = [data[len(incomplete) : count] for count in range(len(data) + 1)]
    ends = (
        count for count in range(max(least, 1), len(data) + 1) if any(stop.encode() in counted[count] for stop in stops)
    )
    end = next(ends, None)
    if end is None or cut < end:
        stop_text = StopText(SingleBytes(), stops, least, list(data[:cut]))
        delta = TokenDelta(list(data[cut:]))
        stop_text.end(delta)
        assert stop_text.found == (end is not None)
        assert delta.token_ids == list(data[cut:end])


def test_min_tokens_come_first() -> None:
    """A stop string that begins before them does not count, as at the frontend."""
    token_ids = list(b"aabaab")
    assert ended(token_ids, [], ["ab"]) == list(b"aab")
    assert ended(token_ids, [], ["ab"], min_tokens=4) == token_ids
    assert ended(token_ids, [], ["ab"], min_tokens=4, generated=[*b"bbb"]) == list(b"aab")


def test_the_end_replaces_another() -> None:
    delta = TokenDelta([*b"ab", 7], finish_reason="length", stop_reason=7)
    stop_text = StopText(Bytes(), ["ab"])
    stop_text.end(delta)
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([*b"ab"], "stop", None)


def test_only_new_text_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text behind a long stop string was searched again for each token."""
    num_searched, first = list[int](), StopStrings.first

    def counted(stops: StopStrings[bytes], text: bytes, after: int = 0) -> tuple[int, int] | None:
        num_searched.append(len(text) - after)
        return first(stops, text, after)

    monkeypatch.setattr(StopStrings, "first", counted)
    assert ended([*b"a" * 100], [], ["ab" * 100]) is None
    assert num_searched == [2] * 100
