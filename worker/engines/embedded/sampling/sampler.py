"""Logits to tokens in the order law: the chains' edits, temperature, truncation, sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adapters.chain import Planned, apply_edits, apply_late, edit_elements_alone
from adapters.contract import apply_bitmask, bitmask_of, is_allowed
from adapters.devices import launching_on, upload
from adapters.sampling.candidates import highest_ids
from adapters.sampling.whole_row import block_maxima, find_highest, is_searched_fast
from worker.engines import TokenLogprob
from worker.engines.embedded.native import weights
from worker.engines.embedded.native.drawing import Drawer
from worker.engines.embedded.plan import Edits, Plan, Samples
from worker.engines.embedded.sampling.logprobs import (
    as_index,
    attach,
    attach_masses,
    scored,
    token_logprobs,
    weight_logprobs,
)
from worker.engines.embedded.sampling.row_errors import NOT_FINITE, all_forced, forced_rows, unfit
from worker.engines.embedded.sampling.rows import RowTable
from worker.engines.embedded.sampling.truncation import truncate_and_sample


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Samples of a batch, and by row what is known of some.

    Attributes:
        samples: Samples, without the forced tokens.
        forced: Tokens that processors force.
        logprobs: Processed log probabilities of randomly sampled rows, where they are wanted.
        kept: Tokens that could be sampled, packed int32 ``[ceil(V / 32)]``, of the same rows, at
            least where the table has them among its `trained`.
    """

    samples: Samples
    forced: dict[int, int]
    logprobs: dict[int, list[TokenLogprob]]
    kept: dict[int, torch.Tensor]


