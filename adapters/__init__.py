"""Logits processors: contract, edits, chains, catalogue, and the TensorRT-LLM adapter.

Needs torch, pydantic and llguidance only; neither ai-dynamo nor TensorRT-LLM has to be installed.
"""

from adapters.openmp import bound_spin  # isort: split

bound_spin()  # before torch is imported

from adapters.basic import ForcedSequenceProcessor, HelloWorldProcessor, TemperatureProcessor  # noqa: E402
from adapters.trtllm import BaseLogitsProcessor, Failure, TrtllmAdapter, create_trtllm_adapters  # noqa: E402

__all__ = [
    "BaseLogitsProcessor",
    "Failure",
    "ForcedSequenceProcessor",
    "HelloWorldProcessor",
    "TemperatureProcessor",
    "TrtllmAdapter",
    "create_trtllm_adapters",
]
