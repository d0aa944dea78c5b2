"""The request parser: whatever comes in, a `GenerationRequest` in range or an `InvalidRequest`
goes out.
"""

from __future__ import annotations

import array
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import InvalidRequest
from worker.requests.fields import FIELDS, MAX_ANNOTATION_CHARACTERS, SECTIONS
from worker.requests.request import GenerationRequest, RequestLimits, parse_request
from worker.sampling import Control, GuidedDecodingParams, SamplingParams, sampling_controls

LIMITS = RequestLimits(context_length=100, vocab_size=1000, eos_token_ids=(2, 3))

# As the frontends of 1.4.2 and 1.6.1 deliver a chat with nothing set.
PLAIN: dict[str, Any] = {
    "annotations": [],
    "eos_token_ids": [2],
    "mdc_sum": "7f54",
    "model": "m",
    "output_options": {
        "formatted_prompt": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "return_tokens_as_token_ids": None,
        "skip_special_tokens": None,
    },
    "router_config_override": None,
    "sampling_options": dict.fromkeys(
        (
            "best_of",
            "frequency_penalty",
            "guided_decoding",
            "include_stop_str_in_output",
            "length_penalty",
            "min_p",
            "n",
            "presence_penalty",
            "repetition_penalty",
            "seed",
            "temperature",
            "top_k",
            "top_p",
            "use_beam_search",
        )
    ),
    "stop_conditions": {
        "ignore_eos": None,
        "max_thinking_tokens": None,
        "max_tokens": None,
        "min_tokens": None,
        "stop": None,
        "stop_token_ids": None,
        "stop_token_ids_hidden": [2],
        "stop_token_ids_visible": None,
    },
    "token_ids": [1, 87, 85],
}


def with_field(path: str, value: Any, base: dict[str, Any] = PLAIN) -> dict[str, Any]:
    """``base`` with the field at ``path`` set."""
    head, _, rest = path.partition(".")
    return {**base, head: with_field(rest, value, base.get(head) or {}) if rest else value}


def parse(path: str, value: Any) -> GenerationRequest:
    return parse_request(with_field(path, value), LIMITS)


