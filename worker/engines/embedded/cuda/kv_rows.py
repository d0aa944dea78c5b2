"""Keys and values on their way into the paged KV cache, in Triton: RMSNorm of heads, and RoPE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kv(
    key_pointer,
    value_pointer,
    keys_pointer,
    values_pointer,
    page_pointer,
    slot_pointer,
    token_stride,
    page_stride,
    head_stride,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = tl.load(page_pointer + token).to(tl.int64)
    slot = tl.load(slot_pointer + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_inside = (d < WIDTH) & (page >= 0)
    source = token * token_stride + head * WIDTH + d
    target = page * page_stride + head * head_stride + slot * WIDTH + d
    tl.store(keys_pointer + target, tl.load(key_pointer + source, mask=is_inside), mask=is_inside)
    tl.store(values_pointer + target, tl.load(value_pointer + source, mask=is_inside), mask=is_inside)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write keys and values of tokens ``[T, Hkv, D]`` to the slots of their pages.

    Args:
        key: Keys.
        value: Values.
        keys: Keys of a layer ``[num_pages, Hkv, page_size, D]``, contiguous.
        values: Values of the layer, of the same shape.
        pages: Page of each token ``[T]``; -1 for a token that is not written.
        slots: Slot of each token ``[T]``.
    """
    key, value = key.contiguous(), value.contiguous()
    count, kv_heads, width = key.shape
    if count:
        _store_kv[count, kv_heads](
            *(key, value, keys, values, pages, slots, key.stride(0), keys.stride(0), keys.stride(1)),
            WIDTH=width,
            BLOCK_D=triton.next_power_of_2(width),
            num_warps=1,
        )


@triton.jit
def _rotate_and_store(
    qkv_pointer,
    cosine_pointer,
    sine_pointer,
    query_norm_pointer,
    key_norm_pointer,
    query_pointer,
    keys_pointer,
    values_pointer,
    page_pointer,
    slot_pointer,
    page_stride,
    head_stride,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    HALF: tl.constexpr = WIDTH // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    is_inside = h < HALF
    source = qkv_pointer + (token * (HEADS + 2 * KV_HEADS) + head) * WIDTH + h
    low = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=is_inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if HAS_NORMS:
            weights = key_norm_pointer
            if head < HEADS:
                weights = query_norm_pointer
            factor = 1.0 / tl.sqrt_rn(tl.sum(low * low + high * high, 0) / WIDTH + epsilon)
            low = low * factor * tl.load(weights + h, mask=is_inside, other=0.0)
            high = high * factor * tl.load(weights + HALF + h, mask=is_inside, other=0.0)
        cosine = tl.load(cosine_pointer + token * WIDTH + h, mask=is_inside, other=0.0).to(tl.float32)
        sine = tl.load(sine_pointer + token * WIDTH + h, mask=is_inside, other=0.0).to(tl.float32)
        low, high = low * cosine - high * sine, high * cosine + low * sine
    if head < HEADS:
        target = query_pointer + (token * HEADS + head) * WIDTH + h
        tl.store(target, low.to(query_pointer.dtype.element_ty), mask=is_inside)
        tl.store(target + HALF, high.to(query_pointer.dtype.element_ty), mask=is_inside)
    else:
        page = tl.load(page_pointer + token).to(tl.int64)
        slot = tl.load(slot_pointer + token).to(tl.int64)
        is_inside = is_inside & (page >= 0)
        place = page * page_stride + slot * WIDTH + h
        if head < HEADS + KV_HEADS:
            target = keys_pointer + place + (head - HEADS) * head_stride
        else:
            target = values_pointer + place + (head - HEADS - KV_HEADS) * head_stride
        tl.store(target, low.to(keys_pointer.dtype.element_ty), mask=is_inside)
        tl.store(target + HALF, high.to(keys_pointer.dtype.element_ty), mask=is_inside)


def rotate_and_store(
    qkv: torch.Tensor,
    heads: int,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """RMSNorm of heads and RoPE of a fused QKV projection; its keys and values are written.

    Args:
        qkv: ``[T, H + 2 * Hkv, D]``, contiguous; D is even.
        heads: Query heads, H.
        cosine: RoPE cosines ``[T, D]``, the two halves of D equal.
        sine: RoPE sines.
        norms: float32 weights ``[D]`` of query and key heads, and their epsilon; None for none.
        keys: See `store_kv`.
        values: See `store_kv`.
        pages: See `store_kv`.
        slots: See `store_kv`.

    Returns:
        Queries ``[T, H, D]``.
    """
    count, together, width = qkv.shape
    query = qkv.new_empty(count, heads, width)
    query_norm, key_norm, epsilon = (qkv, qkv, 0.0) if norms is None else norms
    if count:
        _rotate_and_store[count, together](
            *(qkv, cosine, sine, query_norm, key_norm, query, keys, values, pages, slots),
            *(keys.stride(0), keys.stride(1), epsilon),
            HEADS=heads,
            KV_HEADS=(together - heads) // 2,
            WIDTH=width,
            BLOCK_H=triton.next_power_of_2(width // 2),
            HAS_NORMS=norms is not None,
            num_warps=1,
        )
    return query
