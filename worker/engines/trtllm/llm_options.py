"""Arguments of ``tensorrt_llm.LLM`` that a YAML file may give: one row for each.

An argument is the worker's own (a flag sets it, and the file may repeat it), *needed* (it must have
the value that exact logits processors need, or gives way to it), or *passed* on as it is. One
without a row is refused: a version's new argument may change tokens without a word, as
``generation_config`` did. Read in TensorRT-LLM's ``llmapi/llm_args.py``;
`tests/contracts/trtllm.json` says which commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

OWN = frozenset(
    {
        "cache_transceiver_config",
        "dtype",
        "enable_chunked_prefill",
        "enable_iter_perf_stats",
        "kv_cache_config",
        "max_batch_size",
        "max_num_tokens",
        "max_seq_len",
        "pipeline_parallel_size",
        "scheduler_config",
        "tensor_parallel_size",
    }
)
"""Arguments that the worker's flags and roles set too (`settings`)."""


@dataclass(frozen=True, slots=True)
class Needed:
    """An argument that must have one of these values.

    Attributes:
        values: Accepted in the file; the first is the library's default, or the worker sets it.
        reason: Reason to refuse any other value, or to put the first one in its place.
        gives_way: Whether a value gives way to the first one, with a line in the log, because no
            answer depends on it: the files of NVIDIA's examples have such values.
    """

    values: tuple[Any, ...]
    reason: str
    gives_way: Callable[[Any], bool] = lambda value: False

    def accepts(self, value: Any) -> bool:
        """Whether the value is one of these, of the same type: ``true`` is not 1."""
        return any(type(value) is type(each) and value == each for each in self.values)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_TOKENIZER = "the tokenizer is the checkpoint's own"
_NO_SPECULATION = "speculative decoding is speculative_config"
_LORA = "adapters are --lora-modules NAME=DIRECTORY"
_NO_OBJECTS = "a file cannot hold an object"
_GENERATES = "this worker generates answers"

NEEDED: dict[str, Needed] = {
    "backend": Needed(("pytorch", None), "logits processors are called as the PyTorch backend does it"),
    "batched_logits_processor": Needed((None,), "the PyTorch backend does not call it"),
    "checkpoint_loader": Needed((None,), _NO_OBJECTS),
    "custom_tokenizer": Needed((None,), _TOKENIZER),
    "decoding_config": Needed((None,), _NO_SPECULATION),
    "enable_lm_head_tp_in_adp": Needed(
        (False,), "logits processors need whole rows, and its ranks have a part of each"
    ),
    "enable_lora": Needed((False,), _LORA),
    "encode_only": Needed((False,), _GENERATES),
    "gather_generation_logits": Needed((False,), "raw logits are not returned"),
    "generation_config": Needed(
        ("trtllm",), "controls that a request leaves out would get the model's defaults, and greedy requests be sampled"
    ),
    "guided_decoding_backend": Needed(
        (None,), "grammars run as logits processors", lambda value: value in ("xgrammar", "llguidance")
    ),
    "lookahead_config": Needed((None,), _NO_SPECULATION),
    "lora_config": Needed((None,), _LORA),
    "max_beam_width": Needed((1, None), "beam search is not served"),
    "mm_encoder_only": Needed((False,), _GENERATES),
    "mpi_session": Needed((None,), _NO_OBJECTS),
    "num_postprocess_workers": Needed((0,), "the worker sends token ids", _is_count),
    "num_serve_frontends": Needed((1,), "the frontend is Dynamo's"),
    "post_processor_hook": Needed((None,), "nothing changes an answer after its logits processors"),
    "reasoning_parser": Needed((None,), "thinking budgets run as logits processors, and the frontend parses reasoning"),
    "sampler_type": Needed(("auto", "TorchSampler"), "later versions have TorchSampler alone"),
    "skip_tokenizer_init": Needed(
        (False,), "guides, pictures and the worker's own requests need TensorRT-LLM's tokenizer"
    ),
    "speculative_config": Needed((None,), "without drafts"),
    "stream_interval": Needed((1,), "every token must be a delta", _is_count),
    "tokenizer": Needed((None,), _TOKENIZER),
    "trust_remote_code": Needed((False,), "the checkpoint has code of its own, and code in a checkpoint is never run"),
}
"""Arguments whose other values would break what the worker promises. ``model`` and
``disable_overlap_scheduler`` are needed too: their values follow from the options (`needed`).
"""

