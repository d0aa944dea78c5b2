"""Requests for token ids and log probabilities of trainers, before any server is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines import FinishReason, TokenDelta, TokenLogprob
from worker.errors import InvalidRequest
from worker.frontdoor.chat_prompt import with_prompt_as_messages
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.fields import CHAT, COMPLETIONS
from worker.frontdoor.returned_tokens import Returned, ReturnedData, join_returned, joined_nvext
from worker.frontdoor.rollouts import inference_request, sglang, sglang_request
from worker.frontdoor.rollouts.generation import Generated, spans
from worker.frontdoor.translated import is_translated
from worker.requests.request import RequestLimits, parse_request
from worker.requests.response import ResponseBuilder
from worker.requests.rollout import TRAIN_KEYS, HeldData, RolloutData

LIMITS = RequestLimits(context_length=64, vocab_size=100, eos_token_ids=(2,))
IDS = st.lists(st.integers(5, 99), min_size=1, max_size=12)
NUMBERS = st.floats(-50, 0)
HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.one_of(st.booleans(), st.integers(-5, 2**40), st.floats(), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def chunks_of(deltas: list[TokenDelta], **options: Any) -> list[dict[str, Any]]:
    raw = {"token_ids": [7, 8], "output_options": options, "eos_token_ids": [2]}
    request = parse_request(raw, LIMITS)
    builder = ResponseBuilder(request, request.params.end_token_ids)
    return [builder.chunk(delta) for delta in deltas]


@given(ids=IDS, cuts=st.sets(st.integers(1, 11)), numbers=st.data(), ends=st.booleans())
def test_chunks_together_have_each_token_once(ids: list[int], cuts: set[int], numbers: Any, ends: bool) -> None:
    """Wherever an answer is cut into chunks, with a hidden end token or without."""
    entries = [
        TokenLogprob(one, *(numbers.draw(NUMBERS), 1), *(numbers.draw(NUMBERS) for _ in range(3)))
        for one in [*ids, *([2] if ends else [])]
    ]
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    deltas = [
        TokenDelta(ids[start:stop], logprobs=[[one] for one in entries[start:stop]]) for start, stop in pairwise(places)
    ]
    deltas[-1].finish_reason = "stop" if ends else "length"
    if ends:
        deltas[-1].stop_reason, deltas[-1].end_logprobs = 2, [entries[-1]]
    chunks = chunks_of(deltas, logprobs_mode="train", return_token_ids=True)
    choice: dict[str, Any] = {}
    data = ReturnedData(Returned(token_ids=True, mode="train"), in_chat=False)
    for chunk in chunks:
        event = {"choices": [{"index": 0}], "nvext": {"engine_data": json.loads(json.dumps(chunk["engine_data"]))}}
        data.take(event)
        assert "nvext" not in event
        join_returned(choice, event["choices"][0])  # type: ignore[index]
    assert choice["prompt_token_ids"] == [7, 8]
    assert choice["token_ids"] == [entry.token_id for entry in entries]
    rows = [(one.logprob, one.tempered, one.processed, one.log_mass) for one in entries]
    assert [*zip(*(choice["train_logprobs"][key] for key in TRAIN_KEYS), strict=True)] == rows
    assert not any("log_probs" in chunk for chunk in chunks)


@pytest.mark.parametrize("reason", ["length", "stop", "abort", "cancelled"])
def test_an_answer_without_a_token_has_empty_lists(reason: FinishReason) -> None:
    """A deadline or an abort may come before the first one."""
    (chunk,) = chunks_of([TokenDelta(finish_reason=reason)], logprobs_mode="train")
    data = ReturnedData(Returned(token_ids=True, mode="train"), in_chat=False)
    event: dict[str, Any] = {"choices": [{"index": 0}], "nvext": {"engine_data": chunk["engine_data"]}}
    data.take(event)
    (choice,) = event["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [7, 8])
    assert choice["train_logprobs"] == {key: [] for key in TRAIN_KEYS}


def test_nothing_is_added_to_an_answer_that_did_not_ask() -> None:
    (chunk,) = chunks_of([TokenDelta([5, 6], finish_reason="length")])
    assert "engine_data" not in chunk


def test_a_migrated_request_does_not_say_its_prompt_again() -> None:
    request = parse_request({"token_ids": [7, 8], "output_options": {"return_token_ids": True}}, LIMITS)
    data = RolloutData(replace(request, generated_token_ids=[9]))
    assert json.loads(data.of(TokenDelta([10]))["rollout"]) == {"token_ids": [10]}


def test_the_data_of_tokens_that_are_held_back() -> None:
    held = HeldData()
    held.add(json.dumps({"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5], "raw": [-1.0, -2.0]}))
    assert held.take(0) is None
    held.add(json.dumps({"token_ids": [6], "raw": [-0.1 - 0.2]}))
    first = {"prompt_token_ids": [1, 2, 3], "token_ids": [4], "raw": [-1.0]}
    for count, expected in ((1, first), (None, {"token_ids": [5, 6], "raw": [-2.0, -0.1 - 0.2]})):
        taken = held.take(count)
        assert taken is not None
        assert json.loads(taken) == expected
    assert held.take(None) is None
    held.add(json.dumps({"prompt_token_ids": [1], "token_ids": []}))  # of an answer that ends without a token
    assert held.take(None) == '{"prompt_token_ids":[1],"token_ids":[]}'


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        ("logprobs_mode:all", "must be one of raw, processed, train"),
        ("top_logprobs:101", "needs an integer from 0"),
        ("top_logprobs:" + "9" * 5000, "needs an integer from 0"),  # more digits than Python reads
        ("top_logprobs:\u0663", "needs an integer from 0"),
    ],
)
def test_malformed_annotations_are_refused(annotation: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        parse_request({"token_ids": [7], "annotations": [annotation]}, LIMITS)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"return_token_ids": True},
        {"logprobs_mode": "train"},
        {"nvext": {"extra_fields": ["completion_token_ids"]}},
    ],
)
def test_what_asks_back_is_answered_here(path: str, fields: dict[str, Any]) -> None:
    assert is_translated(path, {"model": "m", **fields})
    made = Returned.of(fields).request({"model": "m", **fields})
    assert not is_translated(path, made)  # the frontend gets none of it
    assert "engine_data" in made["nvext"]["extra_fields"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"logprobs_mode": "both"}, "logprobs_mode"),
        ({"n": 2, "nvext": {"extra_fields": ["prompt_token_ids"]}}, "nvext.extra_fields"),
        ({"nvext": {"extra_fields": ["prompt_logprobs"]}}, "nvext.extra_fields"),
    ],
)
def test_what_cannot_be_given_back_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldRefused) as refused:
        Returned.of(fields)
    assert refused.value.param == field


def test_ids_of_two_chunks_are_joined() -> None:
    first, second = {"completion_token_ids": [1], "timing": 1}, {"completion_token_ids": [2], "timing": 2}
    assert joined_nvext(joined_nvext(None, first), second) == {"completion_token_ids": [1, 2], "timing": 2}


@pytest.mark.parametrize("beside", ["chat_template_kwargs", "add_generation_prompt", "reasoning_effort", "messages"])
def test_a_prompt_of_ids_takes_no_template(beside: str) -> None:
    with pytest.raises(FieldRefused):
        with_prompt_as_messages({"prompt": [1, 2], beside: [{"role": "user", "content": "x"}]})


def refused_field(read: Callable[[dict[str, Any]], Any], fields: dict[str, Any]) -> str | None:
    """The field that a refusal names, None if the request is read."""
    try:
        read(fields)
    except FieldRefused as refused:
        return str(refused.param).partition("[")[0].partition(".")[0]
    return None


@settings(max_examples=examples(500))
@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys([*sglang_request.HONOURED, *sglang_request.REFUSED, "unknown"], HOSTILE)
        | {"sampling_params": st.dictionaries(st.sampled_from([*sglang_request.SAMPLING, "unknown"]), HOSTILE)},
    )
)
def test_fields_of_sglang_are_read_or_refused_by_name(fields: dict[str, Any]) -> None:
    field = refused_field(sglang_request.read, fields)
    assert field in {None, *fields, "input_ids"}
    assert field is not None or "unknown" not in {*fields, *fields.get("sampling_params", ())}


@settings(max_examples=examples(500))
@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys([*inference_request.HONOURED, *inference_request.REFUSED, "unknown"], HOSTILE)
        | {
            "token_ids": st.one_of(HOSTILE, IDS),
            "sampling_params": st.dictionaries(st.sampled_from([*inference_request.SAMPLING, "unknown"]), HOSTILE),
        },
    )
)
def test_fields_of_vllm_are_read_or_refused_by_name(fields: dict[str, Any]) -> None:
    field = refused_field(inference_request.read, fields)
    assert field in {None, *fields, "token_ids", "sampling_params"}
    assert field is not None or "unknown" not in {*fields, *fields["sampling_params"]}


@pytest.mark.parametrize(
    ("guide", "field"),
    [
        ({"json_object": "false"}, "sampling_params.structured_outputs.json_object"),
        ({"json_object": 1, "regex": "a"}, "sampling_params.structured_outputs.json_object"),
        ({"json_object": False}, "sampling_params.structured_outputs"),
        ({"regex": "a", "choice": 0}, "sampling_params.structured_outputs"),
    ],
)
def test_a_guide_of_vllm_that_is_none_is_refused(guide: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldRefused) as error:
        inference_request.read({"token_ids": [5], "sampling_params": {"structured_outputs": guide}})
    assert error.value.param == field


@pytest.mark.parametrize("params", [{}, {"max_tokens": None}])
def test_max_tokens_of_vllm_is_the_context_by_default(params: dict[str, Any]) -> None:
    """An answer that names none ended after 16 tokens."""
    read = inference_request.read({"token_ids": [5], "sampling_params": params})
    assert "max_tokens" not in read.completion
    assert read.completion["temperature"] == 1.0


@pytest.mark.parametrize("schema", ['{"const": NaN}', '{"maximum": 1e999}', '{"type": "array", "type": "object"}', "{"])
def test_a_schema_that_two_parsers_read_differently(schema: str) -> None:
    fields = {"text": "a", "sampling_params": {"json_schema": schema}}
    with pytest.raises(FieldRefused, match=r"^sampling_params\.json_schema: must be a text with a JSON Schema: "):
        sglang_request.read(fields)


def test_slimes_sampling_params_are_read() -> None:
    """All that its rollouts send (slime/rollout/sglang_rollout.py): each of them was refused."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "stop": None, "stop_token_ids": None}
    params |= {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    fields = {"input_ids": [5, 6], "sampling_params": params, "return_logprob": True}
    (read,) = sglang_request.read(fields).requests
    assert read.completion["include_stop_str_in_output"] is True
    assert "spaces_between_special_tokens" not in read.completion
    with pytest.raises(FieldRefused, match=r"^sampling_params\.spaces_between_special_tokens: must be true or false"):
        sglang_request.read({**fields, "sampling_params": {**params, "spaces_between_special_tokens": 0}})


@pytest.mark.parametrize(("params", "bound"), [({}, 128), ({"max_new_tokens": 7}, 7), ({"max_new_tokens": None}, None)])
def test_no_bound_on_an_answer_of_sglangs(params: dict[str, Any], bound: int | None) -> None:
    """Null is no bound in SGLang, where other parameters have their default then."""
    for prompts in ("a", ["a", "b"]):
        for read in sglang_request.read({"text": prompts, "sampling_params": params}).requests:
            assert read.completion.get("max_tokens") == bound


@pytest.mark.parametrize("top", [0, 2])
async def test_alternatives_of_sglangs_come_in_pairs(top: int) -> None:
    """Its clients read both lists where alternatives were asked for, whatever of the prompt was."""
    fields = {"input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": top}
    (request,) = sglang_request.read(fields).requests
    caller: Any = SimpleNamespace(request=SimpleNamespace(request_id=b"a", num_before=0))
    generated = Generated(token_ids=[7], prompt_token_ids=[5, 6])
    generated.per_token |= {"tempered": [-1.0], "top": [[[7, -1.0], [8, -2.0]]]}
    meta = (await sglang._Form(caller, request, has_texts=False).answer(0, generated, 0.0))["meta_info"]
    assert meta["input_token_logprobs"] == []
    lists = {"input_top_logprobs": [], "output_top_logprobs": [[[-1.0, 7, None], [-2.0, 8, None]]]}
    assert {name: meta[name] for name in lists if name in meta} == (lists if top else {})


NAMED = [{"name": "temperature", "args": {"value": 0.5}}]


@pytest.mark.parametrize(
    ("temperature", "processors"), [(0.5, None), (1.0, NAMED), (1.0, {"processors": NAMED, "receipt": True})]
)
def test_alternatives_are_not_reported_at_another_temperature(temperature: float, processors: Any) -> None:
    """They are the model's own, and the token's log probability is not."""
    fields = {"text": "a", "sampling_params": {"temperature": temperature}, "return_logprob": True}
    fields |= {} if processors is None else {"logits_processors": processors}
    assert sglang_request.read(fields).requests[0].top == 0
    with pytest.raises(FieldRefused, match=r"^top_logprobs_num: alternatives are reported at the temperatures 0 and 1"):
        sglang_request.read({**fields, "top_logprobs_num": 2})


@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_alternatives_are_reported_beside_a_named_0_or_1(value: float) -> None:
    named = [{"name": "temperature", "args": {"value": value}}]
    fields = {"text": "a", "logits_processors": named, "return_logprob": True, "top_logprobs_num": 2}
    assert sglang_request.read(fields).requests[0].top == 2


def test_weight_versions_in_vllms_form() -> None:
    versions = [{"version": "6", "from_token": 0}, {"version": "7", "from_token": 4}]
    assert spans(versions, 9) == [
        {"version": "6", "start": 0, "end": 4},
        {"version": "7", "start": 4, "end": 9},
    ]
    assert spans([], 9) == []


def test_versions_of_an_answer_that_another_worker_goes_on_with() -> None:
    """It names those of its own tokens alone; one worker names all of its own in each chunk."""
    six, seven = {"version": "6", "from_token": 0}, {"version": "7", "from_token": 4}
    for chunks, expected in (
        ([[six], [six, seven]], [six, seven]),
        ([[six], [seven]], [six, seven]),
        ([[six], [{"version": "6", "from_token": 9}]], [six]),
        ([[six, seven], [{"version": "7", "from_token": 9}, {"version": "8", "from_token": 12}]], None),
        ([[six, {"version": "7", "from_token": 2}], [six]], [six]),
        ([[six], None], [six]),
    ):
        generated, nvext = Generated(), None
        for versions in chunks:
            data = {"other": 1} if versions is None else {"weight_versions": versions}
            generated.take({"nvext": {"engine_data": data}}, {"text": ""})
            nvext = joined_nvext(nvext, {"engine_data": data})
        assert generated.weight_versions == (expected or [six, seven, {"version": "8", "from_token": 12}])
        assert nvext is not None
        assert nvext["engine_data"]["weight_versions"] == generated.weight_versions
