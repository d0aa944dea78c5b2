"""The Llama family's forward pass over a packed batch, from transformers' weights.

Products of one input are one product, and what follows a product element by element is done in it,
so that a step of few rows is mostly the reading of weights. Equal to transformers' code up to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.attention import AttentionStep
from worker.engines.embedded.model.linear import Linear, embed_with, fuse, has_tied_embeddings, pack_all

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class LlamaNetwork(torch.nn.Module):
    """Takes the layers out of `network`, one by one, so that the weights are never held twice.

    Args:
        network: transformers' causal language model of one of `MODEL_TYPES`; of no use afterwards.
        may_be_native: Whether our own kernels are allowed.
    """

    def __init__(self, network: Any, may_be_native: bool) -> None:
        super().__init__()
        embedding, is_tied = network.model.embed_tokens.weight.detach(), has_tied_embeddings(network)
        self._rotary = network.model.rotary_emb
        self._norm = _Norm(network.model.norm, may_be_native)
        self._head = fuse(network.lm_head)
        network.lm_head = None
        layers = network.model.layers
        self._layers = torch.nn.ModuleList()
        for index in range(len(layers)):
            self._layers.append(_Layer(layers[index], index, network.config, may_be_native))
            layers[index] = torch.nn.Identity()
            pack_all(self._layers[index], may_be_native)
        self._head.pack(may_be_native)
        self._embed = embed_with(embedding, self._head, is_tied)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Last hidden states ``[T, hidden]`` of tokens ``[T]`` at `positions` ``[T]``."""
        hidden = self._embed(ids)
        cosine, sine = self._rotary(hidden, positions[None])
        angles = _Angles(cosine[0], sine[0])
        for layer in self._layers:
            hidden = layer(hidden, angles, step)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, vocab_size]`` of hidden states ``[n, hidden]``."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits


@dataclass(frozen=True)
class _Angles:
    """Of each token of a step: cosine and sine ``[T, head_dim]``, of which the two halves are
    equal.
    """

    cosine: torch.Tensor
    sine: torch.Tensor

    @cached_property
    def for_all_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as ``[T, 1, head_dim]``, with rotate_half's sign in the sine.

        A rotation is then a product, a roll and a fused multiply-add.
        """
        half = self.sine.shape[-1] // 2
        signed = torch.cat((-self.sine[:, :half], self.sine[:, half:]), -1)
        return self.cosine[:, None], signed[:, None]


class _Norm:
    def __init__(self, norm: Any, may_be_native: bool) -> None:
        self.weight = norm.weight.detach().clone()  # it would keep the whole checkpoint mapped into memory
        self.epsilon = float(norm.variance_epsilon)
        self._shape = tuple(self.weight.shape)
        self._is_native = may_be_native

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_native:
            return native.rms_norm(x, self.weight, self.epsilon)
        return functional.rms_norm(x, self._shape, self.weight, self.epsilon)


class _Layer(torch.nn.Module):
    def __init__(self, layer: Any, index: int, config: Any, may_be_native: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._width = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._window = _window(attention, config)
        self._input_norm = _Norm(layer.input_layernorm, may_be_native)
        self._mlp_norm = _Norm(layer.post_attention_layernorm, may_be_native)
        self._head_norms: tuple[_Norm, _Norm] | None = None
        if config.model_type == "qwen3":
            self._head_norms = _Norm(attention.q_norm, may_be_native), _Norm(attention.k_norm, may_be_native)
        self._qkv: Linear = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output: Linear = fuse(attention.o_proj)
        self._gate: Linear = fuse(mlp.gate_proj)
        self._up: Linear = fuse(mlp.up_proj)
        self._down: Linear = fuse(mlp.down_proj)

    def forward(self, hidden: torch.Tensor, angles: _Angles, step: AttentionStep) -> torch.Tensor:
        qkv = self._qkv(self._input_norm(hidden)).view(len(hidden), -1, self._width)
        attend = self._attend_as_one if step.takes_projections(len(hidden)) else self._attend
        hidden = self._output.add(attend(qkv, angles, step).reshape(len(hidden), -1), hidden)
        normed = self._mlp_norm(hidden)
        return self._down.add(self._up.mul(normed, self._gate.silu(normed)), hidden)

    def _attend_as_one(self, qkv: torch.Tensor, angles: _Angles, step: AttentionStep) -> torch.Tensor:
        norms = self._head_norms
        weights = (norms[0].weight, norms[1].weight, norms[0].epsilon) if norms is not None else None
        projections = native.Projections(qkv, self._heads, angles.cosine, angles.sine, weights)
        return step.attend_to_projections(self._index, projections, self._scale, self._window)

    def _attend(self, qkv: torch.Tensor, angles: _Angles, step: AttentionStep) -> torch.Tensor:
        turned, value = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if self._head_norms is not None:
            of_query, of_key = self._head_norms
            query, key = turned[:, : self._heads], turned[:, self._heads :]
            turned = torch.cat((of_query(query), of_key(key)), 1)
        cosine, sine = angles.for_all_heads
        turned = torch.addcmul(turned * cosine, turned.roll(self._width // 2, -1), sine)
        query, key = turned[:, : self._heads], turned[:, self._heads :]
        return step.attend(self._index, query, key, value, self._scale, self._window)


def _window(attention: Any, config: Any) -> int:
    if config.model_type == "llama":
        return 0
    return int((config if config.model_type == "mistral" else attention).sliding_window or 0)


def serves(config: Any) -> bool:
    """Whether `LlamaNetwork` computes what this configuration asks for."""
    turned = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return config.model_type in MODEL_TYPES and config.hidden_act == "silu" and turned == 1.0
