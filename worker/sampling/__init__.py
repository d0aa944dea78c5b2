"""Sampling parameters: what one request asks of an engine.

`params` has `SamplingParams`, under TensorRT-LLM's field names; `controls` is the table of the
sampling controls that are a field and a logits processor by another name.
"""

from worker.sampling.params import MAX_LOGPROBS, GuidedDecodingParams, SamplingParams

__all__ = ["MAX_LOGPROBS", "GuidedDecodingParams", "SamplingParams"]