def refusal(path: str, value: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        parse(path, value)
    return str(refused.value)


def test_plain_request() -> None:
    request = parse_request(PLAIN, LIMITS)
    assert request.prompt_token_ids == [1, 87, 85]
    assert request.params == SamplingParams(max_tokens=97, end_id=2, stop_token_ids=[2, 3], detokenize=False)
    assert request.params.is_greedy
    assert request.shown_stop_token_ids == frozenset()
    assert not request.is_probe


@pytest.mark.parametrize("value", [True, False])
def test_what_parsers_of_thoughts_are_told_is_no_control(value: bool) -> None:
    assert parse("extra_args.reasoning_ended", value) == parse_request(PLAIN, LIMITS)


def test_everything_that_an_ordinary_client_sends() -> None:
    """Captured from the frontends of 1.4.2 and 1.6.1."""
    captured = {
        **PLAIN,
        "annotations": ["formatted_prompt", "token_ids", "llm_metrics", "query_instance_id:", "request_id", "mine"],
        "agent_context": {"input_trigger": "user_message", "session_id": "q"},
        "image_cache_scope": "q",
        "extra_args": {
            "nvext": {"cache_salt": "s", "extra_fields": ["engine_data", "worker_id"], "token_in": True},
            "reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
            "sampling_options": {"detokenize": False},
        },
        "request_timestamp_ms": 5.0,
        "routing": {
            "cache_salt": "s",
            "expected_output_tokens": 9,
            "priority": 3,
            "priority_jump": 3.0,
            "routing_constraints": {},
        },
        "router_config_override": {"overlap_score_credit": 0.0, "assume_kv_reuse": False},
        "output_options": {"logprobs": 2, "return_tokens_as_token_ids": True, "skip_special_tokens": False},
        "sampling_options": {
            "frequency_penalty": 0.20000000298023224,
            "include_stop_str_in_output": True,
            "min_p": 0.10000000149011612,
            "n": 1,
            "presence_penalty": -0.1,
            "repetition_penalty": 1.100000023841858,
            "seed": -3,
            "temperature": 0.5,
            "top_k": -1,
            "top_p": 0.8999999761581421,
        },
        "stop_conditions": {
            "max_tokens": 9,
            "min_tokens": 2,
            "stop": ["END"],
            "stop_token_ids": [70],
            "stop_token_ids_hidden": [2],
        },
    }
    request = parse_request(captured, LIMITS)
    assert request.params == SamplingParams(
        frequency_penalty=0.20000000298023224,
        min_p=0.10000000149011612,
        presence_penalty=-0.1,
        repetition_penalty=1.100000023841858,
        seed=2**64 - 3,
        temperature=0.5,
        top_k=0,
        top_p=0.8999999761581421,
        logprobs=2,
        max_tokens=9,
        min_tokens=2,
        end_id=2,
        stop_token_ids=[2, 3, 70],
        include_stop_str_in_output=True,
        detokenize=False,
    )
    assert request.cache_salt == "s"
    assert request.shown_stop_token_ids == {70}


def test_health_probe() -> None:
    probe = {
        "token_ids": [1],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "_HEALTH_CHECK": True,
    }
    request = parse_request(probe, LIMITS)
    assert request.is_probe
    assert request.params.max_tokens == 1


def test_packed_prompt() -> None:
    packed = array.array("i", [5, 6, 999])
    assert parse("token_ids", packed.tobytes()).prompt_token_ids == [5, 6, 999]
    assert "multiple of 4 bytes" in refusal("token_ids", b"abc")
    assert "token id -1 is not in the vocabulary" in refusal("token_ids", array.array("i", [-1]).tobytes())


@pytest.mark.parametrize("fate", ["refused"])
def test_every_refused_field_is_refused_by_name(fate: str) -> None:
    for row in FIELDS:
        if row.fate == fate:
            assert refusal(row.path, {"x": 1}) == f"{row.path}: {row.why}"
            assert parse(row.path, False).prompt_token_ids
            assert parse(row.path, []).prompt_token_ids


def test_fields_without_effect_take_anything() -> None:
    for row in FIELDS:
        if row.fate == "no effect":
            assert parse(row.path, {"any": ["thing"]}) == parse_request(PLAIN, LIMITS)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("token_ids", [], "the prompt is empty"),
        ("token_ids", None, "the prompt is empty"),
        ("token_ids", [1.0], "must be a list of token ids, got a list of 1"),
        ("token_ids", [True], "must be a list of token ids, got a list of 1"),
        ("token_ids", "abc", "must be a list of token ids, got 'abc'"),
        ("token_ids", [5, 1000], "token id 1000 is not in the vocabulary of 1000"),
        ("token_ids", [-1, 5], "token id -1 is not in the vocabulary of 1000"),
        (
            "token_ids",
            [5] * 100,
            "prompt is too long: 100 tokens, and this model's maximum context length is 100 tokens",
        ),
        ("stop_conditions.stop_token_ids", [1000], "token id 1000 is not in the vocabulary of 1000"),
        ("stop_conditions.stop_token_ids_visible", [-5], "token id -5 is not in the vocabulary of 1000"),
        ("stop_conditions.stop_token_ids_hidden", [2**200], "token id an integer of 201 bits is not in the vocabulary"),
        ("eos_token_ids", [1000], "token id 1000 is not in the vocabulary of 1000"),
        ("stop_conditions.max_tokens", 0, "must be between 1 and"),
        ("stop_conditions.max_tokens", 2.5, "must be an integer, got 2.5"),
        ("stop_conditions.min_tokens", -1, "must be between 0 and"),
        ("stop_conditions.ignore_eos", 1, "must be true or false, got 1"),
        ("stop_conditions.stop", "END", "must be a list of texts, got 'END'"),
        ("stop_conditions.stop", ["a"] * 65, "must have at most 64 entries, got 65"),
        ("sampling_options.temperature", float("nan"), "must be at least 0 and at most 100, got nan"),
        ("sampling_options.temperature", float("inf"), "must be at least 0 and at most 100, got inf"),
        ("sampling_options.temperature", 10**400, "must be at least 0 and at most 100, got an integer of 1329 bits"),
        ("sampling_options.temperature", "hot", "must be a number, got 'hot'"),
        ("sampling_options.temperature", True, "must be a number, got True"),
        ("sampling_options.top_p", 1.1, "must be at least 0 and at most 1, got 1.1"),
        ("sampling_options.top_k", -2, "must be between -1 and"),
        ("sampling_options.repetition_penalty", 0, "must be at least 0.01 and at most 100, got 0"),
        ("sampling_options.seed", 2**64, "must be between"),
        ("routing.priority", 1e308, "must be between -2147483648 and 2147483648, got 1e+308"),
        ("routing.priority", -(10**400), "must be between -2147483648 and 2147483648, got an integer of 1329 bits"),
        ("routing.priority", float("inf"), "must be between -2147483648 and 2147483648, got inf"),
        ("routing.priority", float("nan"), "must be a number, got nan"),
        ("routing.priority", True, "must be a number, got True"),
        ("sampling_options.n", 2, "more than one choice cannot be streamed"),
        ("sampling_options.n", True, "more than one choice cannot be streamed"),
        ("output_options.logprobs", 101, "must be between 0 and 100, got 101"),
        ("annotations", ["logits_processor:{}"], "'logits_processor' is not known; processors are selected by"),
        ("annotations", ["Logit-Processor"], "'Logit-Processor' is not known"),
        ("stop_conditions.max_thinking_tokens", -1, "must be between 0 and"),
        ("extra_args.sampling_options.allowed_token_ids", "x", "must be a list of token ids"),
        ("extra_args.sampling_options.bad_words_token_ids", [[1, "x"]], "must be a list of lists of token ids"),
        ("sampling_options.guided_decoding", {"regex": "a", "json": {}}, "must have exactly one of"),
        (
            "sampling_options.guided_decoding",
            {"backend": "auto"},
            "must have exactly one of json, regex, choice, grammar",
        ),
        ("annotations", [1], "must be a list of texts"),
        ("annotations", ["x" * (MAX_ANNOTATION_CHARACTERS + 1)], "must have at most 65536 characters in all"),
        ("annotations", ["x"] * 65, "must have at most 64 entries, got 65"),
        ("sampling_options", [1], "must be a mapping, got a list of 1"),
        ("extra_args.nvext", 3, "must be a mapping, got 3"),
        ("nonsense", 1, "unknown field"),
        ("sampling_options.nonsense", 1, "unknown field"),
    ],
)
def test_refusals(path: str, value: Any, problem: str) -> None:
    message = refusal(path, value)
    assert message.startswith(f"{path}: {problem}")


