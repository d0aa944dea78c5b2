"""Rounding to GGUF's types of super-blocks: Q4_K and Q6_K, with the bits of llama.cpp's reference.

A super-block is 256 consecutive weights of a row in groups of 32 or 16. The scale of each group is
found by a search that minimises a weighted squared error, and is itself rounded, in steps of the
super-block. What the reference adds up one term after the other, in float32, is added up so here,
for many groups at once: arrays have a row for each place in a group, and a column for each group.
The native kernels compute the same, forty times as fast; see `native.gguf_types`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from worker.models.quantised import Codes

SUPER_BLOCK = 256
"""Weights of a super-block."""

Floats = npt.NDArray[np.float32]

_GROUPS_AT_ONCE = 2048  # their arrays stay in a processor's own cache
_LEAST_MAXIMUM = np.float32(1e-15)  # GROUP_MAX_EPS: a smaller group is zeros
_TENTH = np.float32(0.1)
_MAGIC = np.float32(12582912.0)


def round_q4_k(rows: Floats) -> Codes:
    """``quantize_row_q4_K_ref`` of ggml-quants.c, without an importance matrix.

    Args:
        rows: Finite weights ``[n, K]``; K is a multiple of `SUPER_BLOCK`.
    """
    return _in_chunks(rows, 32, _round_q4_k)


def round_q6_k(rows: Floats) -> Codes:
    """``quantize_row_q6_K_ref`` of ggml-quants.c. Args: see `round_q4_k`."""
    return _in_chunks(rows, 16, _round_q6_k)


def _in_chunks(rows: Floats, group: int, round: Callable[[Floats], Codes]) -> Codes:
    """Codes of `rows` by `round`, which takes groups ``[group, groups of whole super-blocks]``."""
    groups = rows.reshape(-1, group)
    with np.errstate(all="ignore"):  # groups of zeros divide by zero, and are told apart behind it
        found = [
            round(np.ascontiguousarray(groups[start : start + _GROUPS_AT_ONCE].T))
            for start in range(0, len(groups), _GROUPS_AT_ONCE)
        ]
    codes = np.concatenate([each.codes for each in found]).reshape(len(rows), -1)
    scales = np.concatenate([each.scales for each in found]).reshape(len(rows), -1)
    if found[0].offsets is None:
        return Codes(codes, scales)
    return Codes(codes, scales, np.concatenate([each.offsets for each in found]).reshape(len(rows), -1))


def _sum(terms: Floats) -> Floats:
    """The sum of each column, one row after the other: numpy adds in pairs along the last axis
    alone.
    """
    found: Floats = np.add.reduce(terms, axis=0)
    return found


def _whole(values: Floats, least: int, most: int) -> Floats:
    """`values`, overwritten: rounded to integers, halves to even ones, and clipped."""
    np.rint(values, out=values)
    np.maximum(values, np.float32(least), out=values)
    np.minimum(values, np.float32(most), out=values)
    return values


def _nearest(values: Floats) -> npt.NDArray[np.int32]:
    """``nearest_int``, also beyond 2 ** 22, where it is no rounding any more."""
    found: npt.NDArray[np.int32] = ((values + _MAGIC).view(np.int32) & 0x007FFFFF) - 0x00400000
    return found


def _round_q4_k(x: Floats) -> Codes:
    codes, found, least = _search_q4_k(x)
    scales, minima = found.reshape(-1, 8), (-least).reshape(-1, 8)
    steps, least_steps = (np.maximum(each.max(1), 0) / np.float32(63) for each in (scales, minima))
    scales, minima = (
        each.astype(np.float16).astype(np.float32)[:, None] * _sixths(of, each)
        for each, of in ((steps, scales), (least_steps, minima))
    )
    step, minimum = scales.reshape(-1), minima.reshape(-1)
    again = np.clip(_nearest((x + minimum) / step), 0, 15)
    np.copyto(codes, again, where=step != 0, casting="unsafe")
    pairs = codes.astype(np.uint8).T
    return Codes(pairs[:, ::2] | pairs[:, 1::2] << np.uint8(4), scales, -minima)


def _sixths(values: Floats, steps: Floats) -> Floats:
    """`values` ``[n, 8]`` in 6 bits, of which 63 are the largest of a super-block."""
    largest = np.maximum(values.max(1), 0)
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))[:, None]
    found: Floats = np.minimum(_nearest(inverse * values) & 0xFF, 63).astype(np.float32)
    return found


def _search_q4_k(x: Floats) -> tuple[Floats, Floats, Floats]:
    """``make_qkx2_quants``: codes ``[32, n]`` from 0 to 15, and the scale and the least weight of
    each group, at most 0.
    """
    root = np.sqrt(_sum(x * x) / np.float32(32))
    w = root + np.abs(x)
    sum_w, sum_x = _sum(w), _sum(w * x)
    least, most = np.minimum(x.min(0), 0), x.max(0)
    is_flat = most == least
    inverse = np.float32(15) / (most - least)
    scale, codes = 1 / inverse, _whole((x - least) * inverse, 0, 15)
    error = _sum(w * np.square(scale * codes + least - x))
    for step in range(21):
        widened = np.float32(-1) + _TENTH * np.float32(step) + np.float32(15)
        tried = _whole((x - least) * (widened / (most - least)), 0, 15)
        products = w * tried
        sum_l, sum_xl = _sum(products), _sum(products * x)
        products *= tried
        sum_l2 = _sum(products)
        divisor = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / divisor
        new_least = (sum_l2 * sum_x - sum_l * sum_xl) / divisor
        is_above = new_least > 0
        new_scale = np.where(is_above, sum_xl / sum_l2, new_scale)
        new_least = np.where(is_above, np.float32(0), new_least)
        np.multiply(new_scale, tried, out=products)
        products += new_least
        products -= x
        np.square(products, out=products)
        products *= w
        new_error = _sum(products)
        is_better = (divisor > 0) & (new_error < error)
        for found, new in ((codes, tried), (error, new_error), (scale, new_scale), (least, new_least)):
            np.copyto(found, new, where=is_better)
    codes[:, is_flat] = 0
    return codes, np.where(is_flat, np.float32(0), scale), least


def _round_q6_k(x: Floats) -> Codes:
    codes, found = _search_q6_k(x)
    scales = found.reshape(-1, 16)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    inverse = np.float32(-128) / largest
    is_zero = np.abs(largest) < _LEAST_MAXIMUM
    integers = np.minimum(_nearest(inverse * scales), 127).astype(np.float32)
    steps = (1 / inverse).astype(np.float16).astype(np.float32)
    scales = np.where(is_zero, np.float32(0), steps * integers)
    step = scales.reshape(-1)
    again = np.clip(_nearest(x / step), -32, 31)
    np.copyto(codes, again, where=step != 0, casting="unsafe")
    codes[:, np.repeat(is_zero[:, 0], 16)] = -32
    return Codes(codes.astype(np.int8).T, scales)


def _search_q6_k(x: Floats) -> tuple[Floats, Floats]:
    """``make_qx_quants``: codes ``[16, n]`` from -32 to 31, and the scale of each group."""
    sizes = np.abs(x)
    largest = np.take_along_axis(x, sizes.argmax(0)[None], 0)[0]
    is_zero = np.abs(largest) < _LEAST_MAXIMUM
    w = x * x
    wx = w * x

    def tried(tenths: int) -> tuple[Floats, Floats, Floats]:
        codes = _whole(-(np.float32(32) + _TENTH * np.float32(tenths)) / largest * x, -32, 31)
        products = w * codes
        products *= codes
        return codes, _sum(wx * codes), _sum(products)

    codes, sum_lx, sum_l2 = tried(0)
    scale = np.where(sum_l2 != 0, sum_lx / sum_l2, np.float32(0))
    best = scale * sum_lx
    for tenths in (*range(-9, 0), *range(1, 10)):
        new, sum_lx, sum_l2 = tried(tenths)
        new_scale = sum_lx / sum_l2
        is_better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        for found, now in ((codes, new), (scale, new_scale), (best, new_scale * sum_lx)):
            np.copyto(found, now, where=is_better)
    codes[:, is_zero] = -32
    return codes, np.where(is_zero, np.float32(0), scale)
