"""The KV store: keys and values of every layer in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adapters.devices import upload_ids
from worker.engines.embedded.host import memory
from worker.engines.embedded.host.memory_ahead import MemoryAhead
from worker.engines.embedded.kv_cache.code_rows import CodeRows
from worker.engines.embedded.plan import PageCopy


def row_shape(head_dim: int, dtype: torch.dtype, code_rows: CodeRows | None) -> tuple[int, torch.dtype]:
    """The last dimension of a store's tensors, and their data type; for elements of `dtype`."""
    return (head_dim, dtype) if code_rows is None else (code_rows.width, code_rows.codes)


@dataclass(slots=True)
class KvStore:
    """Keys and values of each layer: ``[num_pages, num_kv_heads, page_size, head_dim]``, or, where
    they are quantised, ``[num_pages, num_kv_heads, page_size, CodeRows.width]``.

    `write` and the attention backends, which read rows, know what is in one; everything else moves
    rows.

    Attributes:
        keys: Keys of each layer.
        values: Values of each layer.
        code_rows: Format of a row; None if it is its elements, in their own data type.
        is_read_behind: Whether attention reads slots behind the newest token of a sequence, and
            multiplies them by 0: they are zeroed, as KV of another request, or a NaN, would survive
            that. See `AttentionBackend.reads_behind`.
        ahead: Gets the memory of pages before they are written; None if it is there.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    code_rows: CodeRows | None = None
    is_read_behind: bool = True
    ahead: MemoryAhead | None = None
    _key_slots: list[torch.Tensor] = field(init=False)
    _value_slots: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._key_slots = [_wide(each).transpose(1, 2) for each in self.keys]
        self._value_slots = [_wide(each).transpose(1, 2) for each in self.values]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys of each layer, then values of each layer."""
        return [*self.keys, *self.values]

    @property
    def dtype_name(self) -> str:
        """Data type of keys and values, and that in which they were computed, if it is another."""
        if self.code_rows is not None:
            return self.code_rows.name
        return str(self.keys[0].dtype).removeprefix("torch.")

    def write(
        self, layer: int, slot_mapping: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write a step's KV of one layer.

        Args:
            layer: Index of the layer.
            slot_mapping: Page and slot of each token, int64 ``[T]`` each.
            key: ``[T, num_kv_heads, head_dim]``.
            value: ``[T, num_kv_heads, head_dim]``.
        """
        if self.code_rows is not None:
            key, value = self.code_rows.quantise(key), self.code_rows.quantise(value)
        self._key_slots[layer].index_put_(slot_mapping, _wide(key))
        self._value_slots[layer].index_put_(slot_mapping, _wide(value))

    def begin(self, pages: Sequence[int]) -> None:
        """Prepare pages before their first slot is written: zero them, if `is_read_behind`."""
        if not pages:
            return
        if self.ahead is not None:
            self.ahead.reach(max(pages))
        if self.is_read_behind:
            index = upload_ids(pages, self.keys[0].device)
            for tensor in (*self.keys, *self.values):
                tensor.index_fill_(0, index, 0)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first slots of pages in every layer, in order; those behind them as `begin`."""
        for tensor in (*self.keys, *self.values) if copies else ():
            for each in copies:
                if each.source != each.target:
                    tensor[each.target, :, : each.num_tokens] = tensor[each.source, :, : each.num_tokens]
                if self.is_read_behind:
                    tensor[each.target, :, each.num_tokens :] = 0

    def give_back(self) -> None:
        """Give the memory back to the system; `take_back` comes before the next step."""
        if self.ahead is not None:
            self.ahead.forget()
        memory.give_back(self.tensors)

    def take_back(self) -> None:
        """Have the memory again, all zeros. Raises `RuntimeError` if it is not there."""
        memory.take_back(self.tensors)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as 64-bit numbers, where a row is a multiple of 64 bits.

    ``index_put_`` moves elements one by one, and these are fewer.
    """
    return tensor.view(torch.int64) if tensor.shape[-1] * tensor.itemsize % 8 == 0 else tensor


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """A row of a step: the tokens of a sequence that it computes, and the sequence's page table.

    Attributes:
        page_table: Position p is in ``page_table[p // page_size]`` at slot ``p % page_size``.
        start: First position that is computed.
        stop: Past the last one.
    """

    page_table: Sequence[int]
    start: int
    stop: int