def test_long_values_are_not_repeated_to_the_client() -> None:
    assert len(refusal("sampling_options.temperature", "x" * 10_000)) < 200
    assert len(refusal("x" * 10_000, 1)) < 200


def test_budgets_end_with_the_context() -> None:
    assert parse("stop_conditions.max_tokens", 1000).params.max_tokens == 97
    params = parse_request(with_field("stop_conditions.min_tokens", 50, with_field(*MAX_TEN)), LIMITS).params
    assert (params.min_tokens, params.max_tokens) == (10, 10)


def test_a_prefill_worker_sees_min_tokens_as_it_was_asked_for() -> None:
    """Whatever the operator's policy compares it with."""
    asked = with_field("stop_conditions.min_tokens", 50, with_field("stop_conditions.max_tokens", 1))
    params = parse_request(asked, replace(LIMITS, only_prefills=True)).params
    assert (params.min_tokens, params.max_tokens) == (50, 1)


MAX_TEN = ("stop_conditions.max_tokens", 10)


def test_neutral_values_ask_for_nothing() -> None:
    for path, value in (
        ("sampling_options.n", 1),
        ("sampling_options.best_of", 1),
        ("sampling_options.best_of", 0),
        ("sampling_options.use_beam_search", False),
        ("sampling_options.length_penalty", 1.0),
        ("sampling_options.guided_decoding", {"json": None}),
        ("multi_modal_data", {}),
    ):
        assert parse(path, value) == parse_request(PLAIN, LIMITS)


