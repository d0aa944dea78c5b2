"""Sampling on a device: started between logits and tokens, read when they reach the host."""

from __future__ import annotations

import math

import torch

from adapters.chain import Planned
from adapters.devices import upload_ids
from adapters.sampling.prefixes import Select
from adapters.sampling.weights import logarithms, weight_bits
from worker.engines.embedded.host import HostCopy
from worker.engines.embedded.plan import Samples
from worker.engines.embedded.sampling.device_truncation import truncate_and_sample_rows
from worker.engines.embedded.sampling.logprobs import Logprobs, attach
from worker.engines.embedded.sampling.row_errors import forced_rows, unfit
from worker.engines.embedded.sampling.rows import RowTable

_MOST_ROWS = 32
"""Rows whose weights are computed at once: they take ten times the memory of the logits."""


class DeviceStep:
    """The sampling of one step, launched by the constructor without a host synchronisation.

    Args:
        logits: float32 ``[B, V]``, after all edits.
        table: Table of these rows.
        planned: The chains' plans.
        raw: Logits before all edits, of the rows ``table.raw``; None if there are none.
        errors: Rows already known to have failed.
        select: Finds where prefixes end.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        table: RowTable,
        planned: list[Planned],
        raw: torch.Tensor | None,
        errors: dict[int, str],
        select: Select,
    ) -> None:
        logits = logits.contiguous()
        self._table = table
        self._planned = planned
        self._errors = errors
        self._forced = forced_rows(planned)
        highest = logits.amax(-1)
        tokens = logits.argmax(-1) if table.greedy else torch.empty_like(highest, dtype=torch.int64)
        weights = self._sample(logits, highest, tokens, select) if table.random else None
        values = self._force(logits, tokens)
        self._copy = HostCopy(tokens, highest, values)
        self._logprobs: list[tuple[list[int], frozenset[int], Logprobs]] = []
        if raw is not None:
            self._start_logprobs(raw, tokens, table.raw, table.raw_index, frozenset())
        if table.processed:
            index = upload_ids(table.processed, logits.device)
            final = self._distributions(logits, index, weights)
            self._start_logprobs(final, tokens, table.processed, index, table.attributed)

    def collect(self) -> Samples:
        """The tokens and log probabilities; synchronises with the device."""
        tokens, highest, values = (one.tolist() for one in self._copy.wait())
        samples = Samples(tokens, self._errors)
        samples.errors |= unfit(self._table.divided(highest), self._planned, samples.errors)
        for forced, value in zip(self._forced, values, strict=True):
            if forced.row not in samples.errors and value == -math.inf:
                samples.errors[forced.row] = forced.refuse()
        for rows, attributed, logprobs in self._logprobs:
            attach(samples, rows, logprobs.read(), attributed)
        return samples

    def _sample(
        self, logits: torch.Tensor, highest: torch.Tensor, tokens: torch.Tensor, select: Select
    ) -> torch.Tensor | None:
        """Sample into `tokens`; returns the weights of ``processed_rows``, None if none."""
        random = self._table.random_rows
        if random.padded_index is not None:
            logits = logits.index_select(0, random.padded_index)
            highest = highest.index_select(0, random.padded_index)
        uniforms = random.uniforms()
        found, weights = [], []
        for start in range(0, len(logits), _MOST_ROWS):
            part = slice(start, start + _MOST_ROWS)
            columns = random.columns.part(part)
            ids, kept = truncate_and_sample_rows(logits[part], highest[part, None], columns, uniforms[part], select)
            found.append(ids)
            if random.num_processed:
                weights.append(kept)
        tokens.index_copy_(0, random.index, torch.cat(found)[: len(self._table.random)])
        return torch.cat(weights).index_select(0, random.processed_rows) if weights else None

    def _force(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Override tokens by forced ones; returns the logits of the forced tokens."""
        if not self._forced:
            return logits.new_empty(0)
        width = logits.shape[1]
        rows = upload_ids([one.row for one in self._forced], logits.device)
        ids = upload_ids([one.token_id for one in self._forced], logits.device)
        tokens.index_copy_(0, rows, ids)
        return logits.view(-1).index_select(0, rows * width + ids)

    def _distributions(self, logits: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Unnormalised log weights that ``table.processed`` sample from, float64 ``[m, V]``."""
        final = logits.index_select(0, index).double()
        if weights is not None:
            logarithms_ = logarithms(weights, weight_bits(logits.shape[1]))
            final.index_copy_(0, self._table.random_rows.processed_entries, logarithms_)
        forced = {one.row: one.token_id for one in self._forced}
        entries = [(entry, forced[row]) for entry, row in enumerate(self._table.processed) if row in forced]
        if entries:
            final.index_fill_(0, upload_ids([entry for entry, _ in entries], logits.device), -torch.inf)
            flat = [entry * logits.shape[1] + token_id for entry, token_id in entries]
            final.view(-1).index_fill_(0, upload_ids(flat, logits.device), 0.0)
        return final

    def _start_logprobs(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: list[int],
        index: torch.Tensor,
        attributed: frozenset[int],
    ) -> None:
        counts = self._table.counts(rows, attributed)
        self._logprobs.append((rows, attributed, Logprobs(logits, tokens.index_select(0, index), counts)))
