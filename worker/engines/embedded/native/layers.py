"""The decoder layers of a model, all of a step in one call of the native kernels.

A step on few rows calls some 300 kernels of microseconds each, and Python takes as long between
them. `layers.c` calls them in the same order with the same arguments, so the bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker.engines.embedded.native.attention import Tiles, code_bytes
from worker.engines.embedded.native.gemm import EPILOGUES, Gemm, quantised_kernel
from worker.engines.embedded.native.libraries import KernelLibrary, address
from worker.engines.embedded.native.lora import AdaptedRows
from worker.engines.embedded.native.paths import library
from worker.engines.embedded.native.quantised import QuantisedPanels


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP, or an expert: ``down(activation(gate(x)) * up(x))``.

    Attributes:
        gate: Gate projection ``[inner, hidden]``.
        up: Up projection, the same.
        down: Down projection ``[hidden, inner]``.
    """

    gate: Gemm
    up: Gemm
    down: Gemm


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: a token's MLPs are those of the greatest numbers of a router.

    Attributes:
        router: Projection ``[experts, hidden]``.
        experts: The experts, all of the same sizes.
        top_k: Experts of a token.
        normalises: Whether a token's weights are the softmax over its experts, not over all.
    """

    router: Gemm
    experts: Sequence[Mlp]
    top_k: int
    normalises: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer: Llama's, and what other architectures do otherwise. All norms are RMSNorms with
    weights in float32.

    Attributes:
        index: Index of the layer in the model, and of its keys and values in the KV store.
        norms: Weights ``[hidden]`` before attention and before the MLP; None for none.
        post_norms: Weights of norms of what attention and MLP add to the hidden states; None for
            none.
        epsilon: Epsilon of these norms.
        head_norms: Weights of norms of queries and keys, and their epsilon; None for none. They are
            ``[D]``, of each head; or, if `has_whole_norms`, ``[H * D]`` and ``[Hkv * D]``.
        has_whole_norms: Whether these are norms of all heads of a token together.
        residual: Factor of what attention and MLP add.
        scale: Factor of the scores.
        softcap: Scores go through ``softcap * tanh(score / softcap)``; None for none.
        sinks: Score of each query head without a value ``[H]``, float32; None for none.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        rope: Index of its RoPE in the step's tables; None for no RoPE.
        activation: One of `gemm.EPILOGUES`, of gates.
        product: One of `gemm.EPILOGUES`, of up projections, with the gate.
        qkv: The fused QKV projection; or those of queries, keys and values.
        output: Projection of attention's result.
        mlp: The MLP, or the experts in its place.
    """

    index: int
    norms: tuple[torch.Tensor | None, torch.Tensor | None]
    post_norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    epsilon: float
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    has_whole_norms: bool = False
    residual: float = 1.0
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    window: int
    rope: int | None = 0
    activation: str = "silu"
    product: str = "mul"
    qkv: Sequence[Gemm]
    output: Gemm
    mlp: Mlp | Mixture

    def to_c(self, kernels: KernelLibrary, keys: torch.Tensor, values: torch.Tensor, kept: list[Any]) -> Any:
        """The ``layer_t`` of the kernels, with the layer's pages; what it has addresses of beside
        the layer goes to `kept`.
        """
        of_query, of_key, head_epsilon = self.head_norms or (None, None, 0.0)
        projections = [gemm.address for gemm in self.qkv] + [None] * (3 - len(self.qkv))
        experts = mlp = None
        if isinstance(self.mlp, Mixture):
            kept.append(_experts(kernels, self.mlp, kept))
            experts = ctypes.addressof(kept[-1])
        else:
            mlp = self.mlp
        return kernels.layer_t(
            input_norm=address(self.norms[0]),
            mlp_norm=address(self.norms[1]),
            attention_post_norm=address(self.post_norms[0]),
            mlp_post_norm=address(self.post_norms[1]),
            query_norm=address(of_query),
            key_norm=address(of_key),
            epsilon=self.epsilon,
            head_epsilon=head_epsilon,
            residual=self.residual,
            scale=self.scale,
            softcap=self.softcap or 0.0,
            norms_whole=self.has_whole_norms,
            rope=-1 if self.rope is None else self.rope,
            activation=EPILOGUES[self.activation],
            product=EPILOGUES[self.product],
            window=self.window,
            sinks=address(self.sinks),
            query_proj=projections[0],
            key_proj=projections[1],
            value_proj=projections[2],
            output_proj=self.output.address,
            experts=experts,
            gate=mlp and mlp.gate.address,
            up=mlp and mlp.up.address,
            down=mlp and mlp.down.address,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
        )

    @property
    def mlps(self) -> Sequence[Mlp]:
        """The MLP, or the experts."""
        return self.mlp.experts if isinstance(self.mlp, Mixture) else (self.mlp,)

    @property
    def gemm_columns(self) -> Sequence[Sequence[int]]:
        """Columns of the GEMMs of each input, see `lora.AdaptedLayers`; none of experts."""
        mlp = self.mlp
        inner = () if isinstance(mlp, Mixture) else (mlp.gate.columns, mlp.up.columns)
        down = () if isinstance(mlp, Mixture) else (mlp.down.columns,)
        return [gemm.columns for gemm in self.qkv], (self.output.columns,), inner, down

    @property
    def quantised(self) -> list[QuantisedPanels]:
        """Quantised weights of the layer."""
        gemms = [*self.qkv, self.output, *(gemm for mlp in self.mlps for gemm in (mlp.gate, mlp.up, mlp.down))]
        return [gemm.quantised for gemm in gemms if gemm.quantised is not None]


