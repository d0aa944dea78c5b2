"""A row for everything that TensorRT-LLM's contract has: what the worker does with it.

What has no row fails here, so that a field of a new version is decided on before it can change a
token in silence; and each row is held against the code.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import yaml
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import collect, engine, stand_in

from worker.arguments import parse_arguments
from worker.engines import EngineRequest, KeepKv, ReadKv, RequestHints
from worker.engines.trtllm import TrtllmEngine, config_from, disaggregated_params
from worker.engines.trtllm.deltas import Cursor
from worker.engines.trtllm.llm_options import DRAFTING, OWN, PASSED, needed
from worker.engines.trtllm.params import REFUSED, Served, native_request
from worker.engines.trtllm.settings import Role
from worker.errors import ConfigurationError, InvalidRequest, RequestFailed
from worker.sampling import SamplingParams

CONTRACT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "contracts" / "trtllm.json").read_text())
PROMPT = [9, 30, 41, 77]
pytestmark = pytest.mark.timeout(300)

SECTIONS = {
    "about": "",
    "behaviour": "tests/contracts/test_standin_contract.py names a test for each",
    "conversation_params": "test_tensorrt_ranks.py",
    "lora_config": "test_tensorrt_lora.py",
    "lora_request": "test_tensorrt_lora.py",
    "scheduling_params": "test_tensorrt_ranks.py",
    "cache_transceiver_backends": "values",
    "cache_transceiver_config": "TRANSCEIVER",
    "completion_output": "OUTPUT",
    "completion_output_properties": "OUTPUT",
    "disaggregated_params": "HAND_OFF",
    "finish_reasons": "FINISH",
    "generate_async": "SUBMISSION",
    "generate_async_mutates": "tests/tensorrt/test_tensorrt_standin.py",
    "generate_async_raises": "tests/tensorrt/test_tensorrt_units.py",
    "guided_decoding_params": "GUIDES",
    "kv_cache_config": "KV_CACHE",
    "kv_cache_config_not_in_1.2": "",
    "llm": "LLM",
    "llm_args": "worker/engines/trtllm/llm_options.py",
    "llm_args_newest": "worker/engines/trtllm/llm_options.py",
    "llm_args_not_in_1.2": "",
    "llm_args_only_in_1.2": "worker/engines/trtllm/llm_options.py",
    "logits_processor_call": "tests/adapters/test_tensorrt_adapter.py",
    "logits_processor_calling": "tests/adapters/test_tensorrt_adapter.py",
    "logprob": "OUTPUT",
    "logprob_mode": "tests/tensorrt/test_tensorrt_params.py",
    "request_output": "RESULT",
    "sampling_params": "SAMPLING",
}


def test_a_row_for_each_section() -> None:
    assert set(CONTRACT) == set(SECTIONS)


# Arguments of ``LLM``

ARGUMENTS = sorted(
    {*CONTRACT["llm_args"], *CONTRACT["llm_args_only_in_1.2"], *CONTRACT["llm_args_newest"]["names"]}
    | {"lookahead_config"}  # of the versions before `speculative_config`
)
MODEL = "/m"


def options_of(content: dict[str, Any], *argv: str) -> dict[str, Any]:
    """Arguments of ``LLM`` from a YAML file with this content."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(content, file)
        file.flush()
        given_ = ["--model-path", MODEL, "--engine", "trtllm", "--extra-engine-args", file.name, *argv]
        return dict(config_from(parse_arguments(given_, {})).options)


def test_a_row_for_each_argument() -> None:
    rows = {*OWN, *PASSED, *needed(model_path=MODEL, overlaps=False, has_code=True)}
    assert rows == set(ARGUMENTS)