def test_fields_that_become_processors() -> None:
    def control(path: str, value: Any) -> Any:
        name = path.rpartition(".")[2]
        return getattr(parse(path, value).params, {"max_thinking_tokens": "thinking_token_budget"}.get(name, name))

    guided = "sampling_options.guided_decoding"
    assert control(guided, {"regex": "a+", "json": None}) == GuidedDecodingParams(regex="a+")
    assert control(guided, {"json": '{"type": "object"}'}) == GuidedDecodingParams(json={"type": "object"})
    assert control(guided, {"json": False}) == GuidedDecodingParams(json=False)
    content = {"type": "json_schema", "json_schema": True}
    tags = {"type": "triggered_tags", "triggers": ["<f"], "tags": [{"begin": "<f>", "end": ";", "content": content}]}
    older = {"structures": [{"begin": "<f>", "schema": True, "end": ";"}], "triggers": ["<f"], "type": "structural_tag"}
    for guide in (tags, {"type": "structural_tag", "format": tags}, older, json.dumps(older)):
        assert control(guided, {"structural_tag": guide}) == GuidedDecodingParams(structural_tag=tags)
    assert control("extra_args.sampling_options.bad_words_token_ids", [[1, 2], 3]) == [[1, 2], [3]]
    assert control("extra_args.sampling_options.allowed_token_ids", [9, 7, 9]) == [7, 9]
    assert control("stop_conditions.max_thinking_tokens", 0) == 0


