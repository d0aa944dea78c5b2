"""`TokenDelta` → chunk."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.vocabulary import ReasoningTokens
from adapters.vocabulary.text_match import TextMatcher
from worker.engines import TokenDelta, TokenLogprob
from worker.engines.weights import WeightVersion
from worker.errors import RequestFailed
from worker.requests.request import GenerationRequest
from worker.requests.response import ResponseBuilder
from worker.sampling import SamplingParams

OPENS, CLOSES = 70, 71
"""Tags of thinking."""


def request(shown: frozenset[int] = frozenset(), **controls: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=10, stop_token_ids=[9, *shown], **controls)
    return GenerationRequest(prompt_token_ids=[1, 2, 3], params=params, shown_stop_token_ids=shown)


def builder(made: GenerationRequest) -> ResponseBuilder:
    return ResponseBuilder(made, made.params.end_token_ids - made.shown_stop_token_ids)


def test_a_hidden_stop_token_is_dropped_beside_shown_ones() -> None:
    made = request(frozenset({5}))
    chunk = builder(made).chunk(TokenDelta([4, 9], finish_reason="stop", stop_reason=9))
    assert chunk["token_ids"] == [4]
    assert chunk["completion_usage"]["completion_tokens"] == 1
    chunk = builder(made).chunk(TokenDelta([4, 5], finish_reason="stop", stop_reason=5))
    assert chunk["token_ids"] == [4, 5]


def test_usage() -> None:
    building = builder(request())
    building.chunk(TokenDelta([4, 5], num_cached_tokens=2))
    last = building.chunk(TokenDelta([6], finish_reason="length"))
    assert last["finish_reason"] == "length"
    assert last["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@given(
    st.lists(st.sampled_from([4, OPENS, CLOSES]), max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
    st.integers(0, 12),
    st.booleans(),
)
def test_thinking_is_counted_however_it_comes(ids: list[int], cuts: list[int], replayed: int, is_inside: bool) -> None:
    """In chunks, and after a migration."""
    expected, inside = 0, is_inside
    for token_id in ids:
        expected += inside and token_id != CLOSES
        inside = token_id != CLOSES if inside else token_id == OPENS
    made = replace(request(), generated_token_ids=ids[:replayed])
    counter = ReasoningTokens(TextMatcher.of_ids([OPENS]), TextMatcher.of_ids([CLOSES]), is_inside=is_inside)
    building = ResponseBuilder(made, frozenset(), reasoning=counter)
    places = sorted({min(len(ids), max(replayed, cut)) for cut in cuts} | {min(replayed, len(ids))})
    for begin, end in pairwise([*places, len(ids)]):
        building.chunk(TokenDelta(ids[begin:end]))
    assert building.usage()["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert building.usage()["completion_tokens"] == len(ids)


@given(
    st.lists(st.integers(4, 8), max_size=9),
    st.lists(st.integers(4, 8), min_size=1, max_size=9),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 9),
)
def test_tokens_of_a_prediction_are_counted_however_they_come(
    ids: list[int], prediction: list[int], cuts: list[int], replayed: int
) -> None:
    """In chunks, and after a migration; the counts are those of whole and edited predictions."""
    made = replace(request(), generated_token_ids=ids[:replayed])
    building = ResponseBuilder(made, frozenset(), prediction=prediction)
    places = sorted({min(len(ids), max(replayed, cut)) for cut in cuts} | {min(replayed, len(ids))})
    for begin, end in pairwise([*places, len(ids)]):
        building.chunk(TokenDelta(ids[begin:end]))
    details = building.usage()["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    common = next((i for i, (one, other) in enumerate(zip(ids, prediction, strict=False)) if one != other), None)
    shortest = min(len(ids), len(prediction))
    assert (shortest if common is None else common) <= accepted <= len(ids)
    assert rejected == max(0, len(prediction) - accepted)


def test_tokens_of_a_prediction_go_on_behind_an_edit() -> None:
    building = ResponseBuilder(request(), frozenset(), prediction=[10, 11, 12, 13, 14, 15])
    building.chunk(TokenDelta([10, 11, 99, 13]))
    last = building.chunk(TokenDelta([14, 15], finish_reason="length"))
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 3}  # 13 and 14 find the place
    assert last["completion_usage"]["completion_tokens_details"] == details


def test_a_long_answer_that_parts_from_its_prediction_is_quick() -> None:
    """It is counted in the event loop, where the streams of others wait."""
    building = ResponseBuilder(request(), frozenset(), prediction=range(60_000))
    building.chunk(TokenDelta([*range(120_000, 60_000, -1)]))
    began_s = time.process_time()
    details = building.usage()["completion_tokens_details"]
    assert time.process_time() - began_s < 1
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 60_000}


def test_logprobs_are_the_chosen_tokens_and_the_best_by_rank() -> None:
    delta = TokenDelta([7], logprobs=[[TokenLogprob(7, -3.0, 3), TokenLogprob(1, -0.5, 1), TokenLogprob(2, -1.0, 2)]])
    chunk = builder(request(logprobs=2)).chunk(delta)
    assert chunk["log_probs"] == [-3.0]
    assert [(entry["token_id"], entry["rank"]) for entry in chunk["top_logprobs"][0]] == [(1, 1), (2, 2)]
    assert "top_logprobs" not in builder(request(logprobs=0)).chunk(delta)
    assert "log_probs" not in builder(request()).chunk(delta)


def test_a_chosen_token_among_the_likeliest_is_listed_once() -> None:
    delta = TokenDelta([1], logprobs=[[TokenLogprob(1, -0.5, 1), TokenLogprob(1, -0.5, 1), TokenLogprob(2, -1.0, 2)]])
    chunk = builder(request(logprobs=2)).chunk(delta)
    assert [entry["token_id"] for entry in chunk["top_logprobs"][0]] == [1, 2]


def test_logprobs_end_where_the_shown_tokens_end() -> None:
    made = request(frozenset({5}), logprobs=0)
    delta = TokenDelta(
        [4, 9], logprobs=[[TokenLogprob(4, -1.0, 1)], [TokenLogprob(9, -2.0, 1)]], finish_reason="stop", stop_reason=9
    )
    assert builder(made).chunk(delta)["log_probs"] == [-1.0]


def test_engine_data_is_passed_on() -> None:
    assert builder(request()).chunk(TokenDelta(engine_data={"receipt": 1}))["engine_data"] == {"receipt": 1}


def test_an_error_finish_is_raised_never_sent() -> None:
    with pytest.raises(RequestFailed, match="processor Bad: raised"):
        builder(request()).chunk(TokenDelta([1], finish_reason="error", error="processor Bad: raised"))


SCORES = [
    None,
    [TokenLogprob(2, -0.5, 1), TokenLogprob(2, -0.5, 1), TokenLogprob(9, -2.0, 2)],
    [TokenLogprob(3, float("-inf"), 7), TokenLogprob(4, -0.25, 1)],
]
"""A token that is the likeliest itself, and one that cannot be sampled."""


def test_scores_of_the_prompt_come_with_the_first_token() -> None:
    made = builder(request(prompt_logprobs=2))
    first = made.chunk(TokenDelta([7], prompt_logprobs=SCORES))
    assert first["engine_data"] == {
        "prompt_logprobs": [
            None,
            {"2": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -2.0, "rank": 2}},
            {"3": {"logprob": -9999.0, "rank": 7}, "4": {"logprob": -0.25, "rank": 1}},
        ],
        "prompt_tokens": [{"token_id": 1}, {"token_id": 2}, {"token_id": 3}],
    }
    assert "engine_data" not in made.chunk(TokenDelta([8], finish_reason="length"))


def test_scores_come_again_with_data_that_would_replace_them() -> None:
    """Of an answer that is not streamed the frontend keeps the last data alone."""
    made = builder(request(prompt_logprobs=2))
    first = made.chunk(TokenDelta([7], prompt_logprobs=SCORES))["engine_data"]
    assert made.chunk(TokenDelta([8], engine_data={"receipt": 1}))["engine_data"] == {"receipt": 1}
    last = made.chunk(TokenDelta([9], engine_data={"receipt": 2}, finish_reason="length"))
    assert last["engine_data"] == {**first, "receipt": 2}


def test_the_end_token_that_is_not_shown_has_its_log_probability() -> None:
    end = [TokenLogprob(2, -1.0, 3), TokenLogprob(9, -0.5, 1)]
    delta = TokenDelta([], finish_reason="stop", stop_reason=2, end_logprobs=end)
    asked = request(logprobs=1)
    assert builder(asked).chunk(delta)["engine_data"] == {
        "end_token": {
            "token_id": 2,
            "logprobs": {"2": {"logprob": -1.0, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}},
        }
    }
    assert "engine_data" not in builder(request()).chunk(delta)


@pytest.mark.parametrize("returns", [False, True])
def test_an_end_token_whose_id_is_told_names_its_weights(returns: bool) -> None:
    """Of an update right before it, whose version no shown token has."""
    old, new = WeightVersion(), WeightVersion(1, "new", "00")
    building = builder(replace(request(), returns_token_ids=returns))
    building.chunk(TokenDelta([4, 5], weights=[(0, old)]))
    last = building.chunk(TokenDelta([], finish_reason="stop", stop_reason=9, weights=[(2, new)]))
    told = [{"version": "0", "from_token": 0}, {"version": "new", "from_token": 2}]
    assert last["engine_data"]["weight_versions"] == told[: 1 + returns]
