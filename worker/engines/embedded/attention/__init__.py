"""Attention of a step's tokens over the paged KV cache.

`attention` lays a step out once and is used by every layer; `torch_calls` are the calls of torch's
kernels; with `online_softmax` the results of parts of the keys are put together by their
log-sum-exp.
"""

from worker.engines.embedded.attention.attention import AttentionStep
from worker.engines.embedded.attention.online_softmax import Kernel, Shapes

__all__ = ["AttentionStep", "Kernel", "Shapes"]
