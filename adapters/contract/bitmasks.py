"""Packed masks of the vocabulary: made, read, and applied to many rows in a few operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from adapters.devices import upload, upload_ids

Words = np.ndarray[Any, np.dtype[np.int32]]

FEW = 16
"""The ids of a mask are applied one by one if it masks, or keeps, fewer than one in this many."""


def bitmask_of(token_ids: Iterable[int], vocab_size: int) -> torch.Tensor:
    """Packed int32 ``[ceil(vocab_size / 32)]`` with the bits of ``token_ids`` set.

    Raises:
        ValueError: an id is outside ``[0, vocab_size)``.
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    ids = np.fromiter(token_ids, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"token ids must be between 0 and {vocab_size - 1}")
    bits[ids] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


def is_allowed(bitmask: torch.Tensor, token_id: int) -> bool:
    """Whether the bit of ``token_id`` is set; ids beyond the bitmask are not allowed."""
    word = token_id >> 5
    return word < bitmask.shape[0] and bool((int(bitmask[word]) >> (token_id & 31)) & 1)


def count_allowed(bitmask: torch.Tensor, num_tokens: int) -> int:
    """Number of bits set below ``num_tokens``; bits of padding above it do not count."""
    words = np.ascontiguousarray(bitmask.numpy())
    num_pairs = min(num_tokens // 64, len(words) // 2)  # of words, as they are counted fastest
    count = int(np.bitwise_count(words[: 2 * num_pairs].view(np.uint64)).sum(dtype=np.uint32))
    rest = int.from_bytes(words[2 * num_pairs :][:2].tobytes(), "little")
    return count + (rest & (1 << num_tokens - 64 * num_pairs) - 1).bit_count()


class UnpackedMask(NamedTuple):
    """A mask in the form in which it is applied fastest to a row on a CPU.

    Attributes:
        words: The packed mask.
        masked: int64 ``[n]``, the ids that it masks; None if they are not few.
        kept: int64 ``[n]``, the ids that it keeps; None unless they are few, and the others not.
    """

    words: Words
    masked: torch.Tensor | None
    kept: torch.Tensor | None


def unpacked(bitmask: torch.Tensor, width: int) -> UnpackedMask:
    """The form of ``bitmask`` (int32 ``[W]``) for rows of ``width``; ids beyond it are masked."""
    words = bitmask.cpu().contiguous().numpy()
    num_kept = count_allowed(bitmask.cpu(), width)
    if (width - num_kept) * FEW < width:
        beyond = np.arange(32 * len(words), width)
        return UnpackedMask(words, torch.from_numpy(np.concatenate((_bits_in(~words, width), beyond))), None)
    kept = torch.from_numpy(_bits_in(words, width)) if num_kept * FEW < width else None
    return UnpackedMask(words, None, kept)


def _bits_in(words: Words, width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids of the bits set, ``32 * word + bit``, rising, below ``width``."""
    some = np.flatnonzero(words)
    bits = np.flatnonzero(np.unpackbits(words[some].view(np.uint8), bitorder="little"))
    ids: np.ndarray[Any, np.dtype[np.int64]] = some[bits >> 5] * 32 + (bits & 31)
    return ids[: int(np.searchsorted(ids, width))]


def apply_on_device(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int]) -> None:
    """`apply_bitmask` of logits that are not on a CPU; arguments as there."""
    covered = min(logits.shape[1], bitmask.shape[1] * 32)
    if covered < logits.shape[1]:
        for row in rows:
            logits[row, covered:] = -torch.inf
    octets = _on_device(bitmask, logits.device).contiguous().view(torch.uint8).int()
    addends = _addends(logits.device).index_select(0, octets.flatten()).view(len(octets), -1)[:, :covered]
    if list(rows) == list(range(len(logits))):
        logits[:, :covered].add_(addends)
        return
    logits[:, :covered].index_add_(0, upload_ids(list(rows), logits.device), addends.to(logits.dtype))


def apply_unpacked(logits: torch.Tensor, masks: Sequence[tuple[int, UnpackedMask]]) -> None:
    """`apply_bitmask` on a CPU without kernels, of masks that were unpacked before.

    Which of three ways a row takes depends on its mask and its own values alone.

    Args:
        logits: float ``[B, V]``, edited in place.
        masks: ``(row, mask)``; no row occurs twice.
    """
    few = [(row, mask.masked) for row, mask in masks if mask.masked is not None]
    if few:
        index = flat_index(few, logits.shape[1])
        logits.view(-1).index_add_(0, index, torch.full(index.shape, -torch.inf, dtype=logits.dtype))
    if len(few) == len(masks):
        return
    many = [(row, mask) for row, mask in masks if mask.masked is None]
    highest = highest_values(logits, [row for row, _ in many])
    kept: list[tuple[int, torch.Tensor]] = []
    whole: dict[int, tuple[Words, list[int]]] = {}
    for (row, mask), value in zip(many, highest, strict=True):
        if mask.kept is not None and math.isfinite(value):  # NaN and +inf must stay recognisable
            kept.append((row, mask.kept))
        else:
            whole.setdefault(id(mask), (mask.words, []))[1].append(row)
    if kept:
        index, flat = flat_index(kept, logits.shape[1]), logits.view(-1)
        values = flat.index_select(0, index)
        mask_rows(logits, [row for row, _ in kept])
        flat.index_copy_(0, index, values)
    for words, rows in whole.values():
        _add_whole(logits, words, rows)


def mask_rows(logits: torch.Tensor, rows: Sequence[int]) -> None:
    """Masks some rows whole."""
    if logits.device.type == "cpu":
        for row in rows:  # a third of the time of an indexed fill
            logits[row].fill_(-torch.inf)
    else:
        logits.index_fill_(0, upload_ids(rows, logits.device), -torch.inf)


def highest_values(logits: torch.Tensor, rows: Sequence[int]) -> list[float]:
    """The highest value of some rows of ``logits`` (``[B, V]``), NaN where a row holds one."""
    if 2 * len(rows) < len(logits):
        logits, rows = logits[upload_ids(rows, logits.device)], range(len(rows))
    highest: list[float] = logits.amax(-1).tolist()
    return [highest[row] for row in rows]


def flat_index(parts: Sequence[tuple[int, torch.Tensor]], width: int) -> torch.Tensor:
    """Indices of columns of some rows in the flattened logits: int64, part after part."""
    columns = torch.cat([part for _, part in parts])
    starts = np.repeat([row * width for row, _ in parts], [part.shape[0] for _, part in parts])
    return columns.add_(torch.from_numpy(starts))


# Row b holds the eight addends of byte b: 0 where its bit is set, else -inf. Made per device on
# first use.
_ADDENDS: dict[torch.device, torch.Tensor] = {}


def _addends(device: torch.device) -> torch.Tensor:
    table = _ADDENDS.get(device)
    if table is None:
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        table = _ADDENDS[device] = upload(torch.where(bits == 1, 0.0, -torch.inf), device)
    return table


def _add_whole(logits: torch.Tensor, words: Words, rows: Sequence[int]) -> None:
    """Adds 0 or -inf to every value of some rows; one at a time, so that the addends stay in cache.

    A table maps eight bits to eight addends, which costs a tenth of a boolean masked fill.
    """
    covered = min(logits.shape[1], 32 * len(words))
    table = _addends(logits.device).numpy()
    addends = torch.from_numpy(np.take(table, words.view(np.uint8), axis=0, mode="clip")).view(-1)[:covered]
    for row in rows:
        logits[row, :covered] += addends
        logits[row, covered:] += -torch.inf


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return upload(tensor, device) if tensor.device.type == "cpu" else tensor.to(device)
