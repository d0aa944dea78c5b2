"""Third-party logits processors, run unchanged as shaping processors.

`wrapping` makes them of the classes of Dynamo, Hugging Face and NVIDIA's logits-processor-zoo;
`protocols` recognises their calling conventions, `processors` call them and keep `copies` of their
states; `arguments` types a class's arguments from the signature of its constructor.
"""

from adapters.contract import StateLost
from adapters.third_party.processors import (
    NUM_KEPT_STATES,
    DynamoProcessor,
    HuggingFaceProcessor,
    ThirdPartyProcessor,
    ThirdPartyShaping,
    ZooProcessor,
)
from adapters.third_party.protocols import protocol_of
from adapters.third_party.wrapping import third_party_processor, wrap_third_party

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
