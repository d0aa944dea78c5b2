"""What vLLM is started with, and what its fields and a request's become of each other."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from fake_vllm import FakeParams, package
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.masks import BannedTokens
from adapters.vocabulary import Vocabulary
from worker.arguments import parse_arguments
from worker.engines import EngineRequest, free_memory
from worker.engines.refusals import IRRELEVANT, REFUSED_EVERYWHERE
from worker.engines.vllm import VllmConfig, config_from
from worker.engines.vllm.package import read_package
from worker.engines.vllm.params import (
    EARLY,
    LEAST_TEMPERATURE,
    MOST_KEPT_AWAY,
    MOST_TEMPERATURE,
    REFUSED,
    SAMPLER,
    NativeRequest,
    Served,
    native_request,
    shipped,
)
from worker.engines.vllm.settings import OWN
from worker.engines.vllm.settings import REFUSED as REFUSED_ARGUMENTS
from worker.errors import ConfigurationError, InvalidRequest, StartupError
from worker.installation import check_engine
from worker.sampling import SamplingParams

PROMPT = [9, 30, 41]
SERVED = Served(64, (1,))


def config(*argv: str) -> VllmConfig:
    return config_from(parse_arguments(["--model-path", "/m", "--engine", "vllm", *argv], {}))


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        config(*argv)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_options_become_vllms_arguments(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("gpu_memory_utilization: 0.5\nmax_num_seqs: 7\n")
    made = config(
        "--max-num-seqs", "7", "--context-length", "512", "--kv-cache-memory", "1GiB", "--engine-args", str(path)
    )
    assert made.options == {
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 7,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 2**30,
    }
    assert config("--engine-args", '{"enforce_eager": true}').options == {"enforce_eager": True}
    assert config().options == {}
    arguments = config("--max-num-seqs", "7").engine_arguments(package().engine_fields, "0.0")
    seed = arguments.pop("seed")
    assert arguments == {"model": "/m", "generation_config": "vllm", "max_num_seqs": 7, **OWN}
    assert 0 <= seed < 2**31


def test_workers_draw_numbers_of_their_own() -> None:
    """Choices of one request may be answered by several workers, and must not be one answer."""
    known = package().engine_fields
    assert len({config().engine_arguments(known, "0.0")["seed"] for _ in range(8)}) == 8
    assert config("--engine-args", '{"seed": 5}').engine_arguments(known, "0.0")["seed"] == 5


def test_kv_events_are_published_where_somebody_can_ask_for_them() -> None:
    """Dynamo's router, and subscribers over OpenEngine; the runtime on NATS has neither."""
    found = {runtime: config("--runtime", runtime).has_events for runtime in ("dynamo", "openengine", "nats")}
    assert found == {"dynamo": True, "openengine": True, "nats": False}
    assert not config("--runtime", "openengine", "--enable-kv-routing", "false").has_events


def test_underscores_are_dashes_in_the_workers_flags() -> None:
    """As in all of vLLM's, of which some are the worker's, too; other engines know dashes alone."""
    argv = ["--model_path=/m_1", "--served_model_name", "a_b", "--max_num_seqs", "7", "--kv-block_size", "32"]
    made = parse_arguments(["--engine", "vllm", *argv], {})
    assert (made.model_path, made.served_model_name, made.max_num_seqs, made.kv_block_size) == ("/m_1", "a_b", 7, 32)
    assert made.engine_flags == ()
    with pytest.raises(
        ConfigurationError, match=r"unrecognized arguments: --model_path=/m_1 .*did you mean --model-path"
    ):
        parse_arguments(argv, {})


def test_a_cpu_s_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would take most of the machine's memory."""
    known = {*package().engine_fields, "kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization"}

    def cache(*argv: str) -> object:
        return config(*argv).engine_arguments(known, "0.0", is_cpu=True).get("kv_cache_memory_bytes")

    found = cache()
    assert isinstance(found, int)
    assert 0 < found <= 2**32
    assert cache("--kv-cache-memory", "9GiB") == 9 * 2**30
    assert cache("--kv-blocks", "7") is not None  # a number of blocks says nothing of memory
    assert cache("--engine-args", '{"gpu_memory_utilization": 0.5}') is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert cache() is None


