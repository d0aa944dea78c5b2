"""Every row of `docs/request.md` becomes a ``SamplingParams`` that either version takes, or a
processor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from stand_in import stand_in

from adapters.catalog import Catalog, parse_selection
from adapters.testing.kit_model import kit_context
from worker.engines import EngineRequest
from worker.engines.refusals import IRRELEVANT, RUN_AS_PROCESSORS
from worker.engines.trtllm.params import REFUSED, NativeRequest, Served, callable_of, native_request
from worker.errors import InvalidRequest
from worker.requests.fields import FIELDS
from worker.requests.request import RequestLimits, parse_request
from worker.sampling import GuidedDecodingParams, SamplingParams
from worker.sampling.field_processors import for_engine

PROMPT = [9, 30, 41]
EOS = (4, 1)
HONOURED = {"1.2.0": frozenset({"embedding_bias"})}
HONOURED["1.3.0rc29"] = HONOURED["1.2.0"] | {
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_token_ids",
    "min_p",
    "logprobs_of_sampled",
}


@pytest.fixture(params=sorted(HONOURED))
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    with stand_in(version=request.param):
        yield str(request.param)


def served(version: str, **changes: Any) -> Served:
    fields = importlib.import_module("tensorrt_llm").SamplingParams.__dataclass_fields__
    return Served(frozenset(fields), HONOURED[version], 1024, EOS, **changes)


def native(version: str, params: SamplingParams) -> tuple[Any, NativeRequest]:
    asked = native_request(EngineRequest("", PROMPT, params), 0, served(version))
    return importlib.import_module("tensorrt_llm").SamplingParams(**asked.fields), asked


# value, and what it becomes: a native field's value, the name of a processor, or both (by version)
ROWS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "token_ids": ([5, 6], {"max_tokens": 254}, ()),
    "model": ("m", {}, ()),
    "stop_conditions.max_tokens": (7, {"max_tokens": 7}, ()),
    "stop_conditions.min_tokens": (3, {"min_tokens": None}, ("min_tokens",)),
    "stop_conditions.ignore_eos": (True, {"ignore_eos": True, "stop_token_ids": None}, ()),
    "stop_conditions.stop": (["x"], {}, ()),
    "stop_conditions.stop_token_ids": ([50], {"stop_token_ids": [1, 4, 50]}, ()),
    "stop_conditions.stop_token_ids_visible": ([50], {"include_stop_str_in_output": True}, ()),
    "stop_conditions.stop_token_ids_hidden": ([50], {"include_stop_str_in_output": False}, ()),
    "sampling_options.presence_penalty": (0.5, {"presence_penalty": 0.5, "prompt_ignore_length": 3}, ()),
    "sampling_options.frequency_penalty": (0.5, {"frequency_penalty": 0.5, "prompt_ignore_length": 3}, ()),
    "sampling_options.repetition_penalty": (1.5, {"repetition_penalty": 1.5}, ()),
    "sampling_options.temperature": (0.5, {"temperature": 0.5, "top_k": None, "top_p": None}, ()),
    "sampling_options.top_p": (0.5, {"temperature": 1.0, "top_p": 0.5}, ()),
    "sampling_options.top_k": (5, {"temperature": 1.0, "top_k": 5}, ()),
    "sampling_options.min_p": (0.5, {"temperature": 1.0, "min_p": 0.5}, ()),
    "sampling_options.seed": (5, {"seed": None, "temperature": None}, ()),
    "sampling_options.include_stop_str_in_output": (True, {}, ()),
    "output_options.logprobs": (0, {"logprobs": 0}, ()),
    "output_options.logprobs_mode": ("raw", {}, ()),
    "output_options.return_token_ids": (True, {}, ()),
    "eos_token_ids": ([4, 1], {"stop_token_ids": [1, 4]}, ()),
    "require_reasoning": (True, {}, ()),
    # these are arguments of ``generate`` beside the sampling parameters
    "routing.cache_salt": ("tenant", {}, ()),
    "routing.priority": (3, {}, ()),
    "prefill_result": ({"disaggregated_params": {}}, {}, ()),
    "_HEALTH_CHECK": (True, {}, ()),
    "annotations": (["x"], {}, ()),
    # these are processors before they come here (`worker.engines.chain_builder`)
    "stop_conditions.max_thinking_tokens": (3, {}, ()),
    "sampling_options.guided_decoding": ({"regex": "a"}, {"guided_decoding": None}, ()),
    "sampling_options.allowed_token_ids": ([5], {}, ()),
    "sampling_options.bad_words_token_ids": ([[5]], {}, ()),
    "extra_args.sampling_options.allowed_token_ids": ([5], {}, ()),
    "extra_args.sampling_options.bad_words_token_ids": ([[5]], {}, ()),
}

OLD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "sampling_options.presence_penalty": ({"presence_penalty": None}, ("presence_penalty",)),
    "sampling_options.frequency_penalty": ({"frequency_penalty": None}, ("frequency_penalty",)),
    "sampling_options.repetition_penalty": ({"repetition_penalty": None}, ("repetition_penalty",)),
    "sampling_options.min_p": ({"min_p": None, "temperature": 1.0}, ("min_p",)),
    "output_options.logprobs": ({"logprobs": 1}, ()),
}

BY_ANOTHER_ENGINE = {"output_options.prompt_logprobs", "multi_modal_data"}
OF_THE_SUBMISSION = {"routing.lora_name", "routing.dp_rank", "agent_context", "continues"}


def test_every_honoured_row_is_here() -> None:
    assert set(ROWS) | BY_ANOTHER_ENGINE | OF_THE_SUBMISSION == {row.path for row in FIELDS if row.fate == "honoured"}


def test_prompt_logprobs_are_refused_by_name(version: str) -> None:
    raw = {"token_ids": PROMPT, "output_options": {"prompt_logprobs": 1}}
    with pytest.raises(InvalidRequest, match=r"sampling_params\.prompt_logprobs: .* embedded engine"):
        native(version, parse_request(raw, RequestLimits(256, 1024, EOS)).params)


def test_pictures_are_refused_by_name() -> None:
    raw = {"token_ids": PROMPT, "multi_modal_data": {"image_url": [{"Url": "data:image/png;base64,AAAA"}]}}
    with pytest.raises(InvalidRequest, match=r"^multi_modal_data: this worker serves text only"):
        parse_request(raw, RequestLimits(256, 1024, EOS))


@pytest.mark.parametrize("path", ROWS)
def test_every_row(path: str, version: str) -> None:
    value, expected, names = ROWS[path]
    if version == "1.2.0":
        expected, names = OLD.get(path, (expected, names))
    raw: dict[str, Any] = {"token_ids": PROMPT}
    *sections, name = path.split(".")
    inner = raw
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    request = parse_request(raw, RequestLimits(256, 1024, EOS))
    made, asked = native(version, for_engine(request.params))
    assert {field: getattr(made, field) for field in expected} == expected
    assert tuple(member.name for member in (asked.chain.members if asked.chain else ())) == names
    assert made.end_id == (-1 if made.ignore_eos else EOS[0])


GREEDY: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 0},
    {"top_k": 5},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 1.0},
    {"min_p": 1.0},
    {"min_p": 0.2},
    {"temperature": 0.0, "top_p": 0.5},
    {"seed": 3},
]


@pytest.mark.parametrize("fields", GREEDY, ids=str)
def test_greedy_is_the_same_everywhere(fields: dict[str, Any], version: str) -> None:
    params = SamplingParams(**fields)
    made, _ = native(version, params)
    assert made._greedy_decoding is params.is_greedy


def test_a_seed_samples_in_the_chain_after_the_truncation(version: str) -> None:
    params = SamplingParams(seed=3, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    made, asked = native(version, params)
    assert asked.chain is not None
    names = [member.name for member in asked.chain.members]
    assert names == ["repetition_penalty", "temperature", "min_p", "top_k", "top_p", "seeded_sampler"]
    assert made._greedy_decoding
    assert (made.repetition_penalty, made.seed, made.top_k) == (None, None, None)


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-6}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.0, "min_tokens": 2}], ids=str
)
def test_log_probabilities_of_a_chain_are_raw_ones(fields: dict[str, Any], version: str) -> None:
    """Others are refused wherever it reports them."""
    _, found = native(version, SamplingParams(**fields, logprobs=2))
    assert found.chain_logprobs == 2
    with pytest.raises(InvalidRequest, match=r"sampling_params\.logprobs_mode: .* reports raw ones only"):
        native(version, SamplingParams(**fields, logprobs=2, logprobs_mode="processed"))


def test_one_control_in_the_chain_takes_the_others_with_it(version: str) -> None:
    params = SamplingParams(min_tokens=3, presence_penalty=1.0, bad_token_ids=[7], embedding_bias=[0.0] * 1024)
    made, asked = native(version, params)
    assert asked.chain is not None
    assert {member.name for member in asked.chain.members} == {
        "embedding_bias",
        "presence_penalty",
        "banned_tokens",
        "min_tokens",
    }
    assert (made.presence_penalty, made.bad_token_ids, made.embedding_bias) == (None, None, None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    other: dict[str, Any] = {"logprobs_simple_format": {"logprobs": 0}}
    guide = GuidedDecodingParams(regex="a")
    odd = {"stop": "x", "bad": "x", "top_p_min": 0.5, "top_p_decay": 0.5, "guided_decoding": guide}
    value: Any = odd.get(name, 3)
    value = not getattr(SamplingParams(), name) if isinstance(getattr(SamplingParams(), name), bool) else value
    params = SamplingParams(**{name: value, **other.get(name, {})})
    with pytest.raises(InvalidRequest, match=name):
        native_request(EngineRequest("", PROMPT, params), 0, Served(frozenset(), frozenset(), 1024, EOS))


@pytest.mark.parametrize(
    ("processor", "problem"),
    [
        ('{"name": "phrase_ban", "args": {"phrases": ["x"]}}', "holds phrase_ban, which takes tokens back"),
        ('{"name": "cfg", "args": {"scale": 2}}', "holds cfg, which needs a second row of logits"),
        ('{"name": "contrastive"}', "holds contrastive, which needs a second row of logits"),
    ],
)
def test_what_the_embedded_engine_alone_serves_is_refused(version: str, processor: str, problem: str) -> None:
    text = f'{{"version": 1, "processors": [{processor}]}}'
    chain = Catalog.default().build_chain(parse_selection(text), kit_context())
    asked = EngineRequest("", PROMPT, SamplingParams(max_tokens=4), chain)
    with pytest.raises(InvalidRequest, match=problem):
        native_request(asked, 0, served(version))


def test_a_lagged_engine_refuses_what_needs_the_last_token(version: str) -> None:
    lagged = served(version, lagged=True)
    asked = native_request(EngineRequest("", PROMPT, SamplingParams(no_repeat_ngram_size=2)), 0, lagged)
    with pytest.raises(InvalidRequest, match="--history lagged"):
        callable_of(asked, 4, lagged=True)
    kept = native_request(EngineRequest("", PROMPT, SamplingParams(min_tokens=2)), 0, lagged)
    adapter = callable_of(kept, 4, lagged=True)
    assert adapter is not None
    assert adapter.lagged


@pytest.mark.parametrize("bias", [[0.0], "x", [float("nan")] * 1024, [float("inf")] * 1024])
def test_a_bias_that_is_none(bias: Any, version: str) -> None:
    with pytest.raises(InvalidRequest, match="embedding_bias"):
        native_request(EngineRequest("", PROMPT, SamplingParams(embedding_bias=bias)), 0, served(version))


@pytest.mark.parametrize("token_ids", [[5, -1], [1024], [2**40], [True], list(range(1024))], ids=range(5))
def test_bans_that_would_end_the_executor(token_ids: list[int], version: str) -> None:
    """A kernel that writes outside the row ends it, and so does a row without a token."""
    with pytest.raises(InvalidRequest, match=r"^sampling_params\.bad_token_ids: "):
        native(version, SamplingParams(bad_token_ids=token_ids))


def test_every_field_is_accounted_for() -> None:
    """A field of `SamplingParams` that nothing looks at would be a control lost in silence."""
    looked_at = {
        "end_id", "max_tokens", "stop_token_ids", "include_stop_str_in_output", "embedding_bias", "logits_processor",
        "n", "best_of", "logprobs_mode", "seed", "logprobs", "ignore_eos",
    }  # fmt: skip
    assert looked_at | RUN_AS_PROCESSORS | IRRELEVANT | set(REFUSED) == set(SamplingParams.__dataclass_fields__)
