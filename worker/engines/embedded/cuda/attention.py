"""Attention over the paged KV cache in Triton: split-KV with splits at fixed positions.

The keys of a token are split every `SPLIT` positions of its sequence, and its result is the online
softmax's merge of its splits in ascending order. A single token's splits are attended to by
programs of their own and merged by another; several tokens of a sequence by one program, split
after split. Both do the same operations on the same numbers, so that a token has the same bits
however it was computed. Sources: Dao, "FlashAttention-2" (2023); Dao et al., "Flash-Decoding"
(2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.engines.embedded.cuda.shared_memory import shared_bytes

SPLIT = 128
"""Keys in a split."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_ROWS, _ROWS_OF_FLOAT32 = 64, 16
"""Queries of a program that attends for several tokens, if few enough heads share keys."""

MOST_BYTES = 2**16
"""Keys of a split at most: a multiprocessor holds them and as many values in shared memory."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The rows of a step, on the device; int32 all.

    Attributes:
        table: Page table of each row ``[R, P]``.
        singles: Token, row and number of keys ``[n, 3]`` of rows of one token; no keys for padding.
        tiles: First token, row, first position and number of tokens ``[n, 4]``, a program each, of
            rows of several tokens; `tile_tokens` at most.
        num_splits: Splits of the longest of `singles`.
    """

    table: torch.Tensor
    singles: torch.Tensor
    tiles: torch.Tensor
    num_splits: int


def tile_tokens(query: torch.Tensor, kv_heads: int) -> int:
    """Tokens of a tile of several tokens, of queries ``[T, H, D]``: as many as shared memory holds
    beside the keys of a split.
    """
    _, heads, width = query.shape
    rows = _ROWS_OF_FLOAT32 if query.dtype == torch.float32 else _ROWS
    of_row = (_block(width) + SPLIT) * query.dtype.itemsize  # a query and its weights
    while rows > 16 and split_bytes(width, query.dtype) + rows * of_row > shared_bytes(query.device):
        rows //= 2
    return max(1, rows // (heads // kv_heads))


def split_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of the keys of a split, in heads of `width`; `MOST_BYTES` at most."""
    return SPLIT * _block(width) * dtype.itemsize


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@triton.jit
def _attend_split(
    query,
    position,
    split,
    pages_pointer,
    keys_pointer,
    values_pointer,
    page_stride,
    scale,
    softcap,
    window,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Highest score, sum and weighted values of queries ``[M, D]`` at `position` ``[M]``."""
    d = tl.arange(0, BLOCK_D)
    key = split * SPLIT + tl.arange(0, SPLIT)
    is_needed = key <= tl.max(position, 0)
    page = tl.load(pages_pointer + key // PAGE, mask=is_needed, other=0).to(tl.int64)
    place = page * page_stride + (key % PAGE) * WIDTH
    is_inside = is_needed[:, None] & (d < WIDTH)[None, :]
    keys = tl.load(keys_pointer + place[:, None] + d[None, :], mask=is_inside, other=0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E) / softcap) + 1.0))
    is_seen = key[None, :] <= position[:, None]
    if HAS_WINDOW:
        is_seen = is_seen & (key[None, :] > position[:, None] - window)
    scores = tl.where(is_seen, scores * _LOG2_E, float("-inf"))
    highest = tl.max(scores, 1)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    values = tl.load(values_pointer + place[:, None] + d[None, :], mask=is_inside, other=0.0)
    weights = tl.exp2(scores - base[:, None]).to(values.dtype)
    # the sum of the rounded weights, by the same instruction in a program of any shape
    ones = tl.full((SPLIT, 16), 1.0, tl.float32).to(values.dtype)
    total = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
    return highest, total, tl.dot(weights, values, input_precision="ieee")


@triton.jit
def _shares(merged, highest):
    """The new highest score and the factors of what is merged and of what is added."""
    both = tl.maximum(merged, highest)
    base = tl.where(both == float("-inf"), 0.0, both)
    return both, tl.exp2(merged - base), tl.exp2(highest - base)


