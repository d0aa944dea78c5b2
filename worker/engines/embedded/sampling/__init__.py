"""Sampling: logits and edits to tokens.

`sampler` follows the order law over a batch, whose rows `rows` groups by their controls;
`truncation` and `device_truncation` are temperature, min-p, top-k, top-p and sampling on the CPU
and on a device (sync-free: `device_sampler`, `selection_kernels`, `triton_select`), both with the
rules and weights of `adapters.sampling`, which gets the kernels of this engine here; `logprobs` and
`prompt_logprobs` are log probabilities; `row_errors` are the reasons why a row cannot be sampled;
`rejection` is rejection sampling of drafts.
"""

from adapters.sampling.native import use_kernels, use_select
from worker.engines.embedded.native import weights as native_weights
from worker.engines.embedded.sampling.logprobs import token_logprobs
from worker.engines.embedded.sampling.prompt_logprobs import LogitsCollector
from worker.engines.embedded.sampling.rejection import rejection_sample, residual
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.sampling.selection_kernels import choose_select

__all__ = ["LogitsCollector", "Sampler", "rejection_sample", "residual", "token_logprobs"]

use_kernels(native_weights)
use_select(choose_select)
