"""`GenerationRequest` → `SamplingParams`, and `TokenDelta` → chunk."""

from __future__ import annotations

from typing import Any

import pytest

from worker.engines import TokenDelta, TokenLogprob
from worker.errors import InvalidRequest, RequestFailed
from worker.requests.lowering import lower
from worker.requests.request import GenerationRequest
from worker.requests.response import ResponseBuilder


def request(**values: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompt_token_ids": [1, 2, 3], "max_tokens": 10, **values})


def builder(made: GenerationRequest, eos: tuple[int, ...] = (9,)) -> ResponseBuilder:
    return ResponseBuilder(made, lower(made, eos).end_token_ids - made.shown_stop_token_ids)


def test_nothing_set_is_greedy() -> None:
    params = lower(request(), (9, 8))
    assert params.is_greedy
    assert (params.max_tokens, params.min_tokens, params.end_id) == (10, None, 9)
    assert params.end_token_ids == {8, 9}
    assert params.include_stop_str_in_output is False


def test_sampling_controls_arrive() -> None:
    params = lower(request(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=2**64 - 1, logprobs=3), ())
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 4, 0.1)
    assert (params.seed, params.logprobs, params.end_id) == (2**64 - 1, 3, None)


def test_ignore_eos_keeps_the_client_s_own_stop_tokens() -> None:
    params = lower(request(ignore_eos=True, stop_token_ids=frozenset({5})), (9,))
    assert params.end_token_ids == {5}


def test_processors_arrive() -> None:
    def processor(*_: object) -> None: ...

    assert lower(request(), (), [processor]).logits_processors == [processor]


def test_a_value_that_sampling_params_refuse_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_options\.top_p: must be .*got 3"):
        lower(request(top_p=3), ())


def test_hidden_stop_token_is_dropped_where_shown_ones_brought_it_in() -> None:
    made = request(stop_token_ids_visible=frozenset({5}))
    assert lower(made, (9,)).include_stop_str_in_output
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


def test_logprobs_are_the_chosen_token_s_and_the_likeliest_by_rank() -> None:
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
    made = request(logprobs=0, stop_token_ids_visible=frozenset({5}))
    delta = TokenDelta(
        [4, 9], logprobs=[[TokenLogprob(4, -1.0, 1)], [TokenLogprob(9, -2.0, 1)]], finish_reason="stop", stop_reason=9
    )
    assert builder(made).chunk(delta)["log_probs"] == [-1.0]


def test_engine_data_is_passed_on() -> None:
    assert builder(request()).chunk(TokenDelta(engine_data={"receipt": 1}))["engine_data"] == {"receipt": 1}


def test_an_error_finish_is_raised_never_sent() -> None:
    with pytest.raises(RequestFailed, match="processor Bad: raised"):
        builder(request()).chunk(TokenDelta([1], finish_reason="error", error="processor Bad: raised"))
