"""Weights and constants of `LlamaNetwork`, from transformers' modules or from a
packed copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from worker.engines.embedded.attention import AttentionLayer, RopeTables
from worker.engines.embedded.model.embedding import has_tied_embeddings
from worker.engines.embedded.model.linear import Projection
from worker.engines.embedded.model.quantisation import PackedQuantised, QuantisedWeight
from worker.engines.embedded.native import PackedWeight
from worker.models.geometry import Geometry
from worker.models.model_table import LLAMA_LIKE
from worker.models.model_types import MODEL_TYPES


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm.

    Attributes:
        weight: ``[K]``.
        epsilon: Added to the mean.
    """

    weight: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, norm: Any) -> Norm:
        """The RMSNorm of one of transformers' modules."""
        # a clone: the weight would keep the whole checkpoint mapped into memory
        return cls(norm.weight.detach().clone(), float(norm.variance_epsilon))


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE whose frequencies do not depend on the length of the text.

    Attributes:
        frequencies: Radians per position, float32 ``[D / 2]``.
        scaling: Factor of cosines and sines.
    """

    frequencies: torch.Tensor
    scaling: float

    @property
    def head_dim(self) -> int:
        """D."""
        return 2 * len(self.frequencies)

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> RopeTables:
        """Cosines and sines of `positions` ``[T]``, computed in float32."""
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return RopeTables((angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A decoder layer.

    Attributes:
        attention: Constants of attention.
        input_norm: Before attention.
        mlp_norm: Before the MLP.
        qkv: The fused QKV projection.
        output: Projection of attention's result.
        gate: Gate projection of the MLP.
        up: Up projection of the MLP.
        down: Down projection of the MLP.
    """

    attention: AttentionLayer
    input_norm: Norm
    mlp_norm: Norm
    qkv: Projection
    output: Projection
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A network of the Llama family.

    Attributes:
        dtype: Data type of rows and results.
        rope: RoPE of all layers.
        norm: After the last layer.
        head: The LM head.
        embedding: ``[V, K]``; None for the packed weight of `head`.
        is_tied: Whether `head` and `embedding` are one weight.
        layers: Layers in order; may be an iterator, whose layers are never held all at once.
    """

    dtype: torch.dtype
    rope: Rope
    norm: Norm
    head: Projection
    embedding: torch.Tensor | QuantisedWeight | PackedQuantised | None
    is_tied: bool
    layers: Iterable[LayerWeights]

    @classmethod
    def of(cls, network: Any) -> LlamaWeights:
        """Weights of transformers' causal language model, whose layers are taken one by one, so
        that weights are never held twice.
        """
        model = network.model
        rope = Rope(model.rotary_emb.inv_freq.float(), float(model.rotary_emb.attention_scaling))
        embedding, is_tied = model.embed_tokens.weight, has_tied_embeddings(network)
        head = Projection.of(network.lm_head)
        network.lm_head = None
        return cls(network.dtype, rope, Norm.of(model.norm), head, embedding, is_tied, _layers(model, network.config))

    def check(self, geometry: Geometry, rounds_to: str) -> None:
        """Raises `ValueError` unless all weights are packed and those of a model of this geometry,
        so that no kernel reads outside of them.

        Args:
            geometry: Geometry of the model.
            rounds_to: `QuantisedPanels.rounds_to` of all quantised weights.
        """
        hidden, vocab_size, width = geometry.hidden_size, geometry.vocab_size, geometry.head_dim
        layers = list(self.layers)
        if len(layers) != geometry.num_hidden_layers or (self.embedding is None and not self.is_tied):
            raise ValueError("a part of it is missing")
        rows = self.head.weight if self.embedding is None else self.embedding
        fits = self.rope.frequencies.dim() == 1 and self.rope.head_dim == width and self.norm.weight.shape == (hidden,)
        fits = fits and tuple(rows.shape) == (vocab_size, hidden)
        if isinstance(rows, PackedQuantised):
            fits = fits and len(rows.parts) == 1
        else:
            fits = fits and isinstance(rows, (torch.Tensor, PackedWeight)) and rows.dtype == self.dtype
        self._check_all(rounds_to, self.norm, (self.head, vocab_size, hidden))
        for index, layer in enumerate(layers):
            self._check_layer(index, layer, geometry, rounds_to)
        if not fits:
            raise ValueError("its weights do not fit each other")

    def _check_layer(self, index: int, layer: LayerWeights, geometry: Geometry, rounds_to: str) -> None:
        hidden, inner, width = geometry.hidden_size, geometry.intermediate_size, geometry.head_dim
        heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
        attention, queries = layer.attention, heads * width
        self._check_all(
            *(rounds_to, layer.input_norm),
            *((layer.qkv, queries + 2 * kv_heads * width, hidden), (layer.output, hidden, queries)),
            *((layer.gate, inner, hidden), (layer.up, inner, hidden), (layer.down, hidden, inner)),
        )
        norms = attention.head_norms[:2] if attention.head_norms else ()
        if (
            (attention.index, attention.heads, attention.kv_heads) != (index, heads, kv_heads)
            or attention.window < 0
            or not (layer.mlp_norm.weight.shape == layer.input_norm.weight.shape == (hidden,))
            or not all(norm.shape == (width,) and norm.dtype == self.dtype for norm in norms)
        ):
            raise ValueError("its weights do not fit each other")

    def _check_all(self, rounds_to: str, norm: Norm, *expected: tuple[Projection, int, int]) -> None:
        fits = norm.weight.dtype == self.dtype
        for projection, rows, columns in expected:
            weight, bias = projection.weight, projection.bias
            fits = fits and tuple(weight.shape) == (rows, columns)
            fits = fits and (bias is None or (bias.shape == (rows,) and bias.dtype == self.dtype))
            if isinstance(weight, PackedQuantised):
                fits = fits and all(part.rounds_to == rounds_to and part.inner == columns for part in weight.parts)
            else:
                fits = fits and isinstance(weight, PackedWeight) and weight.dtype == self.dtype
        if not fits:
            raise ValueError("its weights do not fit each other")


def _layers(model: Any, config: Any) -> Iterator[LayerWeights]:
    for index in range(len(model.layers)):
        yield _layer(model, index, config)


def _layer(model: Any, index: int, config: Any) -> LayerWeights:
    layer = model.layers[index]
    model.layers[index] = torch.nn.Identity()
    attention, mlp = layer.self_attn, layer.mlp
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
    if MODEL_TYPES[config.model_type].has_head_norms:
        query_norm, key_norm = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
        head_norms = query_norm.weight, key_norm.weight, query_norm.epsilon
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    return LayerWeights(
        AttentionLayer(index, heads, kv_heads, float(attention.scaling), _window(attention, config), head_norms),
        Norm.of(layer.input_layernorm),
        Norm.of(layer.post_attention_layernorm),
        Projection.of(attention.q_proj, attention.k_proj, attention.v_proj),
        Projection.of(attention.o_proj),
        *(Projection.of(mlp.gate_proj), Projection.of(mlp.up_proj), Projection.of(mlp.down_proj)),
    )


def _window(attention: Any, config: Any) -> int:
    window = MODEL_TYPES[config.model_type].window
    if window == "none":
        return 0
    return int((config if window == "model" else attention).sliding_window or 0)


def serves(config: Any) -> bool:
    """Whether `LlamaNetwork` computes a model of this configuration."""
    if config.model_type not in LLAMA_LIKE:
        return False
    rotated = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return bool(config.hidden_act == "silu" and rotated == 1.0)
