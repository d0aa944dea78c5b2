"""Options of the worker and the YAML file of TensorRT-LLM's own become arguments of ``LLM``."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from stand_in import collect, running
from trtllm_files import configured

from adapters.chain import ProcessorChain
from adapters.contract import Context
from adapters.processors.masks import BannedTokens
from adapters.vocabulary import Vocabulary
from worker.engines.trtllm import TrtllmEngine
from worker.engines.trtllm.llm_options import NEEDED, OWN, PASSED
from worker.engines.trtllm.settings import EVENT_BUFFER
from worker.errors import ConfigurationError, StartupError
from worker.sampling import SamplingParams


def test_settings_by_default(tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert config.options == {
        "kv_cache_config": {"event_buffer_max_size": EVENT_BUFFER},
        "disable_overlap_scheduler": True,
        "generation_config": "trtllm",
        "enable_chunked_prefill": True,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "enable_iter_perf_stats": True,
    }
    assert (config.history, config.fails_open, config.role) == ("exact", False, "aggregated")
    assert config.max_num_seqs is None  # the library's own


def test_settings_from_flags_and_file(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        "max_batch_size: 8\nkv_cache_config: {free_gpu_memory_fraction: 0.5}\nattn_backend: FLASHINFER\n",
        *("--tensor-parallel-size", "2", "--context-length", "512", "--kv-block-size", "64", "--kv-blocks", "10"),
        *("--history", "lagged", "--processor-errors", "open", "--dtype", "bfloat16", "--enable-kv-routing", "false"),
        *("--max-num-batched-tokens", "2048"),
    )
    assert config.options == {
        "attn_backend": "FLASHINFER",
        "max_batch_size": 8,
        "tensor_parallel_size": 2,
        "max_num_tokens": 2048,
        "max_seq_len": 512,
        "dtype": "bfloat16",
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "tokens_per_block": 64, "max_tokens": 640},
        "disable_overlap_scheduler": False,
        "generation_config": "trtllm",
        "enable_chunked_prefill": False,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "enable_iter_perf_stats": True,
    }
    assert (config.max_num_seqs, config.history, config.fails_open) == (8, "lagged", True)


def test_a_prefill_worker_does_not_overlap_steps(tmp_path: Path) -> None:
    for role, overlaps in (("prefill", False), ("decode", True)):
        config = configured(tmp_path, "", "--disaggregation-mode", role, "--history", "lagged")
        assert config.options["disable_overlap_scheduler"] is not overlaps
        assert config.history == "lagged"


@pytest.mark.parametrize(("given", "found"), [(["--kv-transfer-devices", "mlx5_0:1"], "mlx5_0:1"), ([], None)])
async def test_kv_goes_over_the_devices_that_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], found: str | None
) -> None:
    """UCX, in the executor's process, reads them in its environment."""
    monkeypatch.setenv("UCX_NET_DEVICES", "")
    monkeypatch.delenv("UCX_NET_DEVICES")
    async with running(model, "--disaggregation-mode", "prefill", "--kv-lease-s", "0.001", *given):
        assert os.environ.get("UCX_NET_DEVICES") == found


async def test_ranks_enforce_no_budget_by_their_own_clocks(model: Path) -> None:
    """The worker does, where several of them run copies of one chain."""
    for sizes, is_ours in (({}, False), ({"context_parallel_size": 2}, True)):
        async with running(model, "--override-engine-args", json.dumps(sizes)) as engine:
            context = Context(Vocabulary(1024), frozenset({1, 4}))
            chain = ProcessorChain(BannedTokens.build(BannedTokens.Args(token_ids=[5]), context), context)
            await collect(engine, [9, 30], SamplingParams(max_tokens=2), chain=chain)
        assert math.isinf(chain.failures.step_budget_s) is is_ours


async def test_a_prefill_worker_stays_for_its_readers(tmp_path: Path) -> None:
    config = configured(tmp_path, "", "--disaggregation-mode", "prefill", "--kv-lease-s", "0.1")
    assert config.kv_lease_s == 0.1
    engine = TrtllmEngine(config)
    now = asyncio.get_running_loop().time
    began = engine._requests.last_prefill_s = now()
    await engine.stop()
    assert now() - began >= 0.1


