"""Dynamo's own files for TensorRT-LLM, and arguments by the names of Dynamo's worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from stand_in import running
from trtllm_files import configured

from worker.engines.trtllm import TrtllmConfig
from worker.engines.trtllm.llm_options import NEEDED
from worker.engines.trtllm.settings import EVENT_BUFFER
from worker.errors import ConfigurationError

# Keys of the files in examples/backends/trtllm/engine_configs @20bff1da, @b6f88b1f, @29d54301


def _file(**differences: Any) -> dict[str, Any]:
    """A file with what most of them have, but for what is None."""
    usual = {
        "tensor_parallel_size": 1,
        "moe_expert_parallel_size": 1,
        "enable_attention_dp": False,
        "max_num_tokens": 8192,
        "trust_remote_code": True,
        "backend": "pytorch",
        "enable_chunked_prefill": True,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.85},
        "cuda_graph_config": {"max_batch_size": 16},
        "cache_transceiver_config": {"backend": "DEFAULT"},
    }
    return {name: value for name, value in {**usual, **differences}.items() if value is not None}


_UCX = {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 16384}}
_GRAPHS = {"cuda_graph_config": {"enable_padding": True, "batch_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}}
_DEEPSEEK = {
    **_UCX,
    **dict.fromkeys(("trust_remote_code", "enable_chunked_prefill", "cuda_graph_config")),
    "tensor_parallel_size": 4,
    "moe_expert_parallel_size": 4,
    "max_batch_size": 256,
    "max_seq_len": 8448,
    "kv_cache_config": {"free_gpu_memory_fraction": 0.85, "dtype": "fp8"},
    "print_iter_log": True,
}
_WIDE = {"moe_config": {"backend": "WIDEEP", "load_balancer": "/eplb.yaml"}, "enable_attention_dp": True}
_VISION = {
    "kv_cache_config": {"free_gpu_memory_fraction": 0.3, "enable_block_reuse": False},
    "cuda_graph_config": None,
    "max_batch_size": 8,
}
_GEMMA = {
    "backend": "pytorch",
    "tensor_parallel_size": 1,
    "kv_cache_config": {"max_attention_window": [512, 512, 512, 512, 512, 32768]},
    **_UCX,
}
_LORA = {"lora_config": {"lora_ckpt_source": "hf", "max_lora_rank": 64, "max_loras": 2, "max_cpu_loras": 2}}
_MTP = {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1}}
_EAGLE = {"speculative_config": {"decoding_type": "Eagle", "max_draft_len": 3}}
_ROLES = "speculative_config: is served on aggregated workers alone"
_OVERLAPS, _STEPS = {"disable_overlap_scheduler": False}, {"disable_overlap_scheduler": True}
STOCK: list[tuple[str, str, dict[str, Any], str | None]] = [  # file, role, keys, reason to refuse it
    ("qwen3/agg", "aggregated", _file(max_batch_size=16, cache_transceiver_config=None), None),
    ("qwen3/prefill", "prefill", _file(**_STEPS), None),
    ("qwen3/decode", "decode", _file(**_OVERLAPS), None),
    ("qwen3/prefill-lora", "prefill", _file(**_STEPS, **_LORA), "lora_config: must be null"),
    ("qwen3/decode-lora", "decode", _file(**_OVERLAPS, **_LORA), "lora_config: must be null"),
    ("deepseek-r1-distill-llama-8b/prefill", "prefill", _file(**_STEPS, **_UCX), None),
    (
        "deepseek-r1/simple/prefill",
        "prefill",
        _file(**_DEEPSEEK | _STEPS, enable_attention_dp=True),
        None,
    ),
    ("deepseek-r1/simple/decode", "decode", _file(**_DEEPSEEK | _OVERLAPS | _GRAPHS), None),
    ("deepseek-r1/mtp/prefill", "prefill", _file(**_DEEPSEEK | _STEPS | _MTP), _ROLES),
    ("deepseek-r1/mtp/decode", "decode", _file(**_DEEPSEEK | _GRAPHS | _MTP), _ROLES),
    (
        "deepseek-r1/wide_ep/prefill",
        "prefill",
        _file(**_DEEPSEEK | _STEPS | _WIDE),
        None,
    ),
    (
        "deepseek-r1/wide_ep/decode",
        "decode",
        _file(**_DEEPSEEK | _OVERLAPS | _WIDE),
        None,
    ),
    ("gemma3/vswa_prefill", "prefill", _GEMMA | _STEPS, None),
    ("gemma3/vswa_decode", "decode", _GEMMA, None),
    ("llama4/eagle/decode", "decode", _file(**_STEPS | _EAGLE | _GRAPHS), _ROLES),
    ("llama4/multimodal/agg", "aggregated", _file(**_VISION, tensor_parallel_size=8), None),
    ("llava-v1.6/agg", "aggregated", _file(**_VISION, model_kwargs={"text_config": {"torch_dtype": "float16"}}), None),
    ("qwen2-vl/encode", "aggregated", _file(**_OVERLAPS), None),
    ("qwen3-vl-2b/agg", "aggregated", _file(**_VISION, max_seq_len=8192), None),
    ("qwen3-vl-30b/prefill", "prefill", _file(**_VISION | _STEPS, moe_expert_parallel_size=None), None),
    ("qwen3-vl-30b/decode", "decode", _file(**_VISION | _OVERLAPS, moe_expert_parallel_size=None), None),
    ("qwen3-vl-30b-fp8/agg", "aggregated", _file(**_VISION | _UCX, moe_expert_parallel_size=None), None),
]


@pytest.mark.parametrize(("name", "role", "content", "problem"), STOCK, ids=[one[0] for one in STOCK])
def test_dynamos_own_files(tmp_path: Path, name: str, role: str, content: dict[str, Any], problem: str | None) -> None:
    def read() -> TrtllmConfig:
        return configured(tmp_path, yaml.safe_dump(content), "--disaggregation-mode", role)

    if problem is not None:
        with pytest.raises(ConfigurationError, match=problem):
            read()
        return
    config = read()
    needed = {*NEEDED, "disable_overlap_scheduler"}
    for key in set(content) - needed - {"cache_transceiver_config", "kv_cache_config"}:
        assert config.options[key] == content[key]
    for key in ("cache_transceiver_config", "kv_cache_config"):
        assert content.get(key, {}).items() <= (config.options.get(key) or {}).items()
    assert config.options["disable_overlap_scheduler"] is True
    given_way = [note.partition(":")[0] for note in config.notes]
    assert given_way == ["disable_overlap_scheduler"] * (content.get("disable_overlap_scheduler") is False)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "disable_overlap_scheduler: false",
            "disable_overlap_scheduler: false gives way to true: steps overlap with --history lagged alone",
        ),
        ("num_postprocess_workers: 4", "num_postprocess_workers: 4 gives way to 0: the worker sends token ids"),
        ("stream_interval: 20", "stream_interval: 20 gives way to 1: every token must be a delta"),
        (
            "guided_decoding_backend: xgrammar",
            "guided_decoding_backend: xgrammar gives way to null: grammars run as logits processors",
        ),
    ],
)
def test_what_gives_way_is_named(tmp_path: Path, text: str, note: str) -> None:
    config = configured(tmp_path, text)
    assert config.options == configured(tmp_path).options
    (said,) = config.notes
    assert said.startswith(note)


def test_lagged_history_and_steps_that_do_not_overlap(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="disable_overlap_scheduler: must be false, got true"):
        configured(tmp_path, "disable_overlap_scheduler: true", "--history", "lagged")


# Arguments by the names of Dynamo's worker


def test_what_overrides_the_file_wins_key_by_key(tmp_path: Path) -> None:
    override = '{"print_iter_log": true, "max_batch_size": 8, "kv_cache_config": {"enable_block_reuse": false}}'
    text = "max_batch_size: 16\nkv_cache_config: {free_gpu_memory_fraction: 0.5, enable_block_reuse: true}\n"
    options = configured(tmp_path, text, "--override-engine-args", override).options
    assert (options["max_batch_size"], options["print_iter_log"]) == (8, True)
    assert options["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.5,
        "enable_block_reuse": False,
        "event_buffer_max_size": EVENT_BUFFER,
    }


def test_flags_of_dynamos_worker_become_arguments(tmp_path: Path) -> None:
    options = configured(
        tmp_path,
        "gpus_per_node: 8\n",
        *("--expert-parallel-size", "4", "--gpus-per-node", "8", "--load-format", "dummy", "--max-beam-width", "1"),
        *("--free-gpu-memory-fraction", "0.5", "--trtllm.kv_cache_config.enable_block_reuse", "false"),
        *("--no-enable-attention-dp", "--no-publish-kv-events", "--no-conversation-affinity"),
    ).options
    assert (options["moe_expert_parallel_size"], options["gpus_per_node"], options["load_format"]) == (4, 8, "dummy")
    assert options["kv_cache_config"] == {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False}
    assert "max_beam_width" not in options
    assert (options["enable_attention_dp"], options["attention_dp_config"]) == (False, None)


@pytest.mark.parametrize(
    ("text", "argv", "problem"),
    [
        (
            "kv_cache_config: {free_gpu_memory_fraction: 0.5}",
            ["--free-gpu-memory-fraction", "0.8"],
            "--free-gpu-memory-fraction asks for kv_cache_config.free_gpu_memory_fraction: 0.8, but "
            "--extra-engine-args FILE says 0.5; give it in one place",
        ),
        (
            "max_batch_size: 4",
            ["--override-engine-args", '{"max_batch_size": 8}', "--max-batch-size", "9"],
            "--max-num-seqs asks for max_batch_size: 9, but --override-engine-args says 8; give it in one place",
        ),
        (
            "",
            ["--enable-attention-dp", "--trtllm.enable_lm_head_tp_in_adp", "true"],
            "--trtllm.enable_lm_head_tp_in_adp: enable_lm_head_tp_in_adp: must be false, got true: logits processors "
            "need whole rows, and its ranks have a part of each",
        ),
        (
            "",
            ["--max-beam-width", "4"],
            "--max-beam-width: max_beam_width: must be 1, got 4: beam search is not served",
        ),
        (
            "",
            ["--guided-decoding-backend", "outlines"],
            "--guided-decoding-backend: guided_decoding_backend: must be null, got outlines: grammars run as logits "
            "processors",
        ),
        ("", ["--override-engine-args", "{"], "--override-engine-args: is not JSON: "),
        ("", ["--override-engine-args", "[1]"], "--override-engine-args: must be a JSON object, got '[1]'"),
        (
            "",
            ["--override-engine-args", '{"kv_cache_config": 3}', "--free-gpu-memory-fraction", "0.8"],
            "--override-engine-args: kv_cache_config: must be a mapping, got 3",
        ),
        (
            "",
            ["--trtllm.next_years_sampler", "fast"],
            "--trtllm.next_years_sampler: next_years_sampler: is in no row of this worker's table",
        ),
    ],
)
def test_refusals_name_the_source(tmp_path: Path, text: str, argv: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        configured(tmp_path, text, *argv)
    assert str(refused.value).replace(str(tmp_path / "extra.yaml"), "FILE").startswith(problem)


async def test_nvidias_file_on_the_stand_in(tmp_path: Path, model: Path) -> None:
    """Every key of it is one of the library's, so a library that knows them takes what is left."""
    path = tmp_path / "agg.yaml"
    path.write_text(yaml.safe_dump(_file(max_batch_size=16)))
    async with running(model, "--extra-engine-args", str(path), "--max-batch-size", "16") as served:
        args = served._llm.args
        assert (args.max_batch_size, args.max_num_tokens, args.trust_remote_code) == (16, 8192, False)
        assert served._info is not None
        assert served._info.max_num_seqs == 16