class Sampler:
    """Samples a token for each row; batch-invariant, and by one rule wherever the logits are.

    On the CPU; but rows on a device that no processor maps as a whole, and whose log probabilities
    nobody wants, stay there.

    Args:
        vocab_size: Width of a row.
        undecodable_ids: Ids that are never sampled.
    """

    def __init__(self, vocab_size: int, undecodable_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._never = as_index(undecodable_ids, vocab_size)
        self._undecodable = frozenset(undecodable_ids)
        self._never_there = torch.tensor(undecodable_ids, dtype=torch.int64)  # the same where the logits are
        self._table = RowTable((), None, vocab_size)
        self._drawer = Drawer(vocab_size)

    def sample(
        self,
        logits: torch.Tensor,
        edits: Edits,
        plan: Plan,
        offsets: Sequence[int] | None = None,
        bitmask: torch.Tensor | None = None,
    ) -> Samples:
        """Tokens for ``plan.sampled``.

        Args:
            logits: ``[n, V]``, one row per request, or as many as `offsets` say. Those in float32
                on a CPU are edited in place, others copied.
            edits: Edits by row.
            plan: Plan whose ``sampled`` requests own the rows.
            offsets: Rows ``offsets[i]`` to ``offsets[i + 1]`` are request i's, at consecutive
                positions from the length of its tokens on; a request may have none.
            bitmask: int32 ``[n, ceil(V / 32)]`` on the CPU, a hard mask on top of the chains'; see
                `adapters.contract.edits.Allow`.

        Raises:
            ValueError: as `RowTable`, or a shape does not fit.
        """
        if not self._table.is_for(plan.sampled, offsets):
            self._table = RowTable(plan.sampled, offsets, self._vocab_size)
        table = self._table
        self._check_shapes(logits, bitmask)
        if not table.owners:
            return Samples([])
        if bitmask is None and not (table.raw or table.processed) and all_forced(edits.planned, len(table.owners)):
            return self.force(edits, len(table.owners))
        logits = logits.float()
        if logits.device.type != "cpu":
            if bitmask is None and not (table.raw or table.processed) and edit_elements_alone(edits.planned):
                with launching_on(logits.device):
                    return self._choose_on_device(logits, table, edits)
            logits = _on_cpu(logits)
        raw = logits.index_select(0, table.raw_index) if table.raw else None
        self._mask_never(logits)
        errors = edits.errors
        if edits.planned or bitmask is not None:
            self._edit(logits, edits.planned, bitmask, errors)
        samples, kept = self._choose(logits, table, edits.planned, errors)
        if raw is not None:
            counts = table.counts(table.raw, frozenset())
            found = token_logprobs(raw, [samples.token_ids[row] for row in table.raw], counts, self._never)
            attach(samples, table.raw, found, frozenset())
            for row, entries in zip(table.raw, found, strict=True):
                if math.isnan(entries[0].logprob):  # perhaps for an id that is masked, and part of the whole
                    samples.errors.setdefault(row, NOT_FINITE)
            if table.trained:
                own = raw[table.trained_of_raw]
                left = own.clone()
                apply_bitmask(left, torch.stack([kept[row] for row in table.trained]))
                attach_masses(samples, table.trained, own, table.temperatures(edits.planned), left)
        return samples

    def _check_shapes(self, logits: torch.Tensor, bitmask: torch.Tensor | None) -> None:
        count, width = len(self._table.owners), self._vocab_size
        if tuple(logits.shape) != (count, width):
            raise ValueError(f"logits must have shape ({count}, {width}), got {tuple(logits.shape)}")
        words = -(-width // 32)
        if bitmask is not None and (tuple(bitmask.shape) != (count, words) or bitmask.dtype != torch.int32):
            found = f"{str(bitmask.dtype).removeprefix('torch.')} {tuple(bitmask.shape)}"
            raise ValueError(f"the bitmask must be int32 of shape ({count}, {words}), got {found}")

    def _edit(
        self, logits: torch.Tensor, planned: list[Planned], bitmask: torch.Tensor | None, errors: dict[int, str]
    ) -> None:
        errors |= {row: str(failure) for row, failure in apply_edits(logits, planned).items()}
        if bitmask is not None:
            apply_bitmask(logits, bitmask)
            masked = (one for one in forced_rows(planned) if not is_allowed(bitmask[one.row], one.token_id))
            errors |= {one.row: one.refuse("the bitmask masks") for one in masked if one.row not in errors}
        failed = apply_late(logits, planned, self._mask_never)
        errors |= {row: str(failure) for row, failure in failed.items()}

    def _mask_never(self, logits: torch.Tensor) -> None:
        if isinstance(self._never, slice):
            logits[:, self._never] = -torch.inf
        elif self._never is not None:
            if self._never_there.device != logits.device:
                self._never_there = upload(self._never, logits.device)
            logits.index_fill_(-1, self._never_there, -torch.inf)

    def _choose_on_device(self, logits: torch.Tensor, table: RowTable, edits: Edits) -> Samples:
        """Tokens of float32 rows that stay where they are: numbers of a few tokens are copied."""
        self._mask_never(logits)
        errors = edits.errors
        if edits.planned:
            self._edit(logits, edits.planned, None, errors)
        if table.random or edits.planned:
            return self._choose(logits, table, edits.planned, errors)[0]
        token_ids = logits.argmax(-1, keepdim=True)  # the first one among equals
        found = torch.cat((token_ids.int(), logits.gather(-1, token_ids).view(torch.int32)), -1).cpu()
        values = found[:, 1].contiguous().view(torch.float32).tolist()
        return Samples(found[:, 0].tolist(), errors | unfit(values, [], errors))

    def _choose(
        self, logits: torch.Tensor, table: RowTable, planned: list[Planned], errors: dict[int, str]
    ) -> tuple[Samples, dict[int, torch.Tensor]]:
        """Sampled tokens, with the log probabilities of ``table.processed``; and for
        ``table.trained`` the tokens that could be sampled, packed int32 ``[ceil(V / 32)]``.
        """
        plain = not (table.random or table.processed or planned)
        if plain and is_searched_fast(logits.shape[1]):
            return _choose_plain(logits, errors), {}
        has_kernels = logits.device.type == "cpu" and weights.are_available()
        chosen = (self._draw if has_kernels else self._search)(logits, table, planned, errors)
        samples, forced = chosen.samples, chosen.forced
        for row, token_id in forced.items():
            samples.token_ids[row] = token_id
        if table.processed:
            self._attach_processed(chosen, logits, table)
        kept = dict(chosen.kept)
        for row in table.trained:
            if row in forced:
                kept[row] = bitmask_of([forced[row]], self._vocab_size)
            elif row not in kept:
                kept[row] = _packed(logits[row] > -torch.inf)
        return samples, kept

    def _attach_processed(self, chosen: _Chosen, logits: torch.Tensor, table: RowTable) -> None:
        """Write the processed log probabilities: of forced rows, and of greedy ones, too."""
        samples, found, counts = chosen.samples, dict(chosen.logprobs), table.processed_counts
        for row in chosen.forced.keys() & counts.keys():
            top = [TokenLogprob(chosen.forced[row], 0.0, 1)]
            found[row] = top + top[: counts[row]]
        rest = [row for row in table.processed if row not in found]  # greedy ones, and those that cannot be sampled
        if rest:
            tokens = [samples.token_ids[row] for row in rest]
            found |= zip(rest, token_logprobs(logits[rest], tokens, [counts[row] for row in rest]), strict=True)
        attach(samples, table.processed, [found[row] for row in table.processed], table.attributed)

    def _draw(self, logits: torch.Tensor, table: RowTable, planned: list[Planned], errors: dict[int, str]) -> _Chosen:
        """Draw tokens with native kernels."""
        numbers = table.uniforms()
        uniforms = [numbers.get(row, 0.0) for row in range(len(logits))]
        drawn = self._drawer.draw(logits, table.columns, uniforms, table.drawn_counts, keeps=bool(table.trained))
        samples = Samples(drawn.ids, errors)
        forced, unfit_rows = self._force_and_check(samples, table, planned, drawn.highest)
        rows = [row for row in table.processed if row in table.controls and row not in unfit_rows]
        logprobs = {row: scored(drawn.ids[row], drawn.scores[row]) for row in rows}
        kept = {} if drawn.kept is None else {row: drawn.kept[row] for row in rows}
        return _Chosen(samples, forced, logprobs, kept)

    def _search(self, logits: torch.Tensor, table: RowTable, planned: list[Planned], errors: dict[int, str]) -> _Chosen:
        """Find tokens with torch's kernels, wherever the logits are."""
        maxima = block_maxima(logits)
        samples = Samples([0] * len(table.owners), errors)
        forced, unfit_rows = self._force_and_check(samples, table, planned, maxima.amax(-1).tolist())
        groups = [group.without(unfit_rows) for group in table.groups] if unfit_rows else table.groups
        if table.greedy:
            _take_highest(samples, logits, maxima, table)
        sampled, left = truncate_and_sample(logits, groups, table.uniforms(), maxima, frozenset(table.processed))
        for row, token_id in sampled.items():
            samples.token_ids[row] = token_id
        if not left:
            return _Chosen(samples, forced, {}, {})
        rows, kept = list(left), {row: _packed(left[row] > 0) for row in table.trained if row in left}
        counts = [table.processed_counts[row] for row in rows]
        found = weight_logprobs(torch.stack(list(left.values())), [sampled[row] for row in rows], counts)
        return _Chosen(samples, forced, dict(zip(rows, found, strict=True)), kept)

    def _force_and_check(
        self, samples: Samples, table: RowTable, planned: list[Planned], highest: list[float]
    ) -> tuple[dict[int, int], set[int]]:
        """Set the forced ids, and note why rows cannot be sampled.

        Args:
            samples: Samples of the step, which get ids and errors.
            highest: The highest logit of each row, not divided; NaN if it holds NaN.

        Returns:
            The forced ids by row, and the rows whose highest logit, divided, is not finite.
        """
        forced = self._force(samples, planned)
        highest = table.divided(highest)
        unfit_rows = {row for row, value in enumerate(highest) if not math.isfinite(value)}
        if unfit_rows:
            unread = forced.keys() - {*table.raw, *table.processed}
            samples.errors |= unfit(highest, planned, {**dict.fromkeys(unread, ""), **samples.errors})
        return forced, unfit_rows

    def force(self, edits: Edits, count: int) -> Samples:
        """Tokens of `count` rows that processors force, or that have failed."""
        samples = Samples([0] * count, edits.errors)
        self._force(samples, edits.planned)
        return samples

    def _force(self, samples: Samples, planned: list[Planned]) -> dict[int, int]:
        """Set the forced ids, and return them by row. They need no logits; ids never sampled are
        errors.
        """
        forced: dict[int, int] = {}
        for one in forced_rows(planned):
            if one.row in samples.errors:
                continue
            if one.token_id in self._undecodable:
                samples.errors[one.row] = one.refuse("this model never samples")
            else:
                samples.token_ids[one.row] = forced[one.row] = one.token_id
        return forced


def _packed(kept: torch.Tensor) -> torch.Tensor:
    """The bitmask of bool ``[V]``."""
    return bitmask_of(kept.nonzero()[:, 0].tolist(), len(kept))


def _on_cpu(logits: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, into which a device writes at its full speed."""
    copy = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    return copy.copy_(logits)


def _take_highest(samples: Samples, logits: torch.Tensor, maxima: torch.Tensor, table: RowTable) -> None:
    if not table.random:
        samples.token_ids = highest_ids(logits, maxima).tolist()
        return
    index = upload(table.greedy_index, logits.device)
    token_ids = highest_ids(logits, maxima.index_select(0, index), index).tolist()
    for row, token_id in zip(table.greedy, token_ids, strict=True):
        samples.token_ids[row] = token_id


def _choose_plain(logits: torch.Tensor, errors: dict[int, str]) -> Samples:
    """All-greedy rows without chains: one search, ties to the lowest id."""
    token_ids, values = find_highest(logits)
    if not all(map(math.isfinite, values)):
        errors |= unfit(values, [], errors)
    return Samples(token_ids, errors)
