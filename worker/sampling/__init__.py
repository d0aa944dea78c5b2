"""Sampling parameters: what one request asks of an engine, and what each of them means.

`params` has `SamplingParams`, under TensorRT-LLM's field names, with everything that is said of a
field beside it; `control` the words for that; `guides` the grammars; `field_processors` makes
logits processors of fields.
"""

from worker.sampling.control import Control, sampling_controls
from worker.sampling.guides import GuidedDecodingParams
from worker.sampling.params import LOGPROBS_MODES, MAX_LOGPROBS, SamplingParams

__all__ = ["LOGPROBS_MODES", "MAX_LOGPROBS", "Control", "GuidedDecodingParams", "SamplingParams", "sampling_controls"]
