"""The KV store: keys and values of every layer in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from worker.engines.embedded.plan import PageCopy


@dataclass(slots=True)
class KvStore:
    """Keys and values of each layer: ``[num_pages, num_kv_heads, page_size, head_dim]``.

    They are finite everywhere: attention multiplies what its mask hides by 0, and a NaN there would
    survive that.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    _key_slots: list[torch.Tensor] = field(init=False)
    _value_slots: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._key_slots = [_wide(each).transpose(1, 2) for each in self.keys]
        self._value_slots = [_wide(each).transpose(1, 2) for each in self.values]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys of each layer, then values of each layer."""
        return [*self.keys, *self.values]

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
        self._key_slots[layer].index_put_(slot_mapping, _wide(key))
        self._value_slots[layer].index_put_(slot_mapping, _wide(value))

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer, before their first slot is written.

        KV of another request, or a NaN, must not stay behind that slot.
        """
        if pages:
            index = torch.tensor(pages, device=self.keys[0].device)
            for tensor in (*self.keys, *self.values):
                tensor.index_fill_(0, index, 0)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first slots of pages in every layer, in order, and zero those behind them."""
        for tensor in (*self.keys, *self.values) if copies else ():
            for each in copies:
                tensor[each.target, :, : each.num_tokens] = tensor[each.source, :, : each.num_tokens]
                tensor[each.target, :, each.num_tokens :] = 0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as 64-bit numbers, where a head's KV of a token is a multiple of 64 bits.

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
