"""Where keys and values are: pages of every layer, and which of them a row of a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from worker.engines.embedded.plan import PageCopy


@dataclass(slots=True)
class KvStore:
    """Keys and values of every layer: tensors ``[num_pages, num_kv_heads, page_size,
    head_dim]``, finite.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    _key_slots: list[torch.Tensor] = field(init=False)
    _value_slots: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._key_slots = [_wide(each).transpose(1, 2) for each in self.keys]
        self._value_slots = [_wide(each).transpose(1, 2) for each in self.values]

    def write(
        self, layer: int, slot_mapping: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put ``key, value [T, num_kv_heads, head_dim]`` into the pages and slots `slot_mapping`."""
        self._key_slots[layer].index_put_(slot_mapping, _wide(key))
        self._value_slots[layer].index_put_(slot_mapping, _wide(value))

    def zero(self, pages: Sequence[int]) -> None:
        """Zero pages that are written from their first slot on: a NaN left there would get
        past every mask.
        """
        if pages:
            index = torch.tensor(pages, device=self.keys[0].device)
            for tensor in (*self.keys, *self.values):
                tensor.index_fill_(0, index, 0)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages, in every layer, and zero what is behind them."""
        for tensor in (*self.keys, *self.values) if copies else ():
            for each in copies:
                tensor[each.target, :, : each.num_tokens] = tensor[each.source, :, : each.num_tokens]
                tensor[each.target, :, each.num_tokens :] = 0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as 64-bit numbers, where a row holds whole ones: they are moved by number,
    not by byte.
    """
    return tensor.view(torch.int64) if tensor.shape[-1] * tensor.itemsize % 8 == 0 else tensor


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One row of a step: tokens at positions ``[start, stop)`` of the sequence stored in
    `pages`.
    """

    page_table: Sequence[int]
    start: int
    stop: int
