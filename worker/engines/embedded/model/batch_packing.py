"""Batch packing: a step's tokens in one list, row after row, with page tables and slot mapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.kv_cache import SequenceSlice
from worker.engines.embedded.plan import Plan


@dataclass(slots=True)
class Batch:
    """Parallel lists over the tokens of a step, decode rows first, and its rows.

    Attributes:
        ids: Token ids.
        positions: Positions of the tokens in their sequences.
        pages: Slot mapping: the page to which a token's KV is written.
        slots: Slot mapping: the slot within the page.
        sequences: The rows, each with its page table.
        new_pages: Pages that are written from their first slot on.
        adapted: First token, number of tokens and adapter of the rows that have a LoRA adapter.
        read_rows: Tokens whose last hidden states are read, rising; None for all.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sequences: list[SequenceSlice] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    adapted: list[tuple[int, int, LoadedAdapter]] = field(default_factory=list)
    read_rows: list[int] | None = None

    def append(
        self,
        pages: Sequence[int],
        start: int,
        tokens: Sequence[int],
        page_size: int,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        """Append a row: `tokens` of a sequence with this page table, from position `start` on."""
        stop = start + len(tokens)
        if adapter is not None:
            self.adapted.append((len(self.ids), len(tokens), adapter))
        self.ids += tokens
        self.positions += range(start, stop)
        self.sequences.append(SequenceSlice(pages, start, stop))
        while start < stop:
            page, slot = pages[start // page_size], start % page_size
            end = min(stop, start - slot + page_size)
            self.pages += [page] * (end - start)
            self.slots += range(slot, slot + end - start)
            if slot == 0:
                self.new_pages.append(page)
            start = end


def pack(plan: Plan, page_size: int) -> Batch:
    """The batch of `plan`, for a KV store with `page_size` tokens per page."""
    batch = Batch(read_rows=plan.logit_rows() if plan.chunks and not plan.scored else None)
    for request, tokens in plan.decode_tokens():
        batch.append(request.pages, len(request.tokens) - 1, tokens, page_size, request.adapter)
    for chunk in plan.chunks:
        request, tokens = chunk.request, chunk.request.tokens[chunk.start : chunk.stop]
        batch.append(request.pages, chunk.start, tokens, page_size, request.adapter)
    return batch
