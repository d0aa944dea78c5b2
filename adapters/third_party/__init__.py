"""Third-party logits processors, run unchanged as shaping processors.

`processors` recognises and wraps those of Dynamo, Hugging Face and NVIDIA's logits-processor-zoo;
`arguments` types a class's arguments from the signature of its constructor.
"""

from adapters.contract import StateLost
from adapters.third_party.processors import (
    NUM_KEPT_STATES,
    DynamoProcessor,
    HuggingFaceProcessor,
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
