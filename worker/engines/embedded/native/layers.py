"""The decoder layers of the Llama family, all of a step in one call of the native kernels.

A step on few rows calls some 300 kernels of microseconds each, and Python takes as long between
them. `layers.c` calls them in the same order with the same arguments, so the bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker.engines.embedded.native.attention import Tiles
from worker.engines.embedded.native.gemm import Gemm, quantised_kernel
from worker.engines.embedded.native.libraries import KernelLibrary, address
from worker.engines.embedded.native.lora import AdaptedRows
from worker.engines.embedded.native.paths import library
from worker.engines.embedded.native.quantised import QuantisedPanels


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer of the Llama family.

    Attributes:
        index: Index of the layer in the model, and of its keys and values in the KV store.
        norms: RMSNorm weights ``[hidden]`` and epsilons, before attention and before the MLP.
        head_norms: See `AttentionLayer.head_norms`.
        scale: Factor of the scores.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        qkv: The fused QKV projection; or those of queries, keys and values.
        output: Projection of attention's result.
        gate: Gate projection of the MLP.
        up: Up projection of the MLP.
        down: Down projection of the MLP.
    """

    index: int
    norms: tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]]
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    scale: float
    window: int
    qkv: Sequence[Gemm]
    output: Gemm
    gate: Gemm
    up: Gemm
    down: Gemm

    def to_c(self, kernels: KernelLibrary, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """The ``layer_t`` of the kernels, with the layer's pages."""
        (of_input, input_epsilon), (of_mlp, mlp_epsilon) = self.norms
        of_query, of_key, head_epsilon = self.head_norms or (None, None, 0.0)
        projections = [gemm.address for gemm in self.qkv] + [None] * (3 - len(self.qkv))
        return kernels.layer_t(
            input_norm=of_input.data_ptr(),
            mlp_norm=of_mlp.data_ptr(),
            query_norm=address(of_query),
            key_norm=address(of_key),
            input_epsilon=input_epsilon,
            mlp_epsilon=mlp_epsilon,
            head_epsilon=head_epsilon,
            scale=self.scale,
            window=self.window,
            query_proj=projections[0],
            key_proj=projections[1],
            value_proj=projections[2],
            output_proj=self.output.address,
            gate=self.gate.address,
            up=self.up.address,
            down=self.down.address,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
        )

    @property
    def quantised(self) -> list[QuantisedPanels]:
        """Quantised weights of the layer."""
        gemms = (*self.qkv, self.output, self.gate, self.up, self.down)
        return [gemm.quantised for gemm in gemms if gemm.quantised is not None]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs that the layers of a step share, beside its hidden states.

    Attributes:
        cosine: RoPE cosines of the step's tokens ``[T, D]``, the two halves of D equal.
        sine: RoPE sines ``[T, D]``, the same.
        slot_mapping: Page and slot to which each token's KV is written, int64 ``[T]``.
        tiles: Query tiles and page tables of the step.
        keys: Pages of keys by layer, ``[pages, Hkv, page size, D or bytes of a row in int8]``.
        values: Pages of values by layer, the same.
        adapted: Adapters of the step's tokens; None if no token has one.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    slot_mapping: tuple[torch.Tensor, torch.Tensor]
    tiles: Tiles
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    adapted: AdaptedRows | None = None


class DecoderLayers:
    """Layers of a model.

    Args:
        layers: Layers in order; their tensors are kept.
        heads: Query heads, H.
        kv_heads: Key and value heads, Hkv.

    Raises:
        ValueError: heads do not share key heads evenly.

    Attributes:
        group: Query heads per key head.
    """

    def __init__(self, layers: Sequence[DecoderLayer], heads: int, kv_heads: int) -> None:
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} heads do not share {kv_heads} key heads evenly")
        self.group = heads // kv_heads
        self._layers = layers
        self._heads, self._kv_heads = heads, kv_heads
        self._keys: Sequence[torch.Tensor] | None = None  # whose addresses `_in_c` has
        self._in_c: Any = None
        quantised = [weight for layer in layers for weight in layer.quantised]
        self._quantised = None
        if quantised:  # all weights of a model meet rows that are rounded, or none
            self._quantised = ctypes.cast(quantised_kernel(quantised[0].rounds_rows), ctypes.c_void_p)

    def compute(self, hidden: torch.Tensor, step: StepTensors) -> None:
        """Replace hidden states ``[T, hidden]`` by those behind the last layer.

        Raises:
            MemoryError: there is no memory for what lies between the layers.
        """
        kernels = library(hidden.dtype)
        if self._keys is not step.keys:
            in_c = [layer.to_c(kernels, step.keys[layer.index], step.values[layer.index]) for layer in self._layers]
            self._in_c = (kernels.layer_t * len(in_c))(*in_c)
            self._keys = step.keys
        pages, slots = step.slot_mapping
        tiles = step.tiles
        arguments = kernels.step_t(
            tokens=hidden.shape[0],
            hidden=hidden.shape[1],
            heads=self._heads,
            kv_heads=self._kv_heads,
            width=step.cosine.shape[1],
            cosine=step.cosine.data_ptr(),
            sine=step.sine.data_ptr(),
            pages=pages.data_ptr(),
            slots=slots.data_ptr(),
            page_table=tiles.page_table.data_ptr(),
            tiles=tiles.tiles.data_ptr(),
            num_tiles=len(tiles.tiles),
            page_size=step.keys[0].shape[2],
            quantised=self._quantised,
            is_int8=step.keys[0].dtype == torch.int8,
        )
        if step.adapted is not None:
            assert step.adapted.num_layers == len(self._layers), "an adapter of another model"
            arguments.adapters = step.adapted.adapters.data_ptr()
            arguments.adapted = step.adapted.rows.data_ptr()
            arguments.num_adapted = len(step.adapted.rows)
            arguments.lora_width = step.adapted.width
        if kernels.decoder_layers(arguments, self._in_c, len(self._layers), hidden.data_ptr(), kernels.threads()):
            raise MemoryError(f"no memory for {len(hidden)} rows of {hidden.shape[1]} elements")
