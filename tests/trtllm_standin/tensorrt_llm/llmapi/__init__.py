"""The public names of the LLM API."""

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import (
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    DynamicBatchConfig,
    KvCacheConfig,
    SchedulerConfig,
    TorchLlmArgs,
)
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DynamicBatchConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "SamplingParams",
    "SchedulerConfig",
    "TorchLlmArgs",
]