@pytest.mark.parametrize(
    ("text", "argv", "problem"),
    [
        ("max_batch_size: 8", ["--max-num-seqs", "9"], "--max-num-seqs asks for max_batch_size: 9, but"),
        ("kv_cache_config: {tokens_per_block: 32}", ["--kv-block-size", "64"], "--kv-block-size asks for"),
        ("", ["--kv-blocks", "5"], "--kv-blocks needs --kv-block-size"),
        ("enable_chunked_prefill: true", ["--history", "lagged"], "a prompt must be prefilled at once"),
        (
            "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}",
            ["--history", "lagged"],
            r"extra\.yaml: scheduler_config\.capacity_scheduler_policy: MAX_UTILIZATION: .* must not be preempted",
        ),
        ("a: 1\na: 2", [], "occurs twice"),
    ],
)
def test_contradictory_settings(tmp_path: Path, text: str, argv: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        configured(tmp_path, text, *argv)


def test_what_a_version_lacks(tmp_path: Path) -> None:
    config = configured(tmp_path, "print_iter_log: true")
    known = set(config.options) - {"enable_iter_perf_stats", "generation_config"}
    assert not {"enable_iter_perf_stats", "generation_config"} & set(config.llm_arguments(known, "x"))
    for lacking in ("print_iter_log", "disable_overlap_scheduler"):
        with pytest.raises(StartupError, match=f"has no argument '{lacking}'"):
            config.llm_arguments(known - {lacking}, "x")


@pytest.mark.parametrize("name", sorted(set(NEEDED) - {"speculative_config"}))  # which allows others by being there
def test_a_value_that_the_worker_needs_is_the_only_one_accepted(tmp_path: Path, name: str) -> None:
    row = NEEDED[name]
    for value in row.values:
        made = configured(tmp_path, yaml.safe_dump({name: value})).options
        assert made == {**configured(tmp_path).options}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Model"}}))
    for other in ("other", True if False in row.values else 1.5):
        with pytest.raises(ConfigurationError, match=rf"extra\.yaml: {name}: must be .*, got .*: {row.reason[:20]}"):
            configured(tmp_path, yaml.safe_dump({name: other}), model_path=str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, name: str) -> None:
    """A checkpoint without code needs no trust; one with code does not get it."""
    here = str(tmp_path)
    assert "trust_remote_code" not in configured(tmp_path, "trust_remote_code: true", model_path=here).options
    (tmp_path / name).write_text(json.dumps({"auto_map": {"AutoConfig": "configuration.Config"}}))
    with pytest.raises(ConfigurationError, match="code in a checkpoint is never run"):
        configured(tmp_path, "trust_remote_code: true", model_path=here)
    assert configured(tmp_path, "trust_remote_code: false", model_path=here)


def test_the_model_of_the_file_is_that_of_the_command_line(tmp_path: Path) -> None:
    assert "model" not in configured(tmp_path, "model: /m").options
    with pytest.raises(ConfigurationError, match="model: must be /m, got Qwen/Qwen3: it is --model-path"):
        configured(tmp_path, "model: Qwen/Qwen3")


def test_an_argument_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="next_years_sampler: is in no row of this worker's table"):
        configured(tmp_path, "next_years_sampler: fast")


def test_one_row_for_each_argument() -> None:
    assert not OWN & PASSED
    assert not (OWN | PASSED) & set(NEEDED)
    assert all(row.reason for row in NEEDED.values())


# The embedded engine's defaults are not TensorRT-LLM's


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ([], (None, None)),
        (["--max-num-seqs", "2048"], (2048, None)),
        (["--max-num-batched-tokens", "16"], (None, 16)),
        (["--max-num-seqs", "2048", "--max-num-batched-tokens", "4096"], (2048, 4096)),
    ],
)
def test_sizes_that_are_not_given_are_the_librarys(tmp_path: Path, argv: list[str], sizes: tuple[Any, Any]) -> None:
    options = configured(tmp_path, "", *argv).options
    assert (options.get("max_batch_size"), options.get("max_num_tokens")) == sizes


