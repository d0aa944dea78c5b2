"""The Llama family's forward pass over a packed batch.

The QKV projections are one fused linear layer, and the GEMMs' epilogues do the work between them
element by element, so that a step of few rows is mostly the reading of weights. Equal to
transformers' code up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from worker.engines.embedded.attention import AttentionStep, NativeStep, RopeTables
from worker.engines.embedded.model.embedding import Embedding
from worker.engines.embedded.model.kernels import KernelBackend
from worker.engines.embedded.model.linear import Linear, lm_head, pack_all
from worker.engines.embedded.model.llama_weights import LayerWeights, LlamaWeights, Norm
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.native.layers import DecoderLayer, DecoderLayers, Mlp
from worker.engines.embedded.native.lora import DOWN, MLP, OUTPUT, QKV, AdaptedLayers, AdaptedRows

_MOST_TABLES = 16 * 2**20
"""Bytes of cosines and sines that are kept."""


class LlamaNetwork(Network):
    """The Llama family's network.

    Args:
        weights: Weights of the network; packed here where they are not yet.
        kernels: Backends that compute.
        num_positions: Positions for which RoPE is computed now, if they are not too many, instead
            of in each step.
    """

    def __init__(self, weights: LlamaWeights, kernels: KernelBackend, num_positions: int = 0) -> None:
        super().__init__()
        self._dtype, self._rope, self._is_tied = weights.dtype, weights.rope, weights.is_tied
        self._norm = _RmsNorm(weights.norm, kernels)
        self._head = lm_head(weights.head)
        self._layers = torch.nn.ModuleList()
        for layer in weights.layers:
            self._layers.append(_Layer(layer, weights.rope.head_dim, kernels))
            pack_all(self._layers[-1], kernels)
        self._head.pack(kernels)
        self._embed = Embedding(weights.embedding, self._head, weights.is_tied, weights.dtype)
        frequencies = weights.rope.frequencies
        num_bytes = num_positions * 4 * len(frequencies) * weights.dtype.itemsize
        self._tables: RopeTables | None = None
        if 0 < num_bytes <= _MOST_TABLES:
            self._tables = self._rope.tables(torch.arange(num_positions, device=frequencies.device), weights.dtype)

    @property
    def is_tied(self) -> bool:
        """Whether output layer and embedding are one weight."""
        return self._is_tied

    def packed(self) -> LlamaWeights | None:
        """The weights as the native kernels read them; None if other kernels compute a part."""
        layers = [layer.packed() for layer in self._layers if isinstance(layer, _Layer)]
        head, found = self._head.packed, tuple(layer for layer in layers if layer is not None)
        if head is None or len(found) < len(layers):
            return None
        embedding = self._embed.packed
        return LlamaWeights(self._dtype, self._rope, self._norm.norm, head, embedding, self._is_tied, found)

    @cached_property
    def _native(self) -> DecoderLayers | None:
        """The layers, where native kernels compute all of them; how they do is settled by now."""
        return _native_layers(self._layers)

    def hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        only: int | None = None,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """See `Network.hidden`; native kernels compute all layers in one call."""
        hidden = self._embed(ids)
        rope = self._rope_tables(positions)
        layers = self._layers if only is None else self._layers[only : only + 1]
        if isinstance(step, NativeStep) and step.tokens == len(hidden):
            native = self._native if only is None else _native_layers(layers)
            if native is not None:
                return step.compute_layers(native, hidden, rope, adapted)
        assert adapted is None, "native kernels alone compute adapters"
        for layer in layers:
            hidden = layer(hidden, rope, step)
        return hidden

    @property
    def adapted_layers(self) -> AdaptedLayers | None:
        """See `Network.adapted_layers`."""
        if self._native is None:
            return None
        layers = [layer for layer in self._layers if isinstance(layer, _Layer)]
        named = [
            (f"model.layers.{index}.{name}", index, source, shape)
            for index, layer in enumerate(layers)
            for name, source, shape in layer.linears()
        ]
        shape = self._head.out_features, self._head.in_features
        others = {"lm_head": shape, "model.embed_tokens": shape}
        return AdaptedLayers.of(named, [layer.gemm_columns for layer in self._native.layers], others)

    @property
    def has_windows(self) -> bool:
        """See `Network.has_windows`."""
        return any(layer.attention.window for layer in self._layers if isinstance(layer, _Layer))

    def layer_kinds(self) -> list[int]:
        """See `Network.layer_kinds`: kinds of attention."""
        kinds: dict[int, int] = {}
        for layer in self._layers:
            assert isinstance(layer, _Layer)
            kinds.setdefault(layer.attention.window, layer.attention.index)
        return list(kinds.values())

    def _rope_tables(self, positions: torch.Tensor) -> RopeTables:
        """Cosines and sines of all tokens."""
        if self._tables is None:
            return self._rope.tables(positions, self._dtype)
        return RopeTables(self._tables.cosine.index_select(0, positions), self._tables.sine.index_select(0, positions))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Network.logits`."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits


def _native_layers(modules: torch.nn.ModuleList) -> DecoderLayers | None:
    layers = [layer for layer in modules if isinstance(layer, _Layer)]
    found = [native for native in (layer.native() for layer in layers) if native is not None]
    if len(found) < len(layers):
        return None
    attention = layers[0].attention
    return DecoderLayers(found, attention.heads, attention.kv_heads, layers[0].head_dim)


class _RmsNorm:
    def __init__(self, norm: Norm, kernels: KernelBackend) -> None:
        self.norm = norm
        self._kernel = kernels.rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x, self.norm.weight, self.norm.epsilon)


class _Layer(torch.nn.Module):
    def __init__(self, weights: LayerWeights, head_dim: int, kernels: KernelBackend) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention = weights.attention
        self._input_norm = _RmsNorm(weights.input_norm, kernels)
        self._mlp_norm = _RmsNorm(weights.mlp_norm, kernels)
        self._qkv = Linear.of(weights.qkv)
        self._output = Linear.of(weights.output)
        self._gate = Linear.of(weights.gate, activation="silu")
        self._up = Linear.of(weights.up)
        self._down = Linear.of(weights.down)

    def packed(self) -> LayerWeights | None:
        """See `LlamaNetwork.packed`."""
        linears = (self._qkv, self._output, self._gate, self._up, self._down)
        found = [packed for packed in (linear.packed for linear in linears) if packed is not None]
        if len(found) < len(linears):
            return None
        qkv, output, gate, up, down = found
        return LayerWeights(self.attention, self._input_norm.norm, self._mlp_norm.norm, qkv, output, gate, up, down)

    def linears(self) -> Iterator[tuple[str, int, tuple[int, int]]]:
        """Name within the layer, input and shape of the checkpoint's linear layers; see
        `AdaptedLayers.of`.
        """
        keys = self.attention.kv_heads * self.head_dim
        for letter, rows in (("q", self.attention.heads * self.head_dim), ("k", keys), ("v", keys)):
            yield f"self_attn.{letter}_proj", QKV, (rows, self._qkv.in_features)
        for name, source, layer in (
            ("self_attn.o_proj", OUTPUT, self._output),
            ("mlp.gate_proj", MLP, self._gate),
            ("mlp.up_proj", MLP, self._up),
            ("mlp.down_proj", DOWN, self._down),
        ):
            yield name, source, (layer.out_features, layer.in_features)

    def native(self) -> DecoderLayer | None:
        """This layer for `native.layers`; None if other kernels compute a part of it."""
        one_part = [layer.native_parts for layer in (self._output, self._gate, self._up, self._down)]
        qkv = self._qkv.native_parts
        if not qkv or any(len(parts) != 1 for parts in one_part):
            return None
        attention, head_norms = self.attention, self.attention.head_norms
        if head_norms is not None:
            head_norms = head_norms[0].float(), head_norms[1].float(), head_norms[2]
        output, gate, up, down = (parts[0] for parts in one_part)
        return DecoderLayer(
            index=attention.index,
            norms=(self._input_norm.norm.weight.float(), self._mlp_norm.norm.weight.float()),
            epsilon=self._input_norm.norm.epsilon,
            head_norms=head_norms,
            scale=attention.scale,
            window=attention.window,
            qkv=qkv,
            output=output,
            mlp=Mlp(gate, up, down),
        )

    def forward(self, hidden: torch.Tensor, rope: RopeTables, step: AttentionStep) -> torch.Tensor:
        qkv = self._qkv(self._input_norm(hidden)).view(len(hidden), -1, self.head_dim)
        attended = step.attend_qkv(self.attention, qkv, rope)
        hidden = self._output.add(attended.reshape(len(hidden), -1), hidden)
        normed = self._mlp_norm(hidden)
        return self._down.add(self._up.mul(normed, self._gate.activated(normed)), hidden)