OWN_VALUES: dict[str, Any] = {
    "cache_transceiver_config": {"backend": "UCX"},
    "dtype": "bfloat16",
    "enable_chunked_prefill": False,
    "enable_iter_perf_stats": False,
    "kv_cache_config": {"dtype": "fp8"},
    "max_batch_size": 3,
    "max_num_tokens": 77,
    "max_seq_len": 99,
    "pipeline_parallel_size": 2,
    "scheduler_config": {"waiting_queue_policy": "priority"},
    "tensor_parallel_size": 2,
}


def test_the_files_values_reach_the_library() -> None:
    assert set(OWN_VALUES) == OWN
    for name, value in OWN_VALUES.items():
        found = options_of({name: value})[name]
        assert value.items() <= found.items() if isinstance(value, dict) else found == value
    drafts = {"speculative_config": {"decoding_type": "MTP"}}
    assert drafts.items() <= options_of({"guided_decoding_backend": "xgrammar", **drafts}).items()
    assert set(needed(model_path=MODEL, overlaps=False, has_code=True, drafts=True)) == set(
        needed(model_path=MODEL, overlaps=False, has_code=True)
    ) - set(DRAFTING)
    for name in PASSED:
        assert options_of({name: "any"})[name] == "any"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["pytorch", "auto", "trtllm", MODEL, "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=3,
)


@given(name=st.sampled_from(ARGUMENTS) | st.text("abc_", min_size=1, max_size=8), value=VALUES)
@settings(max_examples=examples(300), deadline=None)
def test_an_argument_is_passed_on_needed_or_refused_by_name(name: str, value: Any) -> None:
    rows = needed(model_path=MODEL, overlaps=False, has_code=False)
    if name in PASSED:
        assert options_of({name: value}) == {**options_of({}), name: value}
    elif name in rows and rows[name].accepts(value):
        assert options_of({name: value}) == options_of({})
    elif name not in OWN:
        with pytest.raises(ConfigurationError, match=f": {name}: "):
            options_of({name: value})


# What an argument of ``LLM`` holds

KV_CACHE = {
    "event_buffer_max_size": "set with --enable-kv-routing, unless the file does",
    "max_tokens": "--kv-blocks times --kv-block-size",
    "tokens_per_block": "--kv-block-size",
    **dict.fromkeys(
        (
            "attention_dp_events_gather_period_ms",
            "copy_on_partial_reuse",
            "dtype",
            "enable_block_reuse",
            "enable_partial_reuse",
            "free_gpu_memory_fraction",
            "host_cache_size",
            "kv_cache_event_hash_algo",
            "max_attention_window",
            "use_kv_cache_manager_v2",
        ),
        "passed",
    ),
}
TRANSCEIVER = {
    "backend": "DEFAULT, unless the file has one",
    "kv_transfer_timeout_ms": "twice the lease, unless the file has another, of a lease at least",
    "kv_transfer_sender_future_timeout_ms": "passed",
    "max_tokens_in_buffer": "passed",
    "transceiver_runtime": "passed",
}


@pytest.mark.parametrize(
    ("section", "rows", "argv"),
    [("kv_cache_config", KV_CACHE, []), ("cache_transceiver_config", TRANSCEIVER, ["--disaggregation-mode", "decode"])],
)
def test_rows_within_an_argument(section: str, rows: dict[str, str], argv: list[str]) -> None:
    assert set(rows) == set(CONTRACT[section])
    for name, what in rows.items():
        given_ = 60_000 if what != "passed" else "any"
        assert options_of({section: {name: given_}}, *argv)[section][name] == given_


# Fields of ``SamplingParams``

