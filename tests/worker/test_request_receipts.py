"""Receipts of requests, as a worker adds them to its chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.catalog import Requested, Selection
from adapters.chain import Receipt
from worker.engines import EngineRequest, TokenDelta
from worker.requests.receipts import MAX_REPEATED, RequestReceipt, ServerRecord, TokenDigest
from worker.sampling import SamplingParams

SERVER = ServerRecord("embedded", "1", "any", {}, "tiny", None, {}, "")


def receipt(params: SamplingParams, selection: Selection, **fields: Any) -> RequestReceipt:
    return RequestReceipt(SERVER, EngineRequest("any", [5, 6], params, **fields), selection)


def shown(found: RequestReceipt, *, ends: bool = True) -> dict[str, Any]:
    return found.as_json(Receipt([]).as_json(), ends=ends)


def test_a_long_request_is_in_the_last_chunk_alone() -> None:
    for length, is_repeated in ((10, True), (MAX_REPEATED, False)):
        found = receipt(SamplingParams(), Selection((Requested("regex", {"pattern": "a" * length}),)))
        assert ("request" in shown(found, ends=False)) == is_repeated
        (processor,) = json.loads(shown(found)["request"])["processors"]
        assert processor["args"] == {"pattern": "a" * length}


def test_the_arguments_of_the_operators_processors_are_not_shown() -> None:
    selection = Selection((Requested("bias", {"secret": 1}, origin="mandatory"),), order=("min_p", "temperature"))
    request = json.loads(shown(receipt(SamplingParams(), selection))["request"])
    assert request["processors"] == [{"name": "bias", "scope": "all", "origin": "mandatory"}]
    assert request["order"] == ["min_p", "temperature"]


@pytest.mark.parametrize(
    ("params", "processor", "expected"),
    [
        ({}, "dry", {"temperature": (0.0, "default")}),
        ({"top_k": 5}, "dry", {"temperature": (1.0, "default"), "top_k": (5, "request")}),
        ({"temperature": 0.7, "top_p": 0.5}, "dry", {"temperature": (0.7, "model"), "top_p": (0.5, "request")}),
        ({"temperature": 0.7, "top_p": 0.5}, "top_p", {"temperature": (0.7, "model")}),
        ({"top_p": 0.5}, "dynamic_temperature", {"top_p": (0.5, "request")}),
    ],
)
def test_a_control_says_where_it_is_from(
    params: dict[str, Any], processor: str, expected: dict[str, tuple[float, str]]
) -> None:
    """Unless a processor has taken its place."""
    selection = Selection((Requested(processor),))
    found = shown(receipt(SamplingParams(**params), selection, defaulted=frozenset({"temperature"})))
    assert found["sampling"] == {name: {"value": value, "from": whence} for name, (value, whence) in expected.items()}


@pytest.mark.parametrize(
    ("token_ids", "finish_reason", "stop_reason", "expected"),
    [
        ([7, 8], "stop", 8, [7, 8]),
        ([7], "stop", 8, [7, 8]),
        ([7], "stop", None, [7]),
        ([7], "length", None, [7]),
    ],
)
def test_the_digest_has_an_end_token_once(
    token_ids: list[int], finish_reason: Any, stop_reason: int | None, expected: list[int]
) -> None:
    found = receipt(SamplingParams(), Selection(), generated_token_ids=[9])
    found.take(TokenDelta(token_ids, finish_reason=finish_reason, stop_reason=stop_reason))
    assert shown(found)["generated_tokens"] == 1 + len(expected)
    assert shown(found)["answer_digest"] == str(TokenDigest([9, *expected]))


def test_a_stop_string_ends_what_is_counted() -> None:
    """Tokens that were sampled behind the one that completes it are not the answer's."""
    found, counted = receipt(SamplingParams(), Selection()), Receipt([], attribution=True, prompt_length=2)
    for position in range(2, 6):
        counted.tokens.append((position, 7, "any", "masked"))
    found.take(TokenDelta([7, 7], finish_reason="stop", receipt=counted))
    assert [one["position"] for one in found.as_json(counted.as_json(), ends=True)["tokens"]] == [2, 3]