@pytest.mark.parametrize(
    ("guide", "problem"),
    [
        ({"regex": "a", "backend": "xgrammar"}, "backend: this worker decodes grammars with llguidance"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern: is not supported"),
        ({"regexp": "a"}, "regexp: unknown field"),
        ({"json": "{"}, "json: must be a JSON Schema"),
        (
            {"json": '{"minimum": 1, "minimum": 2}'},
            'json: must be a JSON Schema that can be read in one way: the key "minimum" occurs twice',
        ),
        ({"structural_tag": "{"}, "structural_tag: must be JSON"),
    ],
)
def test_guides_that_are_refused(guide: dict[str, Any], problem: str) -> None:
    message = refusal("sampling_options.guided_decoding", guide)
    assert message.startswith(f"sampling_options.guided_decoding.{problem}")


def test_hidden_wins_over_shown() -> None:
    request = parse("stop_conditions.stop_token_ids_visible", [2, 5])
    assert request.shown_stop_token_ids == {5}


@pytest.mark.parametrize("named", [None, [2], [2, 3]])
def test_the_model_s_end_tokens_are_hidden_unnamed(named: list[int] | None) -> None:
    """Dynamo's frontend names them, and other clients' answers had an end token that these hide."""
    base = with_field("stop_conditions.stop_token_ids_hidden", None, with_field("eos_token_ids", named))
    base = with_field("sampling_options.include_stop_str_in_output", True, base)
    for path in ("stop_conditions.stop_token_ids", "stop_conditions.stop_token_ids_visible"):
        request = parse_request(with_field(path, [2, 3, 5], base), LIMITS)
        assert request.shown_stop_token_ids == {5}
        ignored = with_field("stop_conditions.ignore_eos", True, with_field(path, [2, 3, 5], base))
        assert parse_request(ignored, LIMITS).shown_stop_token_ids == {2, 3, 5}


def test_ignore_eos_leaves_the_model_s_end_tokens_out() -> None:
    base = with_field("stop_conditions.stop_token_ids_hidden", None)
    assert parse_request(base, LIMITS).params.end_token_ids == {2, 3}
    base = with_field("stop_conditions.stop_token_ids", [5], base)
    assert parse_request(with_field("stop_conditions.ignore_eos", True, base), LIMITS).params.end_token_ids == {5}


def test_any_shown_stop_token_shows_all() -> None:
    assert parse("stop_conditions.stop_token_ids_visible", [5]).params.include_stop_str_in_output
    assert not parse("stop_conditions.stop_token_ids", [5]).params.include_stop_str_in_output


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PATHS = st.sampled_from([row.path for row in FIELDS] + sorted(SECTIONS)) | st.text(max_size=8)


@given(st.dictionaries(PATHS, JSON, max_size=8), st.booleans())
def test_fuzz(values: dict[str, Any], plain: bool) -> None:
    request: dict[str, Any] = PLAIN if plain else {}
    for path, value in values.items():
        try:
            request = with_field(path, value, request)
        except (AttributeError, TypeError):  # the path runs through a value that another one has put there
            continue
    check(request)


@given(
    st.sampled_from(["top_logprobs:", "logprobs_mode:", "logits_processors:", "return_token_ids"]),
    st.text(max_size=8) | st.sampled_from([1, 3, 20, 5000]).map(lambda count: "9" * count),
)
def test_fuzz_annotations(name: str, rest: str) -> None:
    check(with_field("annotations", [name + rest]))


@given(JSON)
def test_fuzz_anything(request: Any) -> None:
    check(request)


def parsed(raw: Any) -> GenerationRequest | InvalidRequest:
    try:
        return parse_request(raw, LIMITS)
    except InvalidRequest as refused:
        return refused


def check(raw: Any) -> None:
    request = parsed(raw)
    if isinstance(request, InvalidRequest):
        assert len(str(request)) < 500
        return
    assert 1 <= len(request.prompt_token_ids) < LIMITS.context_length
    assert all(0 <= token_id < LIMITS.vocab_size for token_id in request.prompt_token_ids)
    params = request.params
    assert params.max_tokens is not None
    assert 1 <= params.max_tokens <= LIMITS.context_length - len(request.prompt_token_ids)
    assert 0 <= (params.min_tokens or 0) <= params.max_tokens
    assert all(0 <= token_id < LIMITS.vocab_size for token_id in params.end_token_ids)
    assert params.temperature is None or 0 <= params.temperature <= 100
    assert params.top_p is None or 0 <= params.top_p <= 1
    assert params.seed is None or 0 <= params.seed < 2**64


def test_the_table_is_whole() -> None:
    paths = [row.path for row in FIELDS]
    assert len(paths) == len(set(paths))
    targets = {row.target for row in FIELDS if row.target is not None}
    ends = {"eos_token_ids", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden", "include_stop"}
    made = {
        "params",
        "shown_stop_token_ids",
        "generated_token_ids",
        "hides_logprobs",
        "lora_digest",
        "draft_model",
        "controls",
    }
    own = set(GenerationRequest.__dataclass_fields__) - made
    assert targets == ends | own | {control.name for control in sampling_controls(SamplingParams) if control.paths}
    for row in FIELDS:
        assert (row.fate == "honoured") == (row.target is not None)
        assert row.why


NUMBERS = [one for one in sampling_controls(SamplingParams) if one.paths and one.client_bounds]


@pytest.mark.parametrize("control", NUMBERS, ids=lambda control: control.name)
def test_the_record_takes_what_a_client_may_send(control: Control) -> None:
    """No request fails where its record is made, without the path of its field."""
    bounds = control.client_bounds
    assert bounds is not None
    for value in (bounds.low, bounds.high):
        assert getattr(parse(control.path, value).params, control.name) is not None


def test_the_document_shows_the_table() -> None:
    """`docs/request.md` has exactly the rows of `FIELDS`; on failure, paste the left side."""
    document = (Path(__file__).parents[2] / "docs" / "request.md").read_text()
    table = document.partition("<!-- fields -->")[2].partition("<!-- /fields -->")[0]
    assert [f"| `{row.path}` | {row.fate} | {row.why} |" for row in FIELDS] == table.strip().splitlines()[2:]