What = Literal["sent", "chain", "refused", "text", "private"]
SAMPLING: dict[What, set[str]] = {
    "sent": {
        *("best_of", "detokenize", "ignore_eos", "include_stop_str_in_output", "max_tokens", "n", "stop_token_ids"),
        *("temperature", "top_k", "top_p", "min_p", "logprobs", "logprobs_mode", "logits_processor"),
        *("bad_token_ids", "embedding_bias", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        "prompt_ignore_length",  # beside the penalties; a request's own is refused
        "end_id",  # the model's, in place of the tokenizer's
    },
    "chain": {"seed", "min_tokens", "no_repeat_ngram_size"},
    "text": {"pad_id", "add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens"},
    "refused": {
        *("bad", "stop", "apply_batched_logits_processor", "use_beam_search", "top_p_min", "top_p_reset_ids"),
        *("top_p_decay", "beam_search_diversity_rate", "length_penalty", "early_stopping", "beam_width_array"),
        *("prompt_logprobs", "logprobs_simple_format", "prompt_logprobs_simple_format", "return_context_logits"),
        *("return_generation_logits", "exclude_input_from_output", "return_encoder_output", "return_perf_metrics"),
        *("additional_model_outputs", "lookahead_config", "guided_decoding", "thinking_token_budget"),
        "truncate_prompt_tokens",
    },
    "private": {
        *("_bad_word_ids", "_stop_word_ids", "_decoder_output_token_prefix", "_stream_interval", "_return_log_probs"),
        *("_context_logits_auto_enabled", "_generation_logits_auto_enabled", "_request_provided_fields"),
    },
}
FIELDS = [row[0] for row in CONTRACT["sampling_params"]["fields"]]
HONOURED = frozenset({"bad_token_ids", "embedding_bias", "frequency_penalty", "min_p", "presence_penalty"})
SERVED = Served(FIELDS, HONOURED | {"repetition_penalty"}, 1024, (4, 1))
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 5, "logprobs": 2},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2, "bad_token_ids": [3]},
    {"embedding_bias": [0.0] * 1024},
]


def test_a_row_for_each_field_of_sampling_params() -> None:
    rows = [name for names in SAMPLING.values() for name in names]
    assert len(rows) == len(set(rows))
    assert set(rows) == set(FIELDS)


def test_what_is_sent() -> None:
    sent = {
        name
        for asked in ASKED
        for name in native_request(EngineRequest("", PROMPT, SamplingParams(**asked)), 0, SERVED).fields
    }
    assert sent | {"logits_processor"} == SAMPLING["sent"]


@pytest.mark.parametrize("name", sorted(SAMPLING["chain"]))
def test_what_runs_in_the_chain(name: str) -> None:
    made = native_request(EngineRequest("", PROMPT, SamplingParams(temperature=1.0, **{name: 3})), 0, SERVED)  # type: ignore[arg-type]
    assert made.chain is not None
    assert name not in made.fields


@pytest.mark.parametrize("name", sorted({*SAMPLING["refused"], "prompt_ignore_length"}))
def test_what_is_refused_is_refused_with_a_reason(name: str) -> None:
    assert REFUSED[name]
    unlike = SamplingParams()
    object.__setattr__(unlike, name, object())
    with pytest.raises(InvalidRequest, match=rf"sampling_params\.{name}: "):
        native_request(EngineRequest("", PROMPT, unlike), 0, SERVED)


@pytest.mark.parametrize("name", sorted(SAMPLING["text"]))
def test_what_is_about_text_changes_nothing(name: str) -> None:
    unlike = SamplingParams()
    object.__setattr__(unlike, name, 7)
    assert native_request(EngineRequest("", PROMPT, unlike), 0, SERVED) == native_request(
        EngineRequest("", PROMPT, SamplingParams()), 0, SERVED
    )


GUIDES = {
    "regex": "sent with guided_decoding_backend: xgrammar, test_tensorrt_drafts.py",
    "grammar": "sent with llguidance, whatever the kind of guide, test_tensorrt_drafts.py",
    **dict.fromkeys(("json", "json_object", "structural_tag"), "not sent: the library reads them in its own way"),
}


def test_a_row_for_each_field_of_a_guide() -> None:
    assert set(GUIDES) == {name for name, *_ in CONTRACT["guided_decoding_params"]}


# Arguments of ``generate_async``

