"""How logits change: processors, edits, chains, the catalogue, and the TensorRT-LLM adapter.

Needs torch, pydantic and llguidance only; neither ai-dynamo nor TensorRT-LLM has to be installed.
"""

from adapters.basic import ForcedSequenceProcessor, HelloWorldProcessor, TemperatureProcessor
from adapters.trtllm import BaseLogitsProcessor, Failure, TrtllmAdapter, create_trtllm_adapters

__all__ = [
    "BaseLogitsProcessor",
    "Failure",
    "ForcedSequenceProcessor",
    "HelloWorldProcessor",
    "TemperatureProcessor",
    "TrtllmAdapter",
    "create_trtllm_adapters",
]
