"""Attention over a packed batch with our own KV store, plugged into transformers' model code.

A forward pass has batch size 1: the tokens of all rows lie one after another. Each row writes its keys and values to
its own segments of the store and attends to them up to its last token, at its exact length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from worker.engines.embedded.plan import SegmentCopy

IMPLEMENTATION = "embedded_kv_store"
STEP_ARGUMENT = "embedded_step"


@dataclass(slots=True)
class KvStore:
    """Keys and values of every layer: tensors ``[num_segments, num_kv_heads, segment_size, head_dim]``."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def copy(self, copies: Sequence[SegmentCopy]) -> None:
        """Copy the beginnings of segments, in every layer."""
        for tensor in (*self.keys, *self.values) if copies else ():
            for each in copies:
                tensor[each.target, :, : each.num_tokens] = tensor[each.source, :, : each.num_tokens]


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a step: tokens at positions ``[start, stop)`` of the sequence stored in `segments`."""

    segments: tuple[int, ...]
    start: int
    stop: int


class AttentionStep:
    """What the layers of one forward pass share: where rows are, where their KV goes, and their masks."""

    def __init__(self, store: KvStore, spans: list[Span], kv_index: torch.Tensor) -> None:
        self.store = store
        self.spans = spans
        self.counts = [span.stop - span.start for span in spans]
        self.kv_index = kv_index
        self._masks: dict[tuple[Span, int], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Store ``key, value [Hkv, T, D]`` and attend with ``query [H, T, D]``; returns ``[H, T, D]``.

        A token sees itself and the `window` - 1 tokens before it, or all of them if `window` is 0.
        """
        stored_keys, stored_values = self.store.keys[layer], self.store.values[layer]
        size = stored_keys.shape[2]
        places = self.kv_index // size, self.kv_index % size
        stored_keys[places[0], :, places[1]] = key.transpose(0, 1)
        stored_values[places[0], :, places[1]] = value.transpose(0, 1)
        rows = []
        for span, row in zip(self.spans, torch.split(query, self.counts, dim=1), strict=True):
            first = max(0, span.start - window + 1) if window else 0
            seen = slice(first, span.stop)
            keys = torch.cat([stored_keys[segment] for segment in span.segments], dim=1)
            values = torch.cat([stored_values[segment] for segment in span.segments], dim=1)
            if span.stop - span.start == 1:
                rows.append(_attend_one(row, keys[:, seen], values[:, seen], scale))
            else:
                rows.append(_attend_many(row, keys[:, seen], values[:, seen], scale, self._mask(span, window, query)))
        return torch.cat(rows, dim=1)

    def _mask(self, span: Span, window: int, like: torch.Tensor) -> torch.Tensor:
        """Additive ``[queries, keys]`` mask: causal, and of `window` tokens."""
        mask = self._masks.get((span, window))
        if mask is None:
            first = max(0, span.start - window + 1) if window else 0
            queries = torch.arange(span.start, span.stop, device=like.device)[:, None]
            keys = torch.arange(first, span.stop, device=like.device)[None, :]
            hidden = keys > queries
            if window:
                hidden |= keys <= queries - window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._masks[(span, window)] = mask
        return mask


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query ``[H, 1, D]``: the heads that share keys ride along as queries, so that no key is copied."""
    heads, _, width = query.shape
    grouped = query.reshape(1, keys.shape[0], -1, width)
    return scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale).reshape(heads, 1, width)


def _attend_many(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor
) -> torch.Tensor:
    """Several queries ``[H, n, D]``: key heads are the batch, and repeated for the heads that share them."""
    heads, count, width = query.shape
    grouped = query.reshape(keys.shape[0], -1, count, width)
    shared = (-1, grouped.shape[1], -1, -1)
    attended = scaled_dot_product_attention(
        grouped, keys[:, None].expand(shared), values[:, None].expand(shared), attn_mask=mask, scale=scale
    )
    return attended.reshape(heads, count, width)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    step: AttentionStep = arguments[STEP_ARGUMENT]
    attended = step.attend(module.layer_idx, query[0], key[0], value[0], scaling, sliding_window or 0)
    return attended.transpose(0, 1)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are made per row, in `AttentionStep`."""


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; harmless when repeated."""
    attention: Callable[..., Any] = _attention
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