PASSED = frozenset(
    {
        "allreduce_strategy",
        "attention_dp_config",
        "attn_backend",
        "batch_wait_max_tokens_ratio",
        "batch_wait_timeout_iters",
        "batch_wait_timeout_ms",
        "checkpoint_format",
        "checkpoint_io_policy",
        "context_parallel_size",
        "cp_config",
        "cuda_graph_config",
        "disable_flashinfer_sampling",
        "disable_mm_encoder",
        "dwdp_config",
        "enable_attention_dp",
        "enable_autotuner",
        "enable_early_first_token_response",
        "enable_encoder_decoder_mixed_cuda_graph",
        "enable_energy_metrics",
        "enable_in_graph_sampling",
        "enable_iter_req_stats",
        "enable_layerwise_nvtx_marker",
        "enable_low_latency_host_dispatch",
        "enable_min_latency",
        "enable_mla_skip_correction",
        "enable_resource_governor",
        "enable_speculative_beam_history_d2h",
        "encoder_cuda_graph_config",
        "encoder_max_batch_size",
        "encoder_max_num_tokens",
        "env_overrides",
        "force_dynamic_quantization",
        "garbage_collection_gen0_threshold",
        "gms_config",
        "gpus_per_node",
        "iter_stats_max_iterations",
        "kv_cache_compression_config",
        "kv_connector_config",
        "layer_wise_benchmarks_config",
        "load_format",
        "max_input_len",
        "max_stats_len",
        "mla_skip_correction_threshold",
        "model_kwargs",
        "moe_cluster_parallel_size",
        "moe_config",
        "moe_expert_parallel_size",
        "moe_tensor_parallel_size",
        "multimodal_config",
        "mx_config",
        "nvfp4_gemm_config",
        "orchestrator_type",
        "otlp_traces_endpoint",
        "peft_cache_config",
        "perf_metrics_max_requests",
        "perf_metrics_output_dir",
        "postprocess_tokenizer_dir",
        "pp_partition",
        "prefill_capture_num_tokens",
        "prefill_cuda_graph_backend",
        "print_iter_log",
        "prometheus_metrics_config",
        "ray_placement_config",
        "ray_worker_extension_cls",
        "ray_worker_nsight_options",
        "reorder_policy_config",
        "request_stats_max_iterations",
        "return_perf_metrics",
        "revision",
        "sampler_force_async_worker",
        "sleep_config",
        "sparse_attention_config",
        "telemetry_config",
        "tokenizer_mode",
        "tokenizer_revision",
        "torch_compile_config",
        "use_cute_dsl_bf16_bmm",
        "use_cute_dsl_bf16_gemm",
        "use_cute_dsl_blockscaling_bmm",
        "use_cute_dsl_blockscaling_mm",
        "use_fine_grained_sync",
    }
)
"""Arguments about weights, kernels, parallelism, memory and measurement: they change what a logit
is or when it is computed, and not what becomes of it.
"""


DRAFTING = frozenset({"disable_overlap_scheduler", "guided_decoding_backend", "speculative_config"})
"""Arguments that are the operator's where there is a ``speculative_config``: no logits processors
run then. `speculation` checks them.
"""


def needed(*, model_path: str, overlaps: bool, has_code: bool, drafts: bool = False) -> dict[str, Needed]:
    """`NEEDED`, and what follows from the worker's options and the checkpoint.

    Args:
        model_path: ``--model-path``.
        overlaps: Whether this role runs with overlapped scheduling (``--history``).
        has_code: Whether the checkpoint has code of its own. One without needs no trust, so that a
            file may offer it.
        drafts: Whether there is a ``speculative_config``.
    """
    history = "steps overlap with --history lagged alone, and on a prefill worker never"
    gives_way = (lambda value: False) if overlaps else (lambda value: value is False)
    rows = {
        **NEEDED,
        "model": Needed((model_path,), "it is --model-path"),
        "disable_overlap_scheduler": Needed((not overlaps,), history, gives_way),
    }
    if not has_code:
        rows["trust_remote_code"] = Needed((False, True), "")
    return {name: row for name, row in rows.items() if not drafts or name not in DRAFTING}


class Split(NamedTuple):
    """Arguments that were given, sorted by their rows.

    Attributes:
        kept: Arguments that the worker has to set or pass on.
        notes: A line for each that gave way to the worker's own value.
        refused: Name and problem of the first that is refused, None if none is.
    """

    kept: dict[str, Any]
    notes: tuple[str, ...] = ()
    refused: tuple[str, str] | None = None


def split(given: Mapping[str, Any], rows: Mapping[str, Needed]) -> Split:
    """Sort arguments of ``LLM``.

    Args:
        given: The arguments.
        rows: Rows of the arguments, made by `needed`.
    """
    kept, notes = {}, []
    for name, value in given.items():
        row = rows.get(name)
        if row is not None and row.gives_way(value) and not row.accepts(value):
            notes.append(f"{name}: {_shown(value)} gives way to {_shown(row.values[0])}: {row.reason}")
        elif row is not None and not row.accepts(value):
            problem = f"must be {_shown(row.values[0])}, got {_shown(value)}: {row.reason}"
            return Split({}, refused=(name, problem))
        elif row is None and name not in OWN | PASSED | DRAFTING:
            problem = "is in no row of this worker's table, so whether logits processors stay exact is unknown"
            return Split({}, refused=(name, f"{problem} (docs/tensorrt-llm.md)"))
        elif row is None:
            kept[name] = value
    return Split(kept, tuple(notes))


def _shown(value: Any) -> str:
    """A value as YAML spells it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    return words[value] if is_word else str(value)[:60]
