"""transformers' own code over a packed batch, with our attention and our linear layers in it."""

from __future__ import annotations

from typing import Any

import torch

from worker.engines.embedded.attention import attention
from worker.engines.embedded.model.linear import (
    Linear,
    embed_with,
    fuse,
    has_tied_embeddings,
    pack_all,
    replace_linears,
)
from worker.engines.embedded.model.moe import Experts, Router

MODEL_TYPES = ("gemma2", "gemma3_text", "qwen3_moe")


class TransformersNetwork(torch.nn.Module):
    """Same use as `LlamaNetwork`, for any causal language model that attends through transformers'
    interface.

    Args:
        network: transformers' causal language model; its linear layers are replaced.
        may_be_native: Whether our own kernels are allowed.
    """

    def __init__(self, network: Any, may_be_native: bool) -> None:
        super().__init__()
        attention.register()
        network.set_attn_implementation(attention.IMPLEMENTATION)
        self._model = network.model
        is_tied = has_tied_embeddings(network)
        self._head = fuse(network.lm_head)
        self._softcap = getattr(network.config, "final_logit_softcapping", None)  # only Gemma's configurations have it
        _replace_experts(self._model)
        replace_linears(self._model)
        pack_all(self, may_be_native)
        self._model.embed_tokens = _Embedding(self._model.embed_tokens, self._head, is_tied)
        for parameter in self._model.parameters() if self._head.is_packed else ():
            parameter.data = parameter.data.clone()  # what is left would keep the whole checkpoint mapped into memory

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


class _Embedding(torch.nn.Module):
    """transformers' embedding, which may scale what it looks up; see `embed_with`."""

    def __init__(self, embedding: Any, head: Linear, is_tied: bool) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        scale = getattr(embedding, "embed_scale", None)  # only Gemma's embeddings have it
        self._scale: torch.Tensor | None = None if scale is None else scale.to(weight.dtype)
        self._lookup = embed_with(weight, head, is_tied)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._lookup(ids)
        return rows if self._scale is None else rows * self._scale


def _replace_experts(model: Any) -> None:
    for layer in model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate = Router(layer.mlp.gate)
            layer.mlp.experts = Experts(layer.mlp.experts)