def _experts(kernels: KernelLibrary, mixture: Mixture, kept: list[Any]) -> Any:
    """The ``experts_t`` of a mixture."""
    count = len(mixture.experts)
    lists = [
        (ctypes.c_void_p * count)(*(getattr(expert, name).address for expert in mixture.experts))
        for name in ("gate", "up", "down")
    ]
    kept += lists
    gates, ups, downs = (ctypes.addressof(each) for each in lists)
    return kernels.experts_t(
        router=mixture.router.address,
        gates=gates,
        ups=ups,
        downs=downs,
        count=count,
        top_k=mixture.top_k,
        normalises=mixture.normalises,
    )


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs that the layers of a step share, beside its hidden states.

    Attributes:
        cosine: Cosines of each RoPE for the step's tokens ``[ropes, T, R]``, the two halves of R
            equal; R is the number of elements of a head that are rotated.
        sine: RoPE sines, the same.
        slot_mapping: Page and slot to which each token's KV is written, int64 ``[T]``.
        tiles: Query tiles and page tables of the step.
        keys: Pages of keys by layer, ``[pages, Hkv, page size, D or a row's codes and scale]``.
        values: Pages of values by layer, the same.
        adapted: Adapters of the step's tokens; None if no token has one.
        read: Tokens whose hidden states behind the last layer are read, rising, int64 ``[n]``; None
            for all.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    slot_mapping: tuple[torch.Tensor, torch.Tensor]
    tiles: Tiles
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    adapted: AdaptedRows | None = None
    read: torch.Tensor | None = None


class DecoderLayers:
    """Layers of a model.

    Args:
        layers: Layers in order; their tensors are kept.
        heads: Query heads, H.
        kv_heads: Key and value heads, Hkv.
        head_dim: Width of a head, D.
        is_interleaved: Whether RoPE rotates neighbours, not the elements of two halves.

    Raises:
        ValueError: heads do not share key heads evenly.

    Attributes:
        group: Query heads per key head.
        layers: The same.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        heads: int,
        kv_heads: int,
        head_dim: int,
        is_interleaved: bool = False,
    ) -> None:
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} heads do not share {kv_heads} key heads evenly")
        self.group = heads // kv_heads
        self.layers = layers
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._is_interleaved = is_interleaved
        self._inner = max(mlp.gate.columns for layer in layers for mlp in layer.mlps)
        self._keys: Sequence[torch.Tensor] | None = None  # whose addresses `_in_c` has
        self._in_c: Any = None
        self._code_bytes = 0
        self._kept: list[Any] = []
        quantised = [weight for layer in layers for weight in layer.quantised]
        self._quantised = None
        if quantised:  # all weights of a model meet rows that are rounded, or none
            self._quantised = ctypes.cast(quantised_kernel(quantised[0].rounds_to), ctypes.c_void_p)

    def compute(self, hidden: torch.Tensor, step: StepTensors) -> None:
        """Replace hidden states ``[T, hidden]`` by those behind the last layer, or, of tokens that
        are not in ``step.read``, by others that are finite if they and their keys and values are.

        Raises:
            MemoryError: there is no memory for what lies between the layers.
        """
        kernels = library(hidden.dtype)
        if self._keys is not step.keys:
            kept: list[Any] = []
            in_c = [
                layer.to_c(kernels, step.keys[layer.index], step.values[layer.index], kept) for layer in self.layers
            ]
            self._kept = kept
            self._in_c = (kernels.layer_t * len(in_c))(*in_c)
            self._code_bytes = code_bytes(step.keys[0], hidden.dtype)
            self._keys = step.keys
        pages, slots = step.slot_mapping
        tiles = step.tiles
        arguments = kernels.step_t(
            tokens=hidden.shape[0],
            hidden=hidden.shape[1],
            heads=self._heads,
            kv_heads=self._kv_heads,
            width=self._head_dim,
            rotary=step.cosine.shape[-1],
            inner=self._inner,
            cosine=step.cosine.data_ptr(),
            sine=step.sine.data_ptr(),
            pages=pages.data_ptr(),
            slots=slots.data_ptr(),
            page_table=tiles.page_table.data_ptr(),
            tiles=tiles.tiles.data_ptr(),
            num_tiles=len(tiles.tiles),
            page_size=step.keys[0].shape[2],
            quantised=self._quantised,
            is_interleaved=self._is_interleaved,
            code_bytes=self._code_bytes,
        )
        if step.read is not None:
            read_tiles = tiles.those_of(step.read)
            arguments.read, arguments.num_unread = step.read.data_ptr(), len(hidden) - len(step.read)
            arguments.read_tiles, arguments.num_read_tiles = read_tiles.data_ptr(), len(read_tiles)
        if step.adapted is not None:
            assert step.adapted.num_layers == len(self.layers), "an adapter of another model"
            arguments.adapters = step.adapted.adapters.data_ptr()
            arguments.adapted = step.adapted.rows.data_ptr()
            arguments.num_adapted = len(step.adapted.rows)
            arguments.lora_width = step.adapted.width
        if step.adapted is not None and step.read is not None:
            read_adapted = step.adapted.those_of(step.read)
            arguments.read_adapters = read_adapted.adapters.data_ptr()
            arguments.read_adapted = read_adapted.rows.data_ptr()
            arguments.num_read_adapted = len(read_adapted.rows)
        if kernels.decoder_layers(arguments, self._in_c, len(self.layers), hidden.data_ptr(), kernels.threads()):
            raise MemoryError(f"no memory for {len(hidden)} rows of {hidden.shape[1]} elements")
