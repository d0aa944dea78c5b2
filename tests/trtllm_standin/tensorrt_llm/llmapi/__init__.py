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
from tensorrt_llm.standin_switches import SWITCHES

if not SWITCHES.is_old:
    from tensorrt_llm.conversation_params import ConversationParams as ConversationParams

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
