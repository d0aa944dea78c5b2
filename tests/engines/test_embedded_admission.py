"""What is refused before the first token: every field that the engine would otherwise ignore,
and every bad id.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from engine_doubles import END, WIDTH, ScriptedModel, request

from worker.engines.embedded.admission import HONOURED, REFUSED
from worker.engines.refusals import IRRELEVANT
from worker.errors import InvalidRequest
from worker.sampling import GuidedDecodingParams, SamplingParams

MODEL = ScriptedModel()

NOT_SERVED: dict[str, dict[str, Any]] = {
    "n": {"n": 2, "temperature": 1.0},
    "best_of": {"best_of": 2, "temperature": 1.0},
    "use_beam_search": {"use_beam_search": True},
    "beam_search_diversity_rate": {"beam_search_diversity_rate": 0.5},
    "length_penalty": {"length_penalty": 1.0},
    "early_stopping": {"early_stopping": 1},
    "beam_width_array": {"beam_width_array": [2]},
    "stop": {"stop": "."},
    "bad": {"bad": ["x"]},
    "bad_words_token_ids": {"bad_words_token_ids": [[5, 6]]},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "apply_batched_logits_processor": {"apply_batched_logits_processor": True},
    "top_p_min": {"top_p_min": 0.5},
    "top_p_reset_ids": {"top_p_reset_ids": 5},
    "top_p_decay": {"top_p_decay": 0.5},
    "prompt_ignore_length": {"prompt_ignore_length": 2},
    "logprobs_simple_format": {"logprobs_simple_format": True, "logprobs": 0},
    "prompt_logprobs_simple_format": {"prompt_logprobs_simple_format": True},
    "return_context_logits": {"return_context_logits": True},
    "return_generation_logits": {"return_generation_logits": True},
    "exclude_input_from_output": {"exclude_input_from_output": False},
    "return_encoder_output": {"return_encoder_output": True},
    "return_perf_metrics": {"return_perf_metrics": True},
    "additional_model_outputs": {"additional_model_outputs": ["hidden_states"]},
    "lookahead_config": {"lookahead_config": object()},
    "guided_decoding": {"guided_decoding": GuidedDecodingParams(json_object=True)},
    "thinking_token_budget": {"thinking_token_budget": 5},
}


def refused(prompt: list[Any], **changes: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        request(MODEL, "one", prompt, SamplingParams(**changes))
    return caught.value


def test_every_field_has_one_fate() -> None:
    assert {one.name for one in fields(SamplingParams)} <= HONOURED | IRRELEVANT | set(REFUSED)
    assert not HONOURED & IRRELEVANT
    assert not (HONOURED | IRRELEVANT) & set(REFUSED)
    assert set(REFUSED) == set(NOT_SERVED)


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_fields_that_are_not_served(name: str) -> None:
    error = refused([1, 2], **NOT_SERVED[name])
    assert error.field == f"sampling_params.{name}"
    assert REFUSED[name] in str(error)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "at least one token"),
        ([1] * 256, "shorter than the context of 256 tokens, got 256"),
        ([1, WIDTH], f"from 0 to {WIDTH - 1}, got {WIDTH} at index 1"),
        ([-1], "got -1 at index 0"),
        ([1, 2.0], "got 2.0 at index 1"),
        ([True], "got True at index 0"),
        (["1"], "got '1' at index 0"),
    ],
)
def test_prompts(prompt: list[Any], problem: str) -> None:
    error = refused(prompt)
    assert error.field == "prompt_token_ids"
    assert problem in error.problem


@pytest.mark.parametrize("name", ["stop_token_ids", "bad_token_ids", "end_id"])
@pytest.mark.parametrize("token", [WIDTH, -2])
def test_ids_out_of_the_vocabulary(name: str, token: int) -> None:
    error = refused([1], **{name: token if name == "end_id" else [token]})
    assert error.field == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("bias", "problem"),
    [
        (torch.zeros(3), "shape"),
        (torch.full((WIDTH,), torch.nan), "finite"),
        (torch.full((WIDTH,), torch.inf), "finite"),
        (["a"] * WIDTH, "numbers"),
    ],
)
def test_biases(bias: Any, problem: str) -> None:
    error = refused([1], embedding_bias=bias)
    assert error.field == "sampling_params.embedding_bias"
    assert problem in error.problem


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, {END}),
        ({"stop_token_ids": [9]}, {END, 9}),
        ({"end_id": 7}, {7}),
        ({"end_id": -1}, set()),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "end_id": 7, "stop_token_ids": [9]}, {9}),
    ],
)
def test_what_ends_an_answer(changes: dict[str, Any], ends: set[int]) -> None:
    assert request(MODEL, "one", [1], SamplingParams(**changes)).end_ids == ends


def test_budgets() -> None:
    def limit(**changes: Any) -> int:
        return request(MODEL, "one", [1] * 10, SamplingParams(**changes)).limit

    assert limit(max_tokens=5) == 15
    assert limit(max_tokens=None) == limit(max_tokens=10**9) == 256


def test_without_a_seed_each_request_gets_its_own() -> None:
    seeds = {request(MODEL, "one", [1], SamplingParams()).seed for _ in range(10)}
    assert len(seeds) == 10
    assert all(0 <= seed < 2**64 for seed in seeds)
