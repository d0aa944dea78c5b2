"""Logits processors as TensorRT-LLM logits-processor callables.

`adapter` makes the callables (`create_trtllm_adapters`); `side_channel` reports what they did when
TensorRT-LLM runs them in another process; `native_controls` has the processors that no request can
name: dense biases and third-party callables.
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
    join_library,
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
    "join_library",
]