def test_sizes_that_are_given_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be at least --max-num-seqs"):
        configured(tmp_path, "", "--max-num-seqs", "64", "--max-num-batched-tokens", "32")


async def test_the_librarys_own_batch_limits_the_queue(model: Path) -> None:
    async with running(model, "--max-num-batched-tokens", "64", library_batch=True) as served:
        assert served._info is not None
        assert served._info.max_num_seqs == served._llm.args.max_batch_size == 2048


# The transceiver


def test_a_transfer_has_a_time_out(tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        config = configured(tmp_path, "", "--disaggregation-mode", role, "--kv-lease-s", "12.5")
        assert config.options["cache_transceiver_config"] == {"backend": "DEFAULT", "kv_transfer_timeout_ms": 25000}
    assert "cache_transceiver_config" not in configured(tmp_path).options


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("{backend: UCX}", {"backend": "UCX", "kv_transfer_timeout_ms": 60000}),
        (
            "{max_tokens_in_buffer: 9}",
            {"max_tokens_in_buffer": 9, "backend": "DEFAULT", "kv_transfer_timeout_ms": 60000},
        ),
        ("{kv_transfer_timeout_ms: 30000}", {"backend": "DEFAULT", "kv_transfer_timeout_ms": 30000}),
        ("null", {"backend": "DEFAULT", "kv_transfer_timeout_ms": 60000}),
        ("{kv_transfer_timeout_ms: null}", None),
        ("{kv_transfer_timeout_ms: 29999}", None),
        ("{kv_transfer_timeout_ms: 60000.5}", None),
    ],
)
def test_the_files_transceiver(tmp_path: Path, given: str, found: dict[str, Any] | None) -> None:
    """KV is there for as long as a lease says that it is."""
    text, role = f"cache_transceiver_config: {given}", ("--disaggregation-mode", "decode")
    if found is None:
        with pytest.raises(ConfigurationError, match="kv_transfer_timeout_ms: must be at least the 30000 ms"):
            configured(tmp_path, text, *role)
    else:
        assert configured(tmp_path, text, *role).options["cache_transceiver_config"] == found


# The context length


def test_the_context_length_is_set(tmp_path: Path) -> None:
    """TensorRT-LLM keeps None in its arguments, whatever it deduces."""
    known = {"max_seq_len", "kv_cache_config", *configured(tmp_path).options}
    for text, argv, expected in (
        ("", (), 4096),
        ("max_seq_len: null", (), 4096),
        ("max_seq_len: 100", (), 100),
        ("", ("--context-length", "200"), 200),
    ):
        arguments = configured(tmp_path, text, *argv).llm_arguments(known, "x", 4096)
        assert arguments["max_seq_len"] == expected
    assert "max_seq_len" not in configured(tmp_path).llm_arguments(known, "x", None)


async def test_the_engine_and_the_worker_have_one_context_length(model: Path) -> None:
    length = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    async with running(model) as served:
        assert served._info is not None
        assert served._llm.args.max_seq_len == served._info.context_length == length


@pytest.mark.parametrize(
    ("text", "argv", "problem"),
    [
        (
            "enable_attention_dp: true",
            ["--lora-modules", "mine=/a"],
            "--lora-modules: .*enable_attention_dp: .*untested",
        ),
        ("moe_expert_parallel_size: 2", ["--lora-modules", "mine=/a"], "moe_expert_parallel_size: .*untested"),
        (
            "speculative_config: {decoding_type: MTP}",
            ["--lora-modules", "mine=/a"],
            "not served with speculative_config",
        ),
        (
            "speculative_config: {decoding_type: MTP}",
            ["--pipeline-parallel-size", "2"],
            "speculative_config: NVIDIA does not support drafts with pipeline_parallel_size above 1",
        ),
    ],
)
def test_combinations_that_nvidia_has_not_tested_are_refused(
    tmp_path: Path, text: str, argv: list[str], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        configured(tmp_path, text, *argv)