def test_a_cpu_s_cache_fits_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine around it has: beyond its limit the kernel ends the process."""
    for name, text in (("memory.max", str(2**30)), ("memory.current", "0"), ("memory.stat", "inactive_file 0")):
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_free_on_machine", lambda: 2**40)
    known = {*package().engine_fields, "kv_cache_memory_bytes"}
    assert config().engine_arguments(known, "0.0", is_cpu=True)["kv_cache_memory_bytes"] == 2**28
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path / "none")
    monkeypatch.setattr(free_memory, "_free_on_machine", lambda: None)
    assert config().engine_arguments(known, "0.0", is_cpu=True)["kv_cache_memory_bytes"] == 2**32


def test_what_contradicts_the_worker_is_refused() -> None:
    assert "--max-num-seqs asks for max_num_seqs: 8, but --engine-args says 9" in refusal(
        "--max-num-seqs", "8", "--engine-args", '{"max_num_seqs": 9}'
    )
    assert "is not JSON" in refusal("--engine-args", "{")
    assert "--engine-args /no/file: " in refusal("--engine-args", "/no/file")
    for name, reason in REFUSED_ARGUMENTS.items():
        if name == "trust_remote_code":  # only where the checkpoint has code
            continue
        assert refusal("--engine-args", json.dumps({name: None})) == f"--engine-args: {name}: cannot be given: {reason}"
    for flag, value in (("--numerics", "exact"), ("--speculative-config", "{}"), ("--history", "lagged")):
        assert f"{flag} {value} needs --engine" in refusal(flag, value)
    problem = refusal("--disaggregation-mode", "decode", "--kv-lease-s", "9")
    assert (
        problem == "--kv-lease-s must be at least 10 with --engine vllm, which pulls no KV in a lease's last 5 s, got 9"
    )
    with pytest.raises(ConfigurationError, match=r"--engine-args \{\} needs --engine vllm"):
        parse_arguments(["--model-path", "/m", "--engine-args", "{}"], {})


def test_code_in_a_checkpoint_is_not_trusted(tmp_path: Path) -> None:
    """One without code needs no trust, so that trust may be offered."""

    def made(value: bool) -> object:
        argv = ["--model", str(tmp_path), "--engine", "vllm", "--engine-args", json.dumps({"trust_remote_code": value})]
        return config_from(parse_arguments(argv, {})).options

    assert made(True) == made(False) == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "tokenizer.Own"}}))
    assert made(False) == {}
    with pytest.raises(ConfigurationError, match="trust_remote_code: cannot be given: code in a checkpoint is never"):
        made(True)


def test_an_unknown_argument_names_those_close_to_it() -> None:
    with pytest.raises(StartupError, match=r"vLLM 0\.0 has no argument 'max_num_seq'; close to it are max_num_seqs"):
        config("--engine-args", '{"max_num_seq": 3}').engine_arguments(package().engine_fields, "0.0")


def test_without_vllm_the_engine_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match="--engine vllm: vllm is not installed"):
        check_engine(parse_arguments(["--model-path", "/m", "--engine", "vllm"], {}))
    environ = {"VLLM_LOGGING_LEVEL": "INFO"}
    with pytest.raises(StartupError, match="--engine vllm: vllm cannot be used: ModuleNotFoundError"):
        read_package(environ)
    assert environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert environ["VLLM_NO_USAGE_STATS"] == "1"


def native(**asked: Any) -> NativeRequest:
    made = native_request(EngineRequest("r", PROMPT, SamplingParams(**asked)), SERVED)
    FakeParams(**made.fields)
    return made


def members(made: NativeRequest) -> list[str]:
    return [] if made.chain is None else [member.name for member in made.chain.members]


# what is set, what vLLM's fields say, and the processors
ROWS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"temperature": 0.0, "stop_token_ids": [1], "max_tokens": 32}, []),
    ({"temperature": 0.7}, {"temperature": 0.7}, []),
    ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, []),
    ({"repetition_penalty": 1.2, "min_tokens": 3}, {"repetition_penalty": 1.2, "min_tokens": 3}, []),
    ({"min_tokens": 3, "ignore_eos": True}, {"stop_token_ids": []}, ["min_tokens"]),
    ({"stop_token_ids": [7], "end_id": 5}, {"stop_token_ids": [1, 5, 7]}, []),
    ({"bad_token_ids": [4], "presence_penalty": 1.0}, {}, ["presence_penalty", "banned_tokens"]),
    ({"temperature": 0.5, "seed": 3}, {"temperature": 1.0}, ["temperature", "seeded_sampler"]),
    ({"temperature": LEAST_TEMPERATURE / 2, "top_k": 3}, {"temperature": 1.0}, ["temperature", "top_k"]),
    ({"temperature": 2.0, "top_k": 3}, {"temperature": 2.0, "top_k": 3}, []),
    ({"temperature": 2.1, "top_k": 3}, {"temperature": 1.0}, ["temperature", "top_k"]),
    (
        {"no_repeat_ngram_size": 2, "temperature": 0.5, "top_k": 3},
        {"temperature": 0.5, "top_k": 3},
        ["no_repeat_ngram"],
    ),
    ({"seed": 3}, {"temperature": 0.0}, []),
]


@pytest.mark.parametrize(("asked", "expected", "processors"), ROWS)
def test_where_a_control_runs(asked: dict[str, Any], expected: dict[str, Any], processors: list[str]) -> None:
    made = native(**asked)
    assert {name: made.fields.get(name) for name in expected} == expected
    assert members(made) == processors
    if processors:
        assert not set(made.fields) & EARLY
    assert made.fields["ignore_eos"] is True  # every end token is named


@settings(max_examples=examples(50))
@given(
    st.lists(st.integers(0, 63), max_size=3, unique=True),
    st.sampled_from([None, 1, 5]),
    st.sets(st.integers(0, 63), max_size=4),
    st.booleans(),
)
def test_min_tokens_keeps_the_ends_of_the_answer_away(
    model_ends: list[int], tokenizer_end: int | None, stops: set[int], ignore_eos: bool
) -> None:
    """vLLM's keeps the end tokens of model and tokenizer away, too, whatever ends the answer."""
    served = Served(64, tuple(model_ends), tokenizer_end)
    asked = SamplingParams(min_tokens=3, stop_token_ids=sorted(stops), ignore_eos=ignore_eos)
    made = native_request(EngineRequest("r", PROMPT, asked), served)
    if made.chain is None:
        others = {*model_ends, *([] if tokenizer_end is None else [tokenizer_end])}
        assert made.fields["min_tokens"] == 3
        assert {*made.fields["stop_token_ids"], *others} == made.end_token_ids
    else:
        assert "min_tokens" not in made.fields
        assert members(made) == ["min_tokens"]


