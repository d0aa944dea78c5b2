"""The decoder layers of the Llama family, all of a step in one call of the native kernels.

A step on few rows calls some 300 kernels of microseconds each, and Python takes as long between
them. `layers.c` calls them in the same order with the same arguments, so the bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.engines.embedded import native
from worker.engines.embedded.native.quantised import QuantisedPanels, kernel

_MOST_PARTS = 3
"""Of a fused QKV projection: ``PARTS_OF_QKV`` in ``layers.c``."""

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _CGemm(ctypes.Structure):
    """``gemm_t`` in ``layers.c``."""

    _fields_ = (
        *((name, _INT64) for name in ("columns", "inner")),
        *((name, _POINTER) for name in ("weight", "bias", "scales", "offsets")),
        ("group", _INT64),
        *((name, _INT32) for name in ("bits", "is_half")),
        ("zero", _FLOAT),
    )


class _CLayer(ctypes.Structure):
    """``layer_t``."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _FLOAT) for name in ("input_epsilon", "mlp_epsilon", "head_epsilon", "scale")),
        ("window", _INT64),
        ("qkv", _CGemm * _MOST_PARTS),
        *((name, _CGemm) for name in ("output", "gate", "up", "down")),
        *((name, _POINTER) for name in ("keys", "values")),
    )


class _CStep(ctypes.Structure):
    """``step_t``."""

    _fields_ = (
        *((name, _INT64) for name in ("tokens", "hidden", "heads", "kv_heads", "width")),
        *((name, _POINTER) for name in ("cosine", "sine", "pages", "slots", "page_table", "tiles")),
        *((name, _INT64) for name in ("num_tiles", "page_size")),
        ("quantised", _POINTER),
        ("is_int8", _INT32),
        ("team", _POINTER),
    )


@dataclass(frozen=True, slots=True)
class Gemm:
    """A packed weight ``[N, K]``.

    Attributes:
        columns: N.
        inner: K.
        weight: As `native.pack` returned it, or a quantised one.
        bias: ``[N]`` or None.
    """

    columns: int
    inner: int
    weight: torch.Tensor | QuantisedPanels
    bias: torch.Tensor | None

    def to_c(self) -> _CGemm:
        bias = native.address(self.bias)
        if isinstance(self.weight, torch.Tensor):
            return _CGemm(self.columns, self.inner, self.weight.data_ptr(), bias)
        panels = self.weight
        return _CGemm(
            *(self.columns, self.inner, panels.codes.data_ptr(), bias),
            *(panels.scales.data_ptr(), native.address(panels.offsets)),
            *(panels.group, panels.bits, panels.scales.dtype == torch.float16, panels.zero),
        )


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer of the Llama family.

    Attributes:
        index: Of the layer, and so of its keys and values in the KV store.
        norms: RMSNorm weights ``[hidden]`` and epsilons, before attention and before the MLP.
        head_norms: See `AttentionLayer.head_norms`.
        scale: Factor of the scores.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        qkv: The fused QKV projection, its parts one below the other.
        output: Projection of what attention returns.
        gate: Of the MLP, as are the following.
        up: Likewise.
        down: Likewise.
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

    def to_c(self) -> _CLayer:
        (of_input, input_epsilon), (of_mlp, mlp_epsilon) = self.norms
        of_query, of_key, head_epsilon = self.head_norms or (None, None, 0.0)
        return _CLayer(
            *(of_input.data_ptr(), of_mlp.data_ptr(), native.address(of_query), native.address(of_key)),
            *(input_epsilon, mlp_epsilon, head_epsilon, self.scale, self.window),
            (_CGemm * _MOST_PARTS)(*(gemm.to_c() for gemm in self.qkv)),
            *(gemm.to_c() for gemm in (self.output, self.gate, self.up, self.down)),
        )

    @property
    def quantised(self) -> list[QuantisedPanels]:
        """Its quantised weights."""
        gemms = (*self.qkv, self.output, self.gate, self.up, self.down)
        return [gemm.weight for gemm in gemms if isinstance(gemm.weight, QuantisedPanels)]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What the layers of a step share, beside its hidden states.

    Attributes:
        cosine: RoPE cosines of the step's tokens ``[T, D]``, the two halves of D equal.
        sine: Likewise.
        slot_mapping: Page and slot to which each token's KV is written, int64 ``[T]``.
        tiles: The rows.
        keys: Pages of each layer, ``[pages, Hkv, page size, D or bytes of a row in int8]``.
        values: Likewise.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    slot_mapping: tuple[torch.Tensor, torch.Tensor]
    tiles: native.Tiles
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


class DecoderLayers:
    """Layers of a model.

    Args:
        layers: In order; their tensors are kept.
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
        self._in_c = (_CLayer * len(layers))(*(layer.to_c() for layer in layers))
        self._keys: Sequence[torch.Tensor] | None = None  # whose addresses the layers have
        self._quantised = None
        if quantised := [weight for layer in layers for weight in layer.quantised]:
            self._quantised = ctypes.cast(kernel(quantised[0].rounds_rows), _POINTER)  # as all of a model

    def compute(self, hidden: torch.Tensor, step: StepTensors) -> None:
        """Replace hidden states ``[T, hidden]`` by those behind the last layer.

        Raises:
            MemoryError: there is no memory for what lies between the layers.
        """
        if self._keys is not step.keys:
            for layer, in_c in zip(self._layers, self._in_c, strict=True):
                in_c.keys, in_c.values = step.keys[layer.index].data_ptr(), step.values[layer.index].data_ptr()
            self._keys = step.keys
        pages, slots = step.slot_mapping
        tiles = step.tiles
        in_c = _CStep(
            *(*hidden.shape, self._heads, self._kv_heads, step.cosine.shape[1]),
            *(step.cosine.data_ptr(), step.sine.data_ptr(), pages.data_ptr(), slots.data_ptr()),
            *(tiles.page_table.data_ptr(), tiles.tiles.data_ptr(), len(tiles.tiles), step.keys[0].shape[2]),
            *(self._quantised, step.keys[0].dtype == torch.int8, native.team()),
        )
        library = native.library(hidden.dtype)
        if library.decoder_layers(ctypes.byref(in_c), self._in_c, len(self._layers), hidden.data_ptr()):
            raise MemoryError(f"no memory for {len(hidden)} rows of {hidden.shape[1]} elements")
