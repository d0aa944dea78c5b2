"""Arguments of `LLM`. Unknown ones are errors."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, Optional  # the contract's own spelling

from pydantic import BaseModel, ConfigDict, create_model

from tensorrt_llm.lora_helper import LoraConfig
from tensorrt_llm.standin_switches import SWITCHES


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CapacitySchedulerPolicy(str, Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class DynamicBatchConfig(_Strict):
    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class SchedulerConfig(_Strict):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: Optional[str] = None
    dynamic_batch_config: Optional[DynamicBatchConfig] = None
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"


class CudaGraphConfig(_Strict):
    batch_sizes: Optional[list[int]] = None
    max_batch_size: int = 0
    enable_padding: bool = False


class KvCacheConfig(_Strict):
    enable_block_reuse: bool = True
    max_tokens: Optional[int] = None
    max_attention_window: Optional[list[int]] = None
    free_gpu_memory_fraction: Optional[float] = 0.9
    host_cache_size: Optional[int] = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    dtype: str = "auto"
    tokens_per_block: int = 32


class NewKvCacheConfig(KvCacheConfig):
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"


class CacheTransceiverConfig(_Strict):
    backend: Optional[Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"]] = None
    transceiver_runtime: Optional[Literal["CPP", "PYTHON"]] = None
    max_tokens_in_buffer: Optional[int] = None
    kv_transfer_timeout_ms: Optional[int] = None
    kv_transfer_sender_future_timeout_ms: Optional[int] = 1000


class DecodingBaseConfig(_Strict):
    max_draft_len: Optional[int] = None
    speculative_model: Optional[str] = None
    use_rejection_sampling: bool = False


class NGramDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: int = 0


class EagleDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["Eagle"] = "Eagle"
    greedy_sampling: Optional[bool] = True


class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["MTP"] = "MTP"
    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False


class AttentionDpConfig(_Strict):
    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10


class NewAttentionDpConfig(AttentionDpConfig):
    kv_cache_routing_conversation_affinity: bool = False


class _NewArgs(_Strict):
    model: str
    tokenizer: Optional[Any] = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    moe_expert_parallel_size: Optional[int] = None
    moe_tensor_parallel_size: Optional[int] = None
    moe_cluster_parallel_size: Optional[int] = None
    enable_attention_dp: bool = False
    enable_lora: bool = False
    lora_config: Optional[LoraConfig] = None
    gpus_per_node: Optional[int] = None
    dtype: str = "auto"
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Optional[Literal["xgrammar", "llguidance"]] = None
    scheduler_config: SchedulerConfig = SchedulerConfig()
    cache_transceiver_config: Optional[CacheTransceiverConfig] = None
    speculative_config: Optional[NGramDecodingConfig | EagleDecodingConfig | MTPDecodingConfig] = None
    max_batch_size: Optional[int] = 2048
    max_input_len: Optional[int] = 1024
    max_seq_len: Optional[int] = None
    max_beam_width: Optional[int] = 1
    max_num_tokens: Optional[int] = 8192
    num_postprocess_workers: int = 0
    reasoning_parser: Optional[str] = None
    return_perf_metrics: bool = False
    orchestrator_type: Optional[Literal["rpc", "ray"]] = None
    backend: Optional[str] = None
    cuda_graph_config: Optional[CudaGraphConfig] = CudaGraphConfig()
    disable_overlap_scheduler: bool = False
    attn_backend: str = "TRTLLM"
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    stream_interval: int = 1
    attention_dp_config: Optional[AttentionDpConfig] = None


TorchLlmArgs: Any = (
    create_model(
        "TorchLlmArgs",
        __base__=_NewArgs,
        sampler_type=(str, "auto"),
        disable_flashinfer_sampling=(bool, False),
    )
    if SWITCHES.is_old
    else create_model(
        "TorchLlmArgs",
        __base__=_NewArgs,
        attention_dp_config=(Optional[NewAttentionDpConfig], None),
        kv_cache_config=(NewKvCacheConfig, NewKvCacheConfig()),
        generation_config=(Literal["auto", "trtllm"], "trtllm"),
    )
)
