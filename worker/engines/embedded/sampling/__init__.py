"""Sampling: logits and edits to tokens.

`sampler` follows the order law over a batch, whose rows `rows` groups by their controls;
`truncation` is temperature, min-p, top-k, top-p and sampling with the rules and weights of
`adapters.sampling`, which gets the kernels of this engine here; `isolation` keeps a defect in them
to one request; `logprobs` and `prompt_logprobs` are log probabilities; `row_errors` are the reasons
why a row cannot be sampled; `rejection` is rejection sampling of drafts.
"""

from adapters.row_kernels import use_kernels
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.sampling.isolation import IsolatingSampler, NotSampled
from worker.engines.embedded.sampling.logprobs import token_logprobs
from worker.engines.embedded.sampling.prompt_logprobs import LogitsCollector
from worker.engines.embedded.sampling.rejection import rejection_sample, residual
from worker.engines.embedded.sampling.row_errors import known_and_wanted
from worker.engines.embedded.sampling.sampler import Sampler

__all__ = [
    "IsolatingSampler",
    "LogitsCollector",
    "NotSampled",
    "Sampler",
    "known_and_wanted",
    "rejection_sample",
    "residual",
    "token_logprobs",
]

use_kernels(native_weights)
