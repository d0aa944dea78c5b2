"""The Llama family's forward pass over a packed batch, from transformers' weights.

Products of one input are one product, and what follows a product element by element is done in it, so that a step of
few rows is mostly the reading of weights. Equal to transformers' code up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from worker.engines.embedded.attention import AttentionStep
from worker.engines.embedded.linear import Linear, fuse

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class LlamaNetwork(torch.nn.Module):
    """Takes the layers out of `network`, one by one, so that the weights are never held twice.

    Args:
        network: transformers' causal language model of one of `MODEL_TYPES`; of no use afterwards.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self._embedding = network.model.embed_tokens.weight.detach()
        self._rotary = network.model.rotary_emb
        self._norm = _Norm(network.model.norm)
        # with tied weights the packed copy stands beside the embedding, which is read row by row
        self._head = fuse(network.lm_head)
        network.lm_head = None
        layers = network.model.layers
        self._layers = torch.nn.ModuleList()
        for index in range(len(layers)):
            self._layers.append(_Layer(layers[index], index, network.config))
            layers[index] = torch.nn.Identity()

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Last hidden states ``[T, hidden]`` of tokens ``[T]`` at `positions` ``[T]``."""
        hidden = functional.embedding(ids, self._embedding)
        cosine, sine = (each[0, :, None] for each in self._rotary(hidden, positions[None]))
        # rotate_half's sign goes into the sine, so that a rotation is a product, a roll and a fused multiply-add
        half = sine.shape[-1] // 2
        sine = torch.cat((-sine[..., :half], sine[..., half:]), -1)
        for layer in self._layers:
            hidden = layer(hidden, cosine, sine, step)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, vocab_size]`` of hidden states ``[n, hidden]``."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits


class _Norm:
    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight.detach()
        self._shape = tuple(self._weight.shape)
        self._epsilon = float(norm.variance_epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._shape, self._weight, self._epsilon)


class _Layer(torch.nn.Module):
    def __init__(self, layer: Any, index: int, config: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._width = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._window = _window(attention, config)
        self._input_norm = _Norm(layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)
        self._query_norm = _Norm(attention.q_norm) if config.model_type == "qwen3" else None
        self._key_norm = _Norm(attention.k_norm) if config.model_type == "qwen3" else None
        self._qkv: Linear = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output: Linear = fuse(attention.o_proj)
        self._gate: Linear = fuse(mlp.gate_proj)
        self._up: Linear = fuse(mlp.up_proj)
        self._down: Linear = fuse(mlp.down_proj)

    def forward(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        qkv = self._qkv(self._input_norm(hidden)).view(len(hidden), -1, self._width)
        turned, value = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if self._query_norm is not None and self._key_norm is not None:
            query, key = turned[:, : self._heads], turned[:, self._heads :]
            turned = torch.cat((self._query_norm(query), self._key_norm(key)), 1)
        turned = torch.addcmul(turned * cosine, turned.roll(self._width // 2, -1), sine)
        query, key = turned[:, : self._heads], turned[:, self._heads :]
        attended = step.attend(self._index, query, key, value, self._scale, self._window)
        hidden = self._output.add(attended.reshape(len(hidden), -1), hidden)
        normed = self._mlp_norm(hidden)
        return self._down.add(self._up.mul(normed, self._gate.silu(normed)), hidden)


def _window(attention: Any, config: Any) -> int:
    if config.model_type == "llama":
        return 0
    return int((config if config.model_type == "mistral" else attention).sliding_window or 0)


def serves(config: Any) -> bool:
    """Whether `LlamaNetwork` computes what this configuration asks for."""
    turned = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return config.model_type in MODEL_TYPES and config.hidden_act == "silu" and turned == 1.0
