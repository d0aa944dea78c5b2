"""The rows of vLLM's second model runner: by slot, in another order at each step, one per draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.vllm.requests import Params
from adapters.vllm.rows import Builder, Row, RowEditor, end, follow, rows_of


@dataclass(frozen=True, slots=True)
class _LogitsRow:
    """A row of logits.

    Attributes:
        index: Index in the logits.
        position: Absolute index of the token that was fed for it; its own token is the next one.
        fed: That token.
    """

    index: int
    position: int
    fed: int


class Slots:
    """The requests by slot. Speculative drafts are planned one after the other, and taken back.

    Args:
        states: vLLM's ``LogitsProcRequestState``.
        builder: Makes the rows of requests.
        editor: Applies chains to logits.
    """

    def __init__(self, states: Any, builder: Builder, editor: RowEditor) -> None:
        self._states, self._builder, self._editor = states, builder, editor
        self._rows: dict[int, Row] = {}

    def add(self, slot: int, params: Params) -> bool:
        """Begin a request in a slot, or go on with one; whether it has processors."""
        prefilled = int(self._states.prefill_len.np[slot])
        is_resumed = prefilled > int(self._states.prompt_len.np[slot])

        def is_same(row: Row) -> bool:
            is_here = row.chain is not None and row.chain.position == prefilled
            return is_resumed and is_here and not row.has_failed and row not in self._rows.values()

        row = next(filter(is_same, rows_of(params)), None) or self._builder.new_row(params)
        if row is None:
            self._rows.pop(slot, None)
            return False
        self._rows[slot] = row
        return True

    def apply(self, logits: torch.Tensor, ctx: Any) -> None:
        """Apply the chains to ``logits`` (float32 ``[rows, V]``), in place.

        Args:
            logits: Logits of this step.
            ctx: vLLM's ``LogitsContext``.
        """
        if not any(int(slot) in self._rows for slot in ctx.idx_mapping_np):
            return
        columns = torch.stack((ctx.expanded_idx_mapping.long(), ctx.pos.long(), ctx.input_ids.long())).tolist()
        by_slot: dict[int, list[_LogitsRow]] = {}
        for index, (slot, position, fed) in enumerate(zip(*columns, strict=True)):
            if slot in self._rows:
                by_slot.setdefault(slot, []).append(_LogitsRow(index, position, fed))
        standing: list[_Standing] = []
        for slot, rows in by_slot.items():
            found = self._standing(slot, sorted(rows, key=lambda row: row.position))
            if found is not None:
                standing.append(found)
            elif self._rows[slot].has_failed:
                for each in rows:
                    end(logits, each.index, self._rows[slot])
        self._apply_drafts(logits, standing)

    def _standing(self, slot: int, rows: list[_LogitsRow]) -> _Standing | None:
        """A request with its chain after its tokens; None in the prompt, or if it has failed."""
        row, first = self._rows[slot], rows[0]
        if row.has_failed:
            return None
        prompt_length = int(self._states.prompt_len.np[slot])
        if first.position + 1 < prompt_length:  # a chunk of the prompt: its token is dropped
            return None
        try:
            chain = self._followed(slot, row, prompt_length, first)
        except ProcessorFailed as error:
            row.fail(error)
            return None
        return _Standing(row, chain, rows)

    def _followed(self, slot: int, row: Row, prompt_length: int, first: _LogitsRow) -> ProcessorChain:
        """The chain at the first row's token. All tokens are read where more than one is new."""
        chain = row.chain_after(self._tokens(slot, prompt_length) if row.chain is None else ())
        end_of_history = first.position + 1
        if end_of_history - chain.position > 1:
            follow(chain, end_of_history, self._tokens(slot, end_of_history).__getitem__)
        else:
            follow(chain, end_of_history, lambda position: first.fed)
        return chain

    def _tokens(self, slot: int, count: int) -> list[int]:
        found: list[int] = self._states.all_token_ids.gpu[slot, :count].tolist()
        return found

    def _apply_drafts(self, logits: torch.Tensor, standing: Sequence[_Standing]) -> None:
        """Apply the first rows of all requests, then those after their first drafts, and so on."""
        depth = 0
        live = list(standing)
        bases = [(each.chain, each.chain.position) for each in standing]
        while live:
            self._editor.apply(logits, [(each.rows[depth].index, each.row, each.chain) for each in live])
            depth += 1
            live = [each for each in live if each.takes_draft(depth, logits)]
        for each in standing:
            if each.row.has_failed:
                for row in each.rows:
                    end(logits, row.index, each.row)
        for chain, position in bases:
            if chain.position > position:
                chain.rewind(position)


@dataclass(frozen=True, slots=True)
class _Standing:
    """A request whose chain stands at its first row of logits."""

    row: Row
    chain: ProcessorChain
    rows: list[_LogitsRow]

    def takes_draft(self, depth: int, logits: torch.Tensor) -> bool:
        """Move the chain to row ``depth``, if there is one and its draft can have been sampled."""
        if self.row.has_failed or depth == len(self.rows):
            return False
        draft = self.rows[depth].fed
        if float(logits[self.rows[depth - 1].index, draft]) == -torch.inf:
            return False
        self.chain.accept(draft, self.chain.position)
        return True
