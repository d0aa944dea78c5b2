"""RoPE, writing to the paged KV cache, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adapters.devices import whole_numbers
from worker.engines.embedded.kv_cache import SequenceSlice
from worker.engines.embedded.native.libraries import DATA_TYPES, address
from worker.engines.embedded.native.paths import library

_QUERIES = 96
"""Queries of a tile at most: ``QUERIES`` in ``attention.h``."""

_WIDEST = 256
"""Largest head size: ``WIDEST`` in ``kv_rows.h``."""


def supports_heads(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `attend` computes attention of `heads` query heads over `kv_heads` key heads."""
    if kv_heads < 1 or heads % kv_heads:
        return False
    return dtype in DATA_TYPES and head_dim % 2 == 0 and head_dim <= _WIDEST and heads // kv_heads <= _QUERIES


def code_bytes(pages: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of a code of a layer's keys or values; 0 if pages are of elements.

    Args:
        pages: The layer's pages.
        dtype: Data type of the queries.

    Raises:
        ValueError: kernels of `dtype` do not compute on such pages.
    """
    if pages.dtype not in (dtype, torch.int8, *([torch.int16] if dtype == torch.float32 else [])):
        raise ValueError(f"keys and values for queries of {dtype} are of {pages.dtype}")
    return 0 if pages.dtype == dtype else pages.itemsize


@dataclass(frozen=True, slots=True)
class Projections:
    """The output of a fused QKV projection, and what RMSNorm per head and RoPE need.

    Attributes:
        qkv: Queries, keys and values ``[T, H + 2 * Hkv, D]``.
        heads: H.
        cosine: RoPE cosines of at least T tokens ``[T, D]``, the two halves of D equal.
        sine: RoPE sines ``[T, D]``, the same.
        norms: RMSNorm weights ``[D]`` of each query head and of each key head, and their epsilon;
            None for none.
    """

    qkv: torch.Tensor
    heads: int
    cosine: torch.Tensor
    sine: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float] | None


def rotate_and_store(
    projections: Projections, keys: torch.Tensor, values: torch.Tensor, slot_mapping: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """RMSNorm per head and RoPE; writes keys and values to the KV cache, returns queries.

    Args:
        projections: Projections of T tokens.
        keys: The layer's pages of keys, ``[pages, Hkv, page size, D]``; or of the rows of
            `kv_cache.CodeRows`, those of 16 bits in float32 alone.
        values: The layer's pages of values, the same.
        slot_mapping: Page and slot to which each token's KV is written, int64 ``[T]``.

    Returns:
        Rotated queries ``[T, H, D]``.
    """
    tokens, _, width = projections.qkv.shape
    _, kv_heads, size, _ = keys.shape
    query = projections.qkv.new_empty(tokens, projections.heads, width)
    of_query, of_key, epsilon = projections.norms or (None, None, 0.0)
    of_query, of_key = (None if each is None else each.float() for each in (of_query, of_key))
    kernels = library(query.dtype)
    arguments = kernels.rotation_t(
        qkv=projections.qkv.data_ptr(),
        tokens=tokens,
        heads=projections.heads,
        kv_heads=kv_heads,
        width=width,
        rotary=width,
        cosine=projections.cosine.data_ptr(),
        sine=projections.sine.data_ptr(),
        query_norm=address(of_query),
        key_norm=address(of_key),
        query=query.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        page_size=size,
        pages=slot_mapping[0].data_ptr(),
        slots=slot_mapping[1].data_ptr(),
        epsilon=epsilon,
        code_bytes=code_bytes(keys, query.dtype),
    )
    kernels.rotate_and_store(arguments, kernels.threads())
    return query


class Tiles:
    """Query tiles and page tables of a step.

    A tile is consecutive tokens of one row, whose heads that share keys make up to 96 queries: each
    block of keys is laid out in panels once for all of them.

    Args:
        sequences: The rows, in the order of their tokens.
        group: Query heads per key head.

    Attributes:
        page_table: Pages of all rows, one row after another, int64.
        tiles: First token, number of tokens, position of the first in its sequence, and index into
            `page_table` at which the row's pages begin, int64 ``[n, 4]``, by rising token.
    """

    def __init__(self, sequences: Sequence[SequenceSlice], group: int) -> None:
        most = _QUERIES // group
        pages: list[int] = []
        tiles: list[int] = []
        token = 0
        for sequence in sequences:
            for first in range(sequence.start, sequence.stop, most):
                tiles += (token + first - sequence.start, min(most, sequence.stop - first), first, len(pages))
            token += sequence.stop - sequence.start
            pages += sequence.page_table
        self.page_table = whole_numbers(pages)
        self.tiles = whole_numbers(tiles).view(-1, 4)

    def those_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The `tiles` that have one of these rising tokens, int64 ``[n]``."""
        first = self.tiles[:, 0].contiguous()
        before, through = torch.searchsorted(tokens, torch.stack((first, first + self.tiles[:, 1])))
        return self.tiles[through > before]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: Tiles,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``query [T, H, D]`` over the paged KV cache; returns ``[T, H, D]``.

    Args:
        query: After RoPE.
        keys: The layer's pages of keys, ``[pages, Hkv, page size, D]``; or of the rows of
            `kv_cache.CodeRows`, those of 16 bits in float32 alone.
        values: The layer's pages of values, the same.
        tiles: Query tiles and page tables of the step.
        scale: Factor of the scores.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        softcap: Scores go through ``softcap * tanh(score / softcap)``; None for none.
        sinks: Score of each query head that has no value behind it ``[H]``; None for none.
    """
    tokens, heads, width = query.shape
    sinks = None if sinks is None else sinks.float().contiguous()
    _, kv_heads, size, _ = keys.shape
    if query.stride()[1:] != (width, 1):
        query = query.contiguous()
    output = query.new_empty(tokens, heads, width)
    kernels = library(query.dtype)
    arguments = kernels.attention_t(
        query=query.data_ptr(),
        query_stride=query.stride(0),
        output=output.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        width=width,
        page_size=size,
        page_table=tiles.page_table.data_ptr(),
        tiles=tiles.tiles.data_ptr(),
        num_tiles=len(tiles.tiles),
        window=window,
        scale=scale,
        softcap=softcap or 0.0,
        sinks=address(sinks),
        code_bytes=code_bytes(keys, query.dtype),
    )
    kernels.attend(arguments, kernels.threads())
    return output
