"""Other systems' logits processors, run unchanged as shaping processors.

`processors` recognises and wraps Dynamo's, Hugging Face's and the zoo's; `arguments` types the
arguments of such a class from the signature of its constructor.
"""

from adapters.third_party.processors import (
    NUM_KEPT_STATES,
    DynamoProcessor,
    HuggingFaceProcessor,
    StateLost,
    ThirdPartyProcessor,
    ThirdPartyShaping,
    ZooProcessor,
    protocol_of,
    third_party_processor,
    wrap_third_party,
)

__all__ = [
    "NUM_KEPT_STATES",
    "DynamoProcessor",
    "HuggingFaceProcessor",
    "StateLost",
    "ThirdPartyProcessor",
    "ThirdPartyShaping",
    "ZooProcessor",
    "protocol_of",
    "third_party_processor",
    "wrap_third_party",
]