@triton.jit
def _attend_singles(
    query_pointer,
    keys_pointer,
    values_pointer,
    table_pointer,
    singles_pointer,
    highest_pointer,
    total_pointer,
    output_pointer,
    table_stride,
    page_stride,
    head_stride,
    num_splits,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    single, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(singles_pointer + single * 3).to(tl.int64)
    row = tl.load(singles_pointer + single * 3 + 1).to(tl.int64)
    stop = tl.load(singles_pointer + single * 3 + 2)
    is_absent = split * SPLIT >= stop
    if HAS_WINDOW:
        is_absent = is_absent | (split * SPLIT + SPLIT <= stop - window)
    if is_absent:
        return
    d, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    place = (token * HEADS + kv_head * GROUP + m) * WIDTH
    is_inside = (m < GROUP)[:, None] & (d < WIDTH)[None, :]
    query = tl.load(query_pointer + place[:, None] + d[None, :], mask=is_inside, other=0.0)
    position = tl.full((BLOCK_M,), 0, tl.int32) + (stop - 1)
    highest, total, output = _attend_split(
        query,
        position,
        split,
        table_pointer + row * table_stride,
        keys_pointer + kv_head * head_stride,
        values_pointer + kv_head * head_stride,
        page_stride,
        scale,
        softcap,
        window,
        WIDTH,
        BLOCK_D,
        PAGE,
        HAS_CAP,
        HAS_WINDOW,
        SPLIT,
    )
    part = (single.to(tl.int64) * HEADS + kv_head * GROUP + m) * num_splits + split
    tl.store(highest_pointer + part, highest, mask=m < GROUP)
    tl.store(total_pointer + part, total, mask=m < GROUP)
    tl.store(output_pointer + part[:, None] * WIDTH + d[None, :], output, mask=is_inside)


@triton.jit
def _merge_singles(
    singles_pointer,
    highest_pointer,
    total_pointer,
    output_pointer,
    sinks_pointer,
    result_pointer,
    num_splits,
    window,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    single, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(singles_pointer + single * 3).to(tl.int64)
    stop = tl.load(singles_pointer + single * 3 + 2)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(stop - window, 0) // SPLIT
    d = tl.arange(0, BLOCK_D)
    merged, merged_total = float("-inf"), 0.0
    merged_output = tl.zeros((BLOCK_D,), tl.float32)
    start = (single.to(tl.int64) * HEADS + head) * num_splits
    for split in range(first, tl.cdiv(stop, SPLIT)):
        highest = tl.load(highest_pointer + start + split)
        total = tl.load(total_pointer + start + split)
        output = tl.load(output_pointer + (start + split) * WIDTH + d, mask=d < WIDTH, other=0.0)
        merged, ours, its = _shares(merged, highest)
        merged_total = tl.fma(total, its, merged_total * ours)
        merged_output = tl.fma(output, tl.zeros_like(output) + its, merged_output * ours)
    if HAS_SINKS:
        merged_total += tl.exp2(tl.load(sinks_pointer + head) * _LOG2_E - merged)
    result = tl.where(stop > 0, merged_output / merged_total, 0.0)
    place = (token * HEADS + head) * WIDTH + d
    tl.store(result_pointer + place, result.to(result_pointer.dtype.element_ty), mask=d < WIDTH)


@triton.jit
def _attend_tiles(
    query_pointer,
    keys_pointer,
    values_pointer,
    table_pointer,
    tiles_pointer,
    sinks_pointer,
    result_pointer,
    table_stride,
    page_stride,
    head_stride,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(tiles_pointer + tile * 4).to(tl.int64)
    row = tl.load(tiles_pointer + tile * 4 + 1).to(tl.int64)
    start = tl.load(tiles_pointer + tile * 4 + 2)
    count = tl.load(tiles_pointer + tile * 4 + 3)
    d, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + m % GROUP
    is_query = m < count * GROUP
    place = ((token + m // GROUP) * HEADS + head) * WIDTH
    is_inside = is_query[:, None] & (d < WIDTH)[None, :]
    query = tl.load(query_pointer + place[:, None] + d[None, :], mask=is_inside, other=0.0)
    position = start + tl.minimum(m // GROUP, count - 1)
    merged = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    merged_total = tl.zeros((BLOCK_M,), tl.float32)
    merged_output = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(start + 1 - window, 0) // SPLIT
    for split in range(first, tl.cdiv(start + count, SPLIT)):
        highest, total, output = _attend_split(
            query,
            position,
            split,
            table_pointer + row * table_stride,
            keys_pointer + kv_head * head_stride,
            values_pointer + kv_head * head_stride,
            page_stride,
            scale,
            softcap,
            window,
            WIDTH,
            BLOCK_D,
            PAGE,
            HAS_CAP,
            HAS_WINDOW,
            SPLIT,
        )
        merged, ours, its = _shares(merged, highest)
        merged_total = tl.fma(total, its, merged_total * ours)
        merged_output = tl.fma(output, tl.zeros_like(output) + its[:, None], merged_output * ours[:, None])
    if HAS_SINKS:
        merged_total += tl.exp2(tl.load(sinks_pointer + head) * _LOG2_E - merged)
    result = merged_output / merged_total[:, None]
    tl.store(result_pointer + place[:, None] + d[None, :], result.to(result_pointer.dtype.element_ty), mask=is_inside)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: Sequences,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a step's tokens, whose KV is in the cache; ``[T, H, D]``.

    Args:
        query: ``[T, H, D]`` after RoPE.
        keys: Keys of a layer ``[num_pages, Hkv, page_size, D]``, contiguous.
        values: Values of the layer, of the same shape.
        sequences: Rows of the step.
        scale: Factor of the scores.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        softcap: Scores go through ``softcap * tanh(score / softcap)``; None for none.
        sinks: Score of each query head that has no value behind it ``[H]``; None for none.
    """
    query = query.contiguous()
    (_, heads, width), (_, kv_heads, page, _) = query.shape, keys.shape
    result = torch.empty_like(query)
    sizes = {"HEADS": heads, "WIDTH": width, "BLOCK_D": _block(width)}
    variant = {"HAS_WINDOW": window > 0, "SPLIT": SPLIT, "enable_fp_fusion": False, "num_warps": 4}
    variant["num_stages"] = 2 if split_bytes(width, query.dtype) < MOST_BYTES // 2 else 1
    reading = {"KV_HEADS": kv_heads, "PAGE": page, "HAS_CAP": softcap is not None}
    numbers = (scale, softcap or 0.0, window)
    strides = (sequences.table.stride(0), keys.stride(0), keys.stride(1))
    has_sinks, sinks = sinks is not None, query if sinks is None else sinks.float()
    group = heads // kv_heads
    if count := len(sequences.singles):
        shape = (count, heads, sequences.num_splits)
        highest, total = torch.empty(2, *shape, device=query.device).unbind()
        output = torch.empty(*shape, width, device=query.device)
        _attend_singles[count, kv_heads, sequences.num_splits](
            *(query, keys, values, sequences.table, sequences.singles, highest, total, output),
            *(*strides, sequences.num_splits, *numbers),
            **sizes,
            **variant,
            **reading,
            BLOCK_M=max(16, triton.next_power_of_2(group)),
        )
        _merge_singles[count, heads](
            *(sequences.singles, highest, total, output, sinks, result, sequences.num_splits, window),
            **sizes,
            **variant,
            HAS_SINKS=has_sinks,
        )
    if count := len(sequences.tiles):
        _attend_tiles[count, kv_heads](
            *(query, keys, values, sequences.table, sequences.tiles, sinks, result, *strides, *numbers),
            **sizes,
            **variant,
            **reading,
            HAS_SINKS=has_sinks,
            BLOCK_M=max(16, triton.next_power_of_2(tile_tokens(query, kv_heads) * group)),
        )
    return result
