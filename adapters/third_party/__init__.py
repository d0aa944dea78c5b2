"""Other systems' logits processors, run unchanged as shaping processors.

`processors` recognises and wraps Dynamo's, Hugging Face's and the zoo's; `arguments` types the
arguments of such a class from the signature of its constructor.
"""

from adapters.third_party.processors import (
    NUM_KEPT_STATES,
    DynamoProcessor,
    ForeignProcessor,
    HuggingFaceProcessor,
    StateLost,
    ThirdPartyShape,
    ZooProcessor,
    foreign_processor,
    protocol_of,
    wrap_foreign,
)

__all__ = [
    "NUM_KEPT_STATES",
    "DynamoProcessor",
    "ForeignProcessor",
    "HuggingFaceProcessor",
    "StateLost",
    "ThirdPartyShape",
    "ZooProcessor",
    "foreign_processor",
    "protocol_of",
    "wrap_foreign",
]
