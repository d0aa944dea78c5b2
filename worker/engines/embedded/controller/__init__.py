"""Megatron-Core's `TextGenerationController`, under its public names.

`controller` is the class; `types` its inputs and outputs; `text` tokenises and detokenises;
`padding` handles padded batches, `sampling` samples from given logits, `stream` copies requests for
their streams, `state` is the state of running requests.
"""

from worker.engines.embedded.controller.controller import TextGenerationController
from worker.engines.embedded.controller.text import ControllerTokenizer, HfControllerTokenizer
from worker.engines.embedded.controller.types import (
    DynamicStep,
    InferenceParams,
    InferenceRequest,
    MaxSequenceLengthOverflowError,
    Status,
    TokenStream,
)

__all__ = [
    "ControllerTokenizer",
    "DynamicStep",
    "HfControllerTokenizer",
    "InferenceParams",
    "InferenceRequest",
    "MaxSequenceLengthOverflowError",
    "Status",
    "TextGenerationController",
    "TokenStream",
]
