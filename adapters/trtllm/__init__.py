"""Logits processors as TensorRT-LLM logits-processor callables.

`adapter` makes the callables (`create_trtllm_adapters`); `side_channel` reports what they did when
TensorRT-LLM runs them in another process; `seeded_sampler` is the sampler's own draw as the last
processor of a chain; `native_controls` has the processors that no request can name, made of an
engine's dense bias and of third-party callables.
"""

from adapters.trtllm.adapter import (
    BaseLogitsProcessor,
    ChainAdapter,
    DynamoAdapter,
    Failure,
    Report,
    Step,
    TrtllmAdapter,
    create_trtllm_adapters,
)

__all__ = [
    "BaseLogitsProcessor",
    "ChainAdapter",
    "DynamoAdapter",
    "Failure",
    "Report",
    "Step",
    "TrtllmAdapter",
    "create_trtllm_adapters",
]
