"""The Triton attention backend: kernels for CUDA that read the pages in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from adapters.devices import upload
from worker.engines.embedded import cuda
from worker.engines.embedded.attention.backend import (
    AttentionLayer,
    AttentionSizes,
    AttentionStep,
    RopeTables,
    pad_rows,
)
from worker.engines.embedded.kv_cache import KvStore, SequenceSlice


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """Implements `AttentionBackend` with the kernels of `cuda`.

    It is batch-invariant: see `cuda.attention`.
    """

    kernels = "triton"
    is_batch_invariant = True
    wants_dense_pages = False  # a layer is one call, wherever its pages lie
    reads_behind = True

    @classmethod
    def supports(cls, sizes: AttentionSizes) -> bool:
        """Heads whose keys fit into shared memory, not quantised ones."""
        fits = cuda.split_bytes(sizes.head_dim, sizes.dtype) <= cuda.MOST_BYTES
        return sizes.device.type == "cuda" and sizes.code_rows is None and fits

    def candidates(self, sizes: AttentionSizes, may_cost: bool) -> Iterator[TritonAttention]:
        """None but itself."""
        yield self

    def plan(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> TritonStep:
        """See `AttentionBackend.plan`."""
        return TritonStep(store, sequences, slot_mapping)


class TritonStep(AttentionStep):
    """A step of the Triton kernels.

    Args:
        store: See `AttentionBackend.plan`.
        sequences: See `AttentionBackend.plan`.
        slot_mapping: See `AttentionBackend.plan`; the page of a token that is not written is -1.
        rows: The sequences on the device, where they are there; the same for every layer.
    """

    def __init__(
        self,
        store: KvStore,
        sequences: Sequence[SequenceSlice],
        slot_mapping: torch.Tensor,
        rows: cuda.Sequences | None = None,
    ) -> None:
        super().__init__(store, sequences, slot_mapping)
        self._rows = rows

    def attend_qkv(self, layer: AttentionLayer, qkv: torch.Tensor, rope: RopeTables) -> torch.Tensor:
        """See `AttentionStep.attend_qkv`."""
        rows = len(qkv)
        keys, values = self._store.keys[layer.index], self._store.values[layer.index]
        query = cuda.rotate_and_store(
            qkv[: self.tokens], layer.heads, rope.cosine, rope.sine, layer.head_norms, keys, values, *self._slot_mapping
        )
        return pad_rows(self._attend(layer.index, query, layer.scale, layer.window, None), rows)

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cuda.store_kv(key, value, self._store.keys[layer], self._store.values[layer], *self._slot_mapping)

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
        if self._rows is None:
            tokens = cuda.tile_tokens(query, keys.shape[1])
            self._rows = _on_device(self._sequences, keys.shape[2], tokens, query.device)
        return cuda.attend(query, keys, values, self._rows, scale, window, softcap, sinks)


def _on_device(
    sequences: Sequence[SequenceSlice], page_size: int, tile_tokens: int, device: torch.device
) -> cuda.Sequences:
    """A step's sequences, in one upload."""
    singles: list[int] = []
    tiles: list[int] = []
    token, longest = 0, 0
    width = max(-(-sequence.stop // page_size) for sequence in sequences)
    tables: list[int] = []
    for row, sequence in enumerate(sequences):
        count = sequence.stop - sequence.start
        if count == 1:
            singles += token, row, sequence.stop
            longest = max(longest, sequence.stop)
        else:
            for first in range(0, count, tile_tokens):
                tiles += token + first, row, sequence.start + first, min(tile_tokens, count - first)
        token += count
        pages = list(sequence.page_table[: -(-sequence.stop // page_size)])
        tables += pages + [0] * (width - len(pages))
    numbers = upload(torch.tensor(singles + tiles + tables, dtype=torch.int32), device)
    parts = torch.split(numbers, [len(singles), len(tiles), len(tables)])
    return cuda.Sequences(
        parts[2].view(-1, width), parts[0].view(-1, 3), parts[1].view(-1, 4), -(-longest // cuda.SPLIT)
    )
