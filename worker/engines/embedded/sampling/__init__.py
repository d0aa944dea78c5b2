"""From logits and edits to tokens.

`sampler` follows the order law over a batch, whose rows `rows` sorts by what they need;
`truncation` and `device_truncation` are temperature, min-p, top-k, top-p and the draw on the CPU
and on a device (`device_sampler`, `selection_kernels`, `triton_select`), both over
`integer_weights`; `logprobs` and `prompt_logprobs` are log probabilities; `row_errors` says why a
row has no token.
"""

from worker.engines.embedded.sampling.logprobs import token_logprobs
from worker.engines.embedded.sampling.prompt_logprobs import LogitsCollector
from worker.engines.embedded.sampling.sampler import Sampler

__all__ = ["LogitsCollector", "Sampler", "token_logprobs"]