SUBMISSION = {
    "inputs": "sent",
    "sampling_params": "sent",
    "streaming": "sent",
    "disaggregated_params": "sent",
    "cache_salt": "sent",
    "trace_headers": "sent",
    "priority": "sent",
    "lora_request": "test_tensorrt_lora.py",
    "prompt_adapter_request": "not sent: no prompt adapters",
    "kv_cache_retention_config": "not sent: blocks are evicted in the library's own order",
    "scheduling_params": "test_tensorrt_ranks.py",
    "conversation_params": "test_tensorrt_ranks.py",
    "_postproc_params": "not sent: private",
}


def in_role(model: Path, role: Role) -> TrtllmEngine:
    options = {"cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 30_000}}
    config = engine(model).config
    return TrtllmEngine(dataclasses.replace(config, role=role, options={**config.options, **options}, kv_lease_s=0.001))


async def test_a_row_for_each_argument_of_a_submission(model: Path) -> None:
    rows = {name for name, *_ in CONTRACT["generate_async"]["1.3"]}
    assert rows == set(SUBMISSION)
    assert {text.partition("=")[0] for text in CONTRACT["generate_async"]["1.2"]} <= rows
    sent: set[str] = set()
    hints: dict[str, Any] = {"hints": RequestHints({"traceparent": "x"}, 1), "cache_salt": "tenant"}
    with stand_in():
        prefill, decode = in_role(model, "prefill"), in_role(model, "decode")
        try:
            for each in (prefill, decode):
                await each.start()
                each._llm.generate_async = recorded(each._llm.generate_async, sent)
            first = await collect(prefill, PROMPT, SamplingParams(max_tokens=3), kv=KeepKv(), **hints)
            await collect(decode, PROMPT, SamplingParams(max_tokens=3), kv=ReadKv(first.kv or {}), **hints)
        finally:
            for each in (prefill, decode):
                await each.stop()
    assert {"inputs", "sampling_params"} | sent == {name for name, what in SUBMISSION.items() if what == "sent"}


def recorded(generate: Any, names: set[str]) -> Any:
    def asked(inputs: Any, sampling_params: Any, **arguments: Any) -> Any:
        names.update(arguments)
        return generate(inputs, sampling_params, **arguments)

    return asked


# Fields of ``DisaggregatedParams``

HAND_OFF: dict[str, Any] = {  # name → what it is when it is sent; None: never
    "request_type": "context_only",
    "first_gen_tokens": [5],
    "first_gen_log_probs": [{}],
    "ctx_request_id": 3,
    "opaque_state": b"\x00",
    "draft_tokens": [7],
    "disagg_request_id": 2**42,
    "ctx_dp_rank": 0,
    "ctx_info_endpoint": "host:1",
    "schedule_style": 0,
    "ctx_usage": {"prompt_tokens": 4},
    "conversation_id": "c",
    "logical_request_id": 1,
    "prefill_artifact_id": "a",
    "artifact_version": 1,
    "handoff_attempt_uuid": "b",
    "consumer_grant_id": "c",
    "transfer_session_id": "d",
    "generation_endpoint_name": "decode",
    "generation_endpoint_rank": 0,
    "generation_endpoint_incarnation": "e",
    "context_control_endpoint": "host:2",
    "context_transceiver_lifecycle": None,  # an object of the coordinator's, which this worker has none of
    "first_gen_logits": None,
    "multimodal_embedding_handles": None,
    "multimodal_hashes": None,
    "mrope_position_ids_handle": None,
    "mrope_position_deltas_handle": None,
    "_lifecycle_identity_locked": None,
}


@pytest.fixture
def newest() -> Iterator[Any]:
    """``DisaggregatedParams`` with all its fields."""
    with stand_in(lifecycle=True):
        yield importlib.import_module("tensorrt_llm.disaggregated_params")


def test_a_row_for_each_field_of_a_hand_off(newest: Any) -> None:
    facts = CONTRACT["disaggregated_params"]
    ids = facts["lifecycle"]
    assert set(HAND_OFF) == {row[0] for row in (*facts["fields"], *ids["fields"], ids["last"])}
    sent = {name: value for name, value in HAND_OFF.items() if value is not None}
    params = newest.DisaggregatedParams(**sent)
    params._lifecycle_identity_locked = True
    data = json.loads(json.dumps(disaggregated_params.encode(params)))
    assert set(data["params"]) == set(sent)
    found = disaggregated_params.decode(data, newest.DisaggregatedParams, SimpleNamespace)
    assert found == newest.DisaggregatedParams(**{**sent, "request_type": "generation_only"})
    assert not found._lifecycle_identity_locked


@pytest.mark.parametrize("name", [name for name, value in HAND_OFF.items() if value is None and name[0] != "_"])
def test_what_is_never_handed_over_stops_the_hand_off(name: str, newest: Any) -> None:
    advertised = newest.TransceiverLifecycleAdvertisement(protocol_version=1, capabilities=())
    params = newest.DisaggregatedParams(first_gen_tokens=[5], **{name: advertised})
    with pytest.raises(RequestFailed, match=f"{name}.*cannot be sent"):
        disaggregated_params.encode(params)


# What the library gives back

OUTPUT = {
    "read": {"token_ids", "logprobs", "finish_reason", "stop_reason", "disaggregated_params"},
    "not read": {
        *("index", "text", "cumulative_logprob", "prompt_logprobs", "generation_logits", "request_perf_metrics"),
        *("additional_context_outputs", "additional_generation_outputs"),
        *("length", "text_diff", "token_ids_diff", "logprobs_diff"),  # since the last response: a worker may miss one
    },
}
RESULT = {
    "used": {"outputs", "finished", "cached_tokens", "abort"},
    "not used": {
        *("prompt", "prompt_token_ids", "request_id", "context_logits", "disaggregated_params", "decoding_iter"),
        *("avg_decoded_tokens_per_iter", "metrics_dict", "aborted", "result", "aresult", "clear_logprob_params"),
        "record_stats",
    },
}
FINISH = {"stop": "stop", "length": "length", "cancelled": "cancelled", "not_finished": "length", "timeout": "error"}
LLM = {
    "used": {"get_stats_async", "get_kv_cache_events_async", "get_kv_cache_capacity", "shutdown", "_check_health"},
    "not used": {"get_stats", "get_kv_cache_events", "preprocess"},
}


class Recording:
    """Says which attributes were read."""

    def __init__(self, **values: Any) -> None:
        self.values, self.names = values, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return self.values[name]


def test_a_row_for_each_attribute_of_a_result() -> None:
    outputs = {name for name, *_ in CONTRACT["completion_output"]} | set(CONTRACT["completion_output_properties"])
    assert OUTPUT["read"] | OUTPUT["not read"] == outputs
    result = CONTRACT["request_output"]
    assert RESULT["used"] | RESULT["not used"] == {*result["attributes"], *result["methods"]}
    assert LLM["used"] | LLM["not used"] == set(CONTRACT["llm"]["1.3"])
    at = SimpleNamespace(logprob=-0.5, rank=1)
    assert set(vars(at)) == {name for name, *_ in CONTRACT["logprob"]}
    output = Recording(token_ids=[5], logprobs=[{5: at}], finish_reason="length", stop_reason=None)
    assert Cursor(0, frozenset(), num_logprobs=1).advance(output) is not None
    assert output.names == OUTPUT["read"] - {"disaggregated_params"}


def test_a_row_for_each_finish_reason() -> None:
    assert set(FINISH) == set(CONTRACT["finish_reasons"])
    for reason, expected in FINISH.items():
        output = SimpleNamespace(token_ids=[5], finish_reason=reason, stop_reason=None, logprobs=None)
        delta = Cursor(0, frozenset()).advance(output)
        assert delta is not None
        assert delta.finish_reason == expected
