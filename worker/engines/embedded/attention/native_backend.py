"""The native attention backend: C kernels that read the pages in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from worker.engines.embedded import native
from worker.engines.embedded.attention.backend import (
    AttentionLayer,
    AttentionSizes,
    AttentionStep,
    RopeTables,
    pad_rows,
)
from worker.engines.embedded.kv_cache import KvStore, SequenceSlice
from worker.engines.embedded.native.layers import DecoderLayers, StepTensors
from worker.engines.embedded.native.lora import AdaptedRows


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """Implements `AttentionBackend` with the kernels of `native`.

    It is batch-invariant: keys are read in blocks that begin at fixed positions of a sequence, and
    merged with the online softmax in ascending order.
    """

    kernels = "native"
    is_batch_invariant = True
    wants_dense_pages = False  # a step is one call, wherever its pages lie
    reads_behind = False  # a block of keys ends with the sequence

    @classmethod
    def supports(cls, sizes: AttentionSizes) -> bool:
        """See `native.supports_heads`; int16 rows in float32 alone."""
        has_rows = sizes.code_rows is None or sizes.code_rows.codes == torch.int8 or sizes.dtype == torch.float32
        return (
            has_rows
            and sizes.device.type == "cpu"
            and native.supports_heads(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.dtype)
        )

    def candidates(self, sizes: AttentionSizes, may_cost: bool) -> Iterator[NativeAttention]:
        """None but itself."""
        yield self

    def plan(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> NativeStep:
        """See `AttentionBackend.plan`."""
        return NativeStep(store, sequences, slot_mapping)


class NativeStep(AttentionStep):
    """A step of the native kernels."""

    def __init__(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> None:
        super().__init__(store, sequences, slot_mapping)
        self._tiles: native.Tiles | None = None

    def attend_qkv(self, layer: AttentionLayer, qkv: torch.Tensor, rope: RopeTables) -> torch.Tensor:
        """See `AttentionStep.attend_qkv`."""
        rows = len(qkv)
        if rows > self.tokens:
            qkv = qkv[: self.tokens]
        projections = native.Projections(qkv, layer.heads, rope.cosine, rope.sine, layer.head_norms)
        keys, values = self._store.keys[layer.index], self._store.values[layer.index]
        query = native.rotate_and_store(projections, keys, values, self._slot_mapping)
        attended = self._attend(layer.index, query, layer.scale, layer.window, None)
        return pad_rows(attended, rows)

    def compute_layers(
        self, layers: DecoderLayers, hidden: torch.Tensor, rope: RopeTables, adapted: AdaptedRows | None = None
    ) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` behind all layers, in place of those before the first."""
        store, tiles = self._store, self._tiles_of(layers.group)
        pages = store.keys, store.values
        shared = StepTensors(rope.cosine, rope.sine, self._slot_mapping, tiles, *pages, adapted, self.read_rows)
        layers.compute(hidden, shared)
        return hidden

    def _tiles_of(self, group: int) -> native.Tiles:
        if self._tiles is None:
            self._tiles = native.Tiles(self._sequences, group)
        return self._tiles

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = self._store.keys[layer], self._store.values[layer]
        tiles = self._tiles_of(query.shape[1] // keys.shape[1])
        return native.attend(query, keys, values, tiles, scale, window, softcap, sinks)
