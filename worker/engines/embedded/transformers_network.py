"""transformers' own code over a packed batch, with our attention and our linear layers in it."""

from __future__ import annotations

from typing import Any

import torch

from worker.engines.embedded import attention
from worker.engines.embedded.linear import fuse, pack_all, replace_linears
from worker.engines.embedded.moe import Experts, Router

MODEL_TYPES = ("gemma2", "gemma3_text", "qwen3_moe")


class TransformersNetwork(torch.nn.Module):
    """Same use as `LlamaNetwork`, for any causal language model that attends through transformers' interface.

    Args:
        network: transformers' causal language model; its linear layers are replaced.
        may_be_native: Whether our own kernels are allowed.
    """

    def __init__(self, network: Any, may_be_native: bool) -> None:
        super().__init__()
        attention.register()
        network.set_attn_implementation(attention.IMPLEMENTATION)
        self._model = network.model
        self._head = fuse(network.lm_head)
        self._softcap = getattr(network.config, "final_logit_softcapping", None)  # only Gemma's configurations have it
        _replace_experts(self._model)
        replace_linears(self._model)
        pack_all(self, may_be_native)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, step: attention.AttentionStep) -> torch.Tensor:
        """Last hidden states ``[T, hidden]`` of tokens ``[T]`` at `positions` ``[T]``."""
        hidden: torch.Tensor = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            **{attention.STEP_ARGUMENT: step},
        ).last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, vocab_size]`` of hidden states ``[n, hidden]``."""
        logits: torch.Tensor = self._head(hidden)
        if self._softcap is None:
            return logits
        return logits.div_(self._softcap).tanh_().mul_(self._softcap)


def _replace_experts(model: Any) -> None:
    for layer in model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate = Router(layer.mlp.gate)
            layer.mlp.experts = Experts(layer.mlp.experts)
