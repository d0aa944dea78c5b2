"""The attention backend protocol: what computes attention over the paged KV cache.

A backend plans a step once; every layer then attends through that plan, either with queries, keys
and values, or with the output of a fused QKV projection, to which the backend applies RMSNorm and
RoPE. Only `model.kernels.choose_kernels` names the backends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch.nn import functional

from worker.engines.embedded.kv_cache import CodeRows, KvStore, SequenceSlice


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes of a model's attention, the same in all of its layers.

    Attributes:
        heads: Query heads, H.
        kv_heads: Key and value heads, Hkv.
        head_dim: D.
        softcap: Scores go through ``softcap * tanh(score / softcap)``; None for none.
        page_size: Tokens per page of the KV cache.
        dtype: Data type of queries, keys and values.
        device: Device of queries, keys and values.
        code_rows: Format of the KV store's rows; None if they are elements of `dtype`.
        has_windows: Whether tokens of some layers attend to a window alone.

    Raises:
        ValueError: heads do not share key heads evenly, so that kernels would leave some unwritten.
    """

    heads: int
    kv_heads: int
    head_dim: int
    softcap: float | None
    page_size: int
    dtype: torch.dtype
    device: torch.device
    code_rows: CodeRows | None = None
    has_windows: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads or self.head_dim < 1:
            raise ValueError(f"{self.heads} heads of width {self.head_dim} do not share {self.kv_heads} key heads")


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Constants of the attention of a layer with a fused QKV projection.

    Attributes:
        index: Index of the layer, and so of its keys and values in the KV store.
        heads: Query heads, H.
        kv_heads: Key and value heads, Hkv.
        scale: Factor of the scores.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        head_norms: RMSNorm weights ``[D]`` of each query head and of each key head, and their
            epsilon; None for none.
    """

    index: int
    heads: int
    kv_heads: int
    scale: float
    window: int
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None = None


@dataclass(frozen=True)
class RopeTables:
    """RoPE cosines and sines of a step's tokens ``[T, D]``, the two halves of D equal."""

    cosine: torch.Tensor
    sine: torch.Tensor

    @cached_property
    def for_roll(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine ``[T, 1, D]``: RoPE is ``x * cosine + roll(x, D / 2) * sine``.

        The sign of rotate_half is in the sine, so that RoPE takes a product, a roll and a fused
        multiply-add.
        """
        half = self.sine.shape[-1] // 2
        signed = torch.cat((-self.sine[:, :half], self.sine[:, half:]), -1)
        return self.cosine[:, None], signed[:, None]


class AttentionStep(ABC):
    """One step's attention, planned once and used by every layer; arguments as
    `AttentionBackend.plan`.

    Rows of its inputs behind the step's tokens are padding; their results are 0.

    Attributes:
        tokens: Number of tokens in the step, T.
        read_rows: Tokens whose last hidden states are read, rising, int64 ``[n]``; None for all.
    """

    read_rows: torch.Tensor | None = None

    def __init__(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> None:
        self.tokens = slot_mapping.shape[1]
        self._store = store
        self._sequences = sequences
        self._slot_mapping = (slot_mapping[0], slot_mapping[1])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's KV to the cache and attend over the cache; returns ``[T, H, D]``.

        Args:
            layer: Index of the layer.
            query: ``[T, H, D]``, after RoPE.
            key: ``[T, Hkv, D]``, after RoPE.
            value: ``[T, Hkv, D]``.
            scale: Factor of the scores.
            window: Tokens that a token attends to, itself among them; 0 for all before it.
            softcap: Scores go through ``softcap * tanh(score / softcap)``; None for none.
            sinks: Score of each query head that has no value behind it ``[H]``; None for none.
        """
        rows, count = len(query), self.tokens
        if rows > count:
            query, key, value = query[:count], key[:count], value[:count]
        self._write(layer, key, value)
        return pad_rows(self._attend(layer, query, scale, window, softcap, sinks), rows)

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the step's KV of a layer to the cache; arguments as `attend`, unpadded."""
        self._store.write(layer, self._slot_mapping, key, value)

    @abstractmethod
    def attend_qkv(self, layer: AttentionLayer, qkv: torch.Tensor, rope: RopeTables) -> torch.Tensor:
        """`attend` for a fused QKV projection: RMSNorm per head and RoPE come first.

        Args:
            layer: The layer's constants.
            qkv: Queries, keys and values ``[T, H + 2 * Hkv, D]``, contiguous.
            rope: RoPE angles of the same tokens.
        """

    @abstractmethod
    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the cache, where the step's KV is by now; arguments as `attend`, unpadded."""


class AttentionBackend(Protocol):
    """Kernels that compute attention: torch's, the native ones, or others; hashable.

    Attributes:
        kernels: Name of the kernels, for logs, receipts and KV transfer: ``torch``, ``native``.
        is_batch_invariant: Whether a token's result has the same bits in any batch, chunk, page
            layout and thread count, by construction.
        wants_dense_pages: Whether a step is faster where the pages that it reads lie densely.
        reads_behind: Whether it reads slots of the last page behind a sequence's newest token,
            which must then be finite.
    """

    kernels: str
    is_batch_invariant: bool
    wants_dense_pages: bool
    reads_behind: bool

    def __hash__(self) -> int: ...

    @classmethod
    def supports(cls, sizes: AttentionSizes) -> bool:
        """Whether it computes attention of these sizes, on this device, in this dtype and over such
        a KV store.
        """

    def candidates(self, sizes: AttentionSizes, may_cost: bool) -> Iterator[AttentionBackend]:
        """Configurations to try for batch invariance, cheapest first.

        Args:
            sizes: Sizes that they are tried on.
            may_cost: Whether to try those that cost much throughput.
        """

    def plan(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> AttentionStep:
        """Plan a step.

        Args:
            store: KV of all layers.
            sequences: The rows, in the order of their tokens, each with its page table.
            slot_mapping: Page and slot to which each token's KV is written, int64 ``[2, T]``.
        """


def pad_rows(attended: torch.Tensor, rows: int) -> torch.Tensor:
    """``[n, H, D]`` with rows of 0 behind it, `rows` in all."""
    if len(attended) == rows:
        return attended
    return functional.pad(attended, (0, 0, 0, 0, 0, rows - len(attended)))
