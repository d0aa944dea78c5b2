"""The Llama family's forward pass over a packed batch, from transformers' weights.

The QKV projections are one fused linear layer, and the GEMMs' epilogues do the work between them
element by element, so that a step of few rows is mostly the reading of weights. Equal to
transformers' code up to rounding.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from worker.engines.embedded.attention import AttentionLayer, AttentionStep, NativeStep, RopeTables
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Linear, embed_with, fuse, has_tied_embeddings, lm_head, pack_all
from worker.engines.embedded.native.layers import DecoderLayer, DecoderLayers

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class LlamaNetwork(torch.nn.Module):
    """The Llama family's network; takes its layers out of `network` one by one, so that weights are
    never held twice.

    Args:
        network: transformers' causal language model of one of `MODEL_TYPES`; of no use afterwards.
        kernels: What it computes with.
    """

    def __init__(self, network: Any, kernels: KernelBackend) -> None:
        super().__init__()
        embedding, is_tied = network.model.embed_tokens.weight, has_tied_embeddings(network)
        self._rotary = network.model.rotary_emb
        self._norm = _RmsNorm(network.model.norm, kernels)
        self._head = lm_head(network.lm_head)
        network.lm_head = None
        layers = network.model.layers
        self._layers = torch.nn.ModuleList()
        for index in range(len(layers)):
            self._layers.append(_Layer(layers[index], index, network.config, kernels))
            layers[index] = torch.nn.Identity()
            pack_all(self._layers[index], kernels)
        self._head.pack(kernels)
        self._embed = embed_with(embedding, self._head, is_tied, network.dtype)

    @cached_property
    def _native(self) -> DecoderLayers | None:
        """The layers, where native kernels compute all of them; how they do is settled by now."""
        layers = [layer for layer in self._layers if isinstance(layer, _Layer)]
        found = [native for native in (layer.native() for layer in layers) if native is not None]
        if len(found) < len(layers):
            return None
        attention = layers[0].attention
        return DecoderLayers(found, attention.heads, attention.kv_heads)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Last hidden states ``[T, hidden]`` of tokens ``[T]`` at `positions` ``[T]``."""
        hidden = self._embed(ids)
        cosine, sine = self._rotary(hidden, positions[None])
        rope = RopeTables(cosine[0], sine[0])
        if isinstance(step, NativeStep) and step.tokens == len(hidden) and self._native is not None:
            return step.compute_layers(self._native, hidden, rope)
        for layer in self._layers:
            hidden = layer(hidden, rope, step)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 ``[n, vocab_size]``, of hidden states ``[n, hidden]``."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits


class _RmsNorm:
    """Implements RMSNorm with the weight of `norm`, one of transformers' modules."""

    def __init__(self, norm: Any, kernels: KernelBackend) -> None:
        self.weight = norm.weight.detach().clone()  # it would keep the whole checkpoint mapped into memory
        self.epsilon = float(norm.variance_epsilon)
        self._kernel = kernels.rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x, self.weight, self.epsilon)


class _Layer(torch.nn.Module):
    def __init__(self, layer: Any, index: int, config: Any, kernels: KernelBackend) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim = int(attention.head_dim)
        head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
        if config.model_type == "qwen3":
            query_norm, key_norm = (_RmsNorm(norm, kernels) for norm in (attention.q_norm, attention.k_norm))
            head_norms = query_norm.weight, key_norm.weight, query_norm.epsilon
        self.attention = AttentionLayer(
            index,
            int(config.num_attention_heads),
            int(config.num_key_value_heads),
            float(attention.scaling),
            _window(attention, config),
            head_norms,
        )
        self._input_norm = _RmsNorm(layer.input_layernorm, kernels)
        self._mlp_norm = _RmsNorm(layer.post_attention_layernorm, kernels)
        self._qkv: Linear = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output: Linear = fuse(attention.o_proj)
        self._gate: Linear = fuse(mlp.gate_proj)
        self._up: Linear = fuse(mlp.up_proj)
        self._down: Linear = fuse(mlp.down_proj)

    def native(self) -> DecoderLayer | None:
        """This layer for `native.layers`; None if other kernels compute a part of it."""
        one_part = [layer.native_parts for layer in (self._output, self._gate, self._up, self._down)]
        qkv = self._qkv.native_parts
        if not qkv or any(len(parts) != 1 for parts in one_part):
            return None
        norms = [(norm.weight, norm.epsilon) for norm in (self._input_norm, self._mlp_norm)]
        attention = self.attention
        return DecoderLayer(
            (norms[0], norms[1]),
            *(attention.head_norms, attention.scale, attention.window, qkv),
            *(parts[0] for parts in one_part),
        )

    def forward(self, hidden: torch.Tensor, rope: RopeTables, step: AttentionStep) -> torch.Tensor:
        qkv = self._qkv(self._input_norm(hidden)).view(len(hidden), -1, self._head_dim)
        attended = step.attend_qkv(self.attention, qkv, rope)
        hidden = self._output.add(attended.reshape(len(hidden), -1), hidden)
        normed = self._mlp_norm(hidden)
        return self._down.add(self._up.mul(normed, self._gate.silu(normed)), hidden)


def _window(attention: Any, config: Any) -> int:
    if config.model_type == "llama":
        return 0
    return int((config if config.model_type == "mistral" else attention).sliding_window or 0)


def serves(config: Any) -> bool:
    """Whether `LlamaNetwork` computes a model of this configuration."""
    rotated = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return config.model_type in MODEL_TYPES and config.hidden_act == "silu" and rotated == 1.0
