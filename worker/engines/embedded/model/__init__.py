"""The forward pass.

`hf_model` computes a step's batch; `loading` makes it from a packed copy (`packed_copy`) or else,
with transformers, from a checkpoint (`transformers_checkpoint`) that has passed `checkpoint_gate`;
`first_pass` computes its first tokens; `llama` and `transformers_network` are the two networks,
`mlp` an MLP, `activations` what it applies, `moe` a mixture of experts; `linear` and `gemm` are
linear layers and the GEMM backends that compute them, `panels` looks rows up in packed weights;
`batch_packing` packs a step's tokens; `kernels` chooses GEMM and attention backends, `kv_format`
what keys and values are held in, `numerics` finds batch-invariant shapes for them, and
`layer_trial` measures whole layers.
"""

from worker.engines.embedded.model.first_pass import check_first_pass
from worker.engines.embedded.model.hf_model import HfModel
from worker.engines.embedded.model.loading import load_model, reload_network

__all__ = ["HfModel", "check_first_pass", "load_model", "reload_network"]
