"""The forward pass.

`hf_model` loads a Hugging Face checkpoint and computes a step's batch; `llama` and
`transformers_network` are the two networks, `moe` a mixture of experts; `linear` and `gemm` are
linear layers and the GEMM backends that compute them, `panels` reads packed weights;
`batch_packing` lays a step's tokens out; `numerics` finds batch-invariant shapes.
"""

from worker.engines.embedded.model.hf_model import HfModel, load_model

__all__ = ["HfModel", "load_model"]
