"""Attention of a step's tokens over the paged KV cache.

`backend` is the protocol of an attention backend; `torch_backend` and `native_backend` implement
it. For torch's kernels, `split_kv` plans the calls of a step, one split per page, and
`online_softmax` has partial attention over a split and the LSE merge. Which backend computes is
chosen in one function, `worker.engines.embedded.model.kernels.choose_kernels`.
"""

from worker.engines.embedded.attention.backend import (
    AttentionBackend,
    AttentionLayer,
    AttentionSizes,
    AttentionStep,
    RopeTables,
)
from worker.engines.embedded.attention.native_backend import NativeAttention, NativeStep
from worker.engines.embedded.attention.torch_backend import TorchAttention

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionSizes",
    "AttentionStep",
    "NativeAttention",
    "NativeStep",
    "RopeTables",
    "TorchAttention",
]
