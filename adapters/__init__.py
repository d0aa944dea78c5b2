"""Logits processors: contract, edits, chains, catalogue, and the TensorRT-LLM adapter.

Needs torch, pydantic and llguidance only; neither ai-dynamo nor TensorRT-LLM has to be installed.
`adapters.client` needs the standard library alone, and so does this file: the names that it offers
are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from adapters.openmp import bound_spin

if TYPE_CHECKING:
    from adapters.basic import ForcedSequenceProcessor, HelloWorldProcessor, TemperatureProcessor
    from adapters.trtllm import BaseLogitsProcessor, Failure, TrtllmAdapter, create_trtllm_adapters

bound_spin()  # before torch is imported

__all__ = [
    "BaseLogitsProcessor",
    "Failure",
    "ForcedSequenceProcessor",
    "HelloWorldProcessor",
    "TemperatureProcessor",
    "TrtllmAdapter",
    "create_trtllm_adapters",
]

_BASIC = ("ForcedSequenceProcessor", "HelloWorldProcessor", "TemperatureProcessor")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module("adapters.basic" if name in _BASIC else "adapters.trtllm"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
