"""The rows of vLLM's second model runner: by slot, in another order at each step, one per draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.vllm.requests import Params
from adapters.vllm.rows import MakesRows, Row, RowEditor, end, follow, only_row, rows_of


@dataclass(frozen=True, slots=True)
class _LogitsRow:
    """A row of logits.

    Attributes:
        index: Index in the logits.
        position: Absolute index of the token that was fed for it; its own token is the next one.
        fed: The token that was fed.
    """

    index: int
    position: int
    fed: int


@dataclass(slots=True)
class _Slot:
    """A slot in use, or one whose request has left: vLLM does not say so.

    Attributes:
        params: Parameters of the request.
        row: The request's row; None until tokens show which row a resumed request has.
    """

    params: Params
    row: Row | None


class Slots:
    """The requests by slot. Speculative drafts are planned one after the other.

    A chain keeps the drafts that it was planned after; the next step shows which were accepted.

    Args:
        states: vLLM's ``LogitsProcRequestState``.
        builder: Makes the rows of requests.
        editor: Applies chains to logits.
    """

    def __init__(self, states: Any, builder: MakesRows, editor: RowEditor) -> None:
        self._states, self._builder, self._editor = states, builder, editor
        self._slots: dict[int, _Slot] = {}

    def add(self, slot: int, params: Params) -> bool:
        """Begin a request in a slot, or go on with one; whether it has processors."""
        left = self._slots.pop(slot, None)
        if left is not None and left.row is not None:
            left.row.settle()
        is_resumed = int(self._states.prefill_len.np[slot]) > int(self._states.prompt_len.np[slot])
        if is_resumed and rows_of(params):
            self._slots[slot] = _Slot(params, None)  # its tokens are on the device at its first step
            return True
        row = self._builder.new_row(params, is_resumed=is_resumed)
        if row is not None:
            self._slots[slot] = _Slot(params, row)
        return row is not None

    def apply(self, logits: torch.Tensor, ctx: Any) -> None:
        """Apply the chains to ``logits`` (float32 ``[rows, V]``), in place.

        Args:
            logits: Logits of this step.
            ctx: vLLM's ``LogitsContext``.
        """
        live = {int(slot) for slot in ctx.idx_mapping_np} & self._slots.keys()
        if not live:
            return
        columns = torch.stack((ctx.expanded_idx_mapping.long(), ctx.pos.long(), ctx.input_ids.long())).tolist()
        by_slot: dict[int, list[_LogitsRow]] = {}
        for index, (slot, position, fed) in enumerate(zip(*columns, strict=True)):
            if slot in live:
                by_slot.setdefault(slot, []).append(_LogitsRow(index, position, fed))
        standing: list[_Standing] = []
        for slot, rows in by_slot.items():
            rows.sort(key=lambda row: row.position)
            if rows[0].position + 1 < int(self._states.prefill_len.np[slot]):
                continue  # a chunk of what is computed anew: its token is dropped
            row = self._slots[slot].row or self._resume(slot, rows[0].position + 1, live)
            found = self._standing(slot, row, rows)
            if found is not None:
                standing.append(found)
        self._apply_drafts(logits, standing)
        for slot, rows in by_slot.items():
            ended = self._slots[slot].row
            for each in rows:
                if ended is not None and ended.failed_at is not None and each.position + 1 >= ended.failed_at:
                    end(logits, each.index, ended)

    def _resume(self, slot: int, length: int, live: set[int]) -> Row:
        """The row of a request that goes on, by its tokens: those for several answers share rows.

        A row that another slot holds is taken from it, unless that slot is in this batch: its
        request has left, or has the same tokens and finds an equal row at its next step.
        """
        own, tokens = self._slots[slot], self._tokens(slot, length)
        busy = [self._slots[other].row for other in live]
        fitting = [row for row in rows_of(own.params) if row.fits(tokens) and row not in busy]
        row = only_row(fitting) or self._builder.new_row(own.params)
        assert row is not None  # its first row was made of the same parameters
        for other in self._slots.values():
            if other.row is row:
                other.row = None
        own.row = row
        return row

    def _standing(self, slot: int, row: Row, rows: list[_LogitsRow]) -> _Standing | None:
        """A request with its chain after its tokens; None if it has failed."""
        if row.has_failed(rows[0].position + 1):
            return None
        try:
            return _Standing(row, self._followed(slot, row, rows[0]), rows)
        except ProcessorFailed as error:
            row.fail(error)
            return None

    def _followed(self, slot: int, row: Row, first: _LogitsRow) -> ProcessorChain:
        """The chain at the first row's token. All tokens are read where more than one is new."""
        if row.chain is None:
            row.chain_after(self._tokens(slot, int(self._states.prompt_len.np[slot])))
        length = first.position + 1
        if length - row.num_known > 1:
            return follow(row, length, self._tokens(slot, length).__getitem__)
        return follow(row, length, lambda position: first.fed)

    def _tokens(self, slot: int, count: int) -> list[int]:
        found: list[int] = self._states.all_token_ids.gpu[slot, :count].tolist()
        return found

    def _apply_drafts(self, logits: torch.Tensor, standing: Sequence[_Standing]) -> None:
        """Apply the first rows of all requests, then those after their first drafts, and so on."""
        depth = 0
        live = list(standing)
        while live:
            rows = [(each.rows[depth].index, each.row, each.chain) for each in live]
            self._editor.apply(logits, rows, after_drafts=depth > 0)
            depth += 1
            live = [each for each in live if each.takes_draft(depth, logits)]


@dataclass(frozen=True, slots=True)
class _Standing:
    """A request whose chain stands at its first row of logits."""

    row: Row
    chain: ProcessorChain
    rows: list[_LogitsRow]

    def takes_draft(self, depth: int, logits: torch.Tensor) -> bool:
        """Move the chain to row ``depth``, if there is one and its draft can have been sampled."""
        if self.row.failed_at is not None or self.row.has_ended or depth == len(self.rows):
            return False
        draft, context = self.rows[depth].fed, self.chain.context
        length = self.chain.position + 1 - self.chain.prompt_length
        if draft in context.end_token_ids or length == context.max_tokens:  # the answer ends before that row
            return False
        if float(logits[self.rows[depth - 1].index, draft]) == -torch.inf:
            return False
        self.chain.accept(draft, self.chain.position)
        return True