@pytest.mark.parametrize(("count", "processors"), [(MOST_KEPT_AWAY, []), (MOST_KEPT_AWAY + 1, ["min_tokens"])])
def test_stop_tokens_beyond_vllms_most_are_ours_to_keep(count: int, processors: list[str]) -> None:
    """Its second model runner has no room for them, and ends with all requests."""
    assert members(native(min_tokens=3, stop_token_ids=list(range(count)))) == processors
    assert members(native(stop_token_ids=list(range(count)))) == []


@settings(max_examples=examples(200))
@given(st.floats(0, 100), st.sampled_from([{}, {"top_p": 0.5}, {"seed": 3}, {"bad_token_ids": [4]}]))
def test_vllm_gets_no_temperature_that_it_changes(temperature: float, more: dict[str, Any]) -> None:
    """It refuses those above its highest one, and takes its lowest in the place of those below."""
    found = native(temperature=temperature, **more).fields["temperature"]
    assert found == 0 or LEAST_TEMPERATURE <= found <= MOST_TEMPERATURE


class ExitsWhenSent(BannedTokens):
    """Exits where it is pickled, which in the event loop would end the worker."""

    name = "acme/local"

    def __getstate__(self) -> object:
        raise SystemExit(0)


@pytest.mark.parametrize("exits", [False, True])
def test_a_processor_that_cannot_be_sent_is_named(exits: bool) -> None:
    class Local(BannedTokens):
        name = "acme/local"

    context = Context(Vocabulary(64), frozenset({1}))
    kinds: list[type[BannedTokens]] = [BannedTokens, ExitsWhenSent if exits else Local]
    built = [part for kind in kinds for part in kind.build(kind.Args(token_ids=[4]), context)]
    request = EngineRequest("r", PROMPT, SamplingParams(), ProcessorChain(built, context))
    with pytest.raises(InvalidRequest, match="logits_processor: acme/local cannot be sent to vLLM's process"):
        shipped(native_request(request, SERVED), "r", [1])


def test_every_field_is_served_or_refused() -> None:
    """A new field of `SamplingParams` must be considered here."""
    by_the_engine = {
        "n",
        "best_of",
        "end_id",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "max_tokens",
    }
    by_the_engine |= {"seed", "logprobs", "logprobs_mode", "prompt_logprobs", "logits_processor", "embedding_bias"}
    in_the_chain = {"no_repeat_ngram_size", "bad_token_ids"}
    known = by_the_engine | in_the_chain | EARLY | SAMPLER | set(REFUSED) | set(REFUSED_EVERYWHERE) | IRRELEVANT
    assert {one.name for one in fields(SamplingParams)} == known


def test_processed_pictures_are_not_cached() -> None:
    """vLLM's two copies of that cache differ once a prompt has been refused."""
    assert "mm_processor_cache_gb" not in config().options
    assert config("--modality", "multimodal").options["mm_processor_cache_gb"] == 0
    given_0 = '{"mm_processor_cache_gb": 0}'
    assert config("--modality", "multimodal", "--engine-args", given_0).options["mm_processor_cache_gb"] == 0
    given = '{"mm_processor_cache_gb": 4}'
    assert config("--engine-args", given).options["mm_processor_cache_gb"] == 4
    problem = "mm_processor_cache_gb: must be 0 with --modality multimodal"
    assert problem in refusal("--modality", "multimodal", "--engine-args", given)
