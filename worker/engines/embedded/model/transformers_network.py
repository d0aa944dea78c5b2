"""transformers' own code over a packed batch, with our attention and linear layers in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from worker.engines.embedded.attention import AttentionStep
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import (
    Embedding,
    Linear,
    Projection,
    has_tied_embeddings,
    lm_head,
    pack_all,
    replace_linears,
)
from worker.engines.embedded.model.moe import Experts, Router

_IMPLEMENTATION = "embedded_kv_store"
_STEP_ARGUMENT = "embedded_step"


class TransformersNetwork(torch.nn.Module):
    """Any causal language model that attends through transformers' interface; same use as
    `LlamaNetwork`.

    Args:
        network: transformers' causal language model; its linear layers are replaced.
        kernels: What they and attention compute with.
    """

    def __init__(self, network: Any, kernels: KernelBackend) -> None:
        super().__init__()
        _register_attention()
        network.set_attn_implementation(_IMPLEMENTATION)
        self._model = network.model
        is_tied = has_tied_embeddings(network)
        self._head = lm_head(Projection.of(network.lm_head))
        self._softcap = getattr(network.config, "final_logit_softcapping", None)  # only Gemma's configurations have it
        _replace_experts(self._model)
        replace_linears(self._model)
        pack_all(self, kernels)
        self._model.embed_tokens = _ScaledEmbedding(self._model.embed_tokens, self._head, is_tied)
        for parameter in self._model.parameters() if self._head.is_packed else ():
            parameter.data = parameter.data.clone()  # what is left would keep the whole checkpoint mapped into memory

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Last hidden states ``[T, hidden]`` of tokens ``[T]`` at `positions` ``[T]``."""
        hidden: torch.Tensor = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            **{_STEP_ARGUMENT: step},
        ).last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 ``[n, vocab_size]``, of hidden states ``[n, hidden]``."""
        logits: torch.Tensor = self._head(hidden)
        if self._softcap is None:
            return logits
        return logits.div_(self._softcap).tanh_().mul_(self._softcap)


class _ScaledEmbedding(torch.nn.Module):
    """transformers' embedding, which may scale what it looks up."""

    def __init__(self, embedding: Any, head: Linear, is_tied: bool) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        scale = getattr(embedding, "embed_scale", None)  # only Gemma's embeddings have it
        self._scale: torch.Tensor | None = None if scale is None else scale.to(weight.dtype)
        self._lookup = Embedding(weight, head, is_tied, weight.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._lookup(ids)
        return rows if self._scale is None else rows * self._scale


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; the step comes from `TransformersNetwork.hidden`."""
    step: AttentionStep = arguments[_STEP_ARGUMENT]
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return step.attend(module.layer_idx, query, key, value, scaling, sliding_window or 0, softcap)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: the attention backend makes its own in each step."""


def _register_attention() -> None:
    """Make `_IMPLEMENTATION` known to transformers; harmless when repeated."""
    attention: Callable[..., Any] = _attention
    AttentionInterface.register(_IMPLEMENTATION, attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, _no_mask)


def _replace_experts(model: Any) -> None:
    for layer in model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate = Router(layer.mlp.gate)
            layer.mlp.experts = Experts(layer.mlp.experts)
