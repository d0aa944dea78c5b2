"""Batch packing: a step's tokens in one list, row after row, with page tables and slot mapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engines.embedded.kv_cache import SequenceSlice
from worker.engines.embedded.plan import Plan, Request


@dataclass(slots=True)
class Batch:
    """Parallel lists over the tokens of a step, decode rows first, and its rows.

    Attributes:
        ids: Token ids.
        positions: In their sequences.
        pages: Slot mapping: the page to which a token's KV is written.
        slots: Slot mapping: the slot within the page.
        sequences: The rows, each with its page table.
        new_pages: Pages that are written from their first slot on.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sequences: list[SequenceSlice] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)


def pack(plan: Plan, page_size: int) -> Batch:
    """The batch of `plan`, for a KV store with `page_size` tokens per page."""
    batch = Batch()
    for request, tokens in plan.decode_tokens():
        _append(batch, request, len(request.tokens) - 1, tokens, page_size)
    for chunk in plan.chunks:
        _append(batch, chunk.request, chunk.start, chunk.request.tokens[chunk.start : chunk.stop], page_size)
    return batch


def _append(batch: Batch, request: Request, start: int, tokens: Sequence[int], size: int) -> None:
    stop = start + len(tokens)
    batch.ids += tokens
    batch.positions += range(start, stop)
    batch.sequences.append(SequenceSlice(request.pages, start, stop))
    while start < stop:
        page, slot = request.pages[start // size], start % size
        end = min(stop, start - slot + size)
        batch.pages += [page] * (end - start)
        batch.slots += range(slot, slot + end - start)
        if slot == 0:
            batch.new_pages.append(page)
        start = end
