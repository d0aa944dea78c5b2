"""Split-KV planning: the calls of torch's kernels by which a step attends.

Splits are pages. Those that lie at a constant distance are one call over a strided view of the
store: nothing is gathered, and the number of calls depends on how scattered the pages are, not on
the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from worker.engines.embedded.attention.online_softmax import CallShapes, TorchKernel
from worker.engines.embedded.kv_cache import CodeRows, SequenceSlice

_Pair = tuple[int, int, int, int, int]
"""Page, token, column of the table (-1 for a result that is not used), first and last + 1 key that
the token attends to.
"""

_BYTES_PER_CALL = 2**20
"""Keys and values that are read in about the time that a call takes besides reading."""

_BYTES_OF_SCORES = 2**23
"""Scores of one call over several pages of a prompt at most: few enough to stay in the processor's
caches.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """Partial attention of some entries of `tokens` query tokens each.

    Entry i reads the first `length` keys of page ``first + i * stride``. `mask` is additive,
    ``[entries, 1, tokens * group, length]``, or None if every key is attended to.
    """

    kernel: TorchKernel
    first: int
    stride: int
    entries: int
    tokens: int
    length: int
    mask: torch.Tensor | None

    def view(self, store: torch.Tensor, code_rows: CodeRows | None) -> torch.Tensor:
        """``[entries, num_kv_heads, length, head_dim]`` of the store, in place; or
        dequantised.
        """
        stride = self.stride if self.entries > 1 else 0
        pages = store[self.first : self.first + stride * (self.entries - 1) + 1 : stride or 1, :, : self.length]
        if code_rows is not None:
            pages = code_rows.dequantise(pages)
        return pages.expand(self.entries, -1, -1, -1)


@dataclass(frozen=True, slots=True)
class SplitKvPlan:
    """The calls of a step for one window, and which of their partial results are a token's.

    Attributes:
        calls: Calls in the order of their results.
        queries: Query token of each result; None if that is every token in order.
        last: Result of each token's last page; None if that is every result in order.
        split_tokens: Tokens that attend to more than one page, None if there are none.
        splits: Results of each page of those, ascending ``[n, S]``; the last one again where a
            token has fewer than S.
        absent: Mask of `splits`: 0, or -inf where a token has no such page: ``[n, S, 1]``.
    """

    calls: list[Call]
    queries: torch.Tensor | None
    last: torch.Tensor | None
    split_tokens: torch.Tensor | None
    splits: torch.Tensor
    absent: torch.Tensor


class _Planner:
    """Makes a `SplitKvPlan`."""

    def __init__(
        self,
        sequences: Sequence[SequenceSlice],
        keys: torch.Tensor,
        window: int,
        query: torch.Tensor,
        may_flash: bool,
        shapes: CallShapes,
    ) -> None:
        self._sequences = sequences
        self._kv_heads, self._size = keys.shape[1:3]
        self._page_bytes = 2 * keys[0].nbytes
        self._window = window
        self._group = query.shape[1] // self._kv_heads
        self._like = query
        self._may_flash = may_flash and query.device.type == "cpu"
        self._shapes = shapes
        self._calls: list[Call] = []
        self._queries: list[torch.Tensor] = []
        self._results = 0  # of the calls so far
        self._table: torch.Tensor = torch.empty(0)  # [T, S]: result of each page, -1 where a token does not attend

    def plan(self) -> SplitKvPlan:
        count = sum(sequence.stop - sequence.start for sequence in self._sequences)
        depth = max(len(self._visible(sequence)) for sequence in self._sequences)
        self._table = torch.full((count, depth), -1)
        self._plan_single_tokens()
        token = 0
        for sequence in self._sequences:
            if sequence.stop - sequence.start > 1:
                self._plan_many_tokens(sequence, token)
            token += sequence.stop - sequence.start
        return self._finish()

    def _visible(self, sequence: SequenceSlice) -> range:
        """Indices into its page table of the pages that any token of `sequence` attends to."""
        first = max(0, sequence.start - self._window + 1) if self._window else 0
        return range(first // self._size, (sequence.stop - 1) // self._size + 1)

    def _plan_single_tokens(self) -> None:
        pairs: list[_Pair] = []
        token = 0
        for sequence in self._sequences:
            if sequence.stop - sequence.start == 1:
                lowest = max(0, sequence.stop - self._window) if self._window else 0
                for column, index in enumerate(self._visible(sequence)):
                    begin = index * self._size
                    visible = max(0, lowest - begin), min(self._size, sequence.stop - begin)
                    pairs.append((sequence.page_table[index], token, column, *visible))
            token += sequence.stop - sequence.start
        if not pairs:
            return
        pairs = self._bridge(sorted(pairs))
        _, tokens, columns, begins, ends = torch.tensor(pairs).unbind(1)
        for start, stop, stride in _runs([pair[0] for pair in pairs]):
            # rows that share a page are the query tokens of one entry, so that its keys are read
            # once
            chosen = _tiles(torch.arange(start, stop), 1 if stride else self._shapes.tokens)
            used = torch.arange(start, stop)[columns[start:stop] >= 0]
            self._table[tokens[used], columns[used]] = used + (self._results - start)
            self._call(pairs[start][0], stride, tokens[chosen], begins[chosen], ends[chosen])

    def _bridge(self, pairs: list[_Pair]) -> list[_Pair]:
        """`pairs` with unused ones in the gaps between pages that cost less than one more call.

        Scattered pages would take many calls, and reading a few pages too many costs little.
        """
        most = _BYTES_PER_CALL // self._page_bytes
        if not most or sum(1 for _ in _runs([pair[0] for pair in pairs])) <= 2:
            return pairs
        bridged = [pairs[0]]
        for before, pair in pairwise(pairs):
            if pair[0] - before[0] <= most + 1:
                bridged += [(page, pair[1], -1, 0, self._size) for page in range(before[0] + 1, pair[0])]
            bridged.append(pair)
        return bridged

    def _plan_many_tokens(self, sequence: SequenceSlice, token: int) -> None:
        visible = self._visible(sequence)
        rows = torch.arange(token, token + sequence.stop - sequence.start)
        num_whole = self._num_whole(sequence, len(rows))
        scores = 4 * len(rows) * self._like.shape[1] * self._size  # bytes of one page's
        for start, stop, stride in _runs([sequence.page_table[index] for index in visible[:num_whole]]):
            most = max(1, _BYTES_OF_SCORES // scores) if stride > 0 else 1
            for first in range(start, stop, most):
                count = min(most, stop - first)
                results = torch.arange(self._results, self._results + count * len(rows)).view(count, -1)
                self._table[rows, first : first + count] = results.T
                self._call(
                    sequence.page_table[visible[first]],
                    stride,
                    rows.expand(count, -1),
                    torch.zeros(count, len(rows), dtype=torch.long),
                    torch.full((count, len(rows)), self._size),
                )
        for column in range(num_whole, len(visible)):
            self._plan_page(sequence, token, column, visible[column])

    def _num_whole(self, sequence: SequenceSlice, tokens: int) -> int:
        """Leading pages to all of whose keys every token attends, where one call may take them."""
        if self._window or self._shapes.tokens not in (None, tokens):
            return 0
        return sequence.start // self._size

    def _plan_page(self, sequence: SequenceSlice, token: int, column: int, index: int) -> None:
        begin = index * self._size
        last = begin + self._size - 1 + self._window if self._window else sequence.stop
        first, stop = max(sequence.start, begin), min(sequence.stop, last)
        rows = torch.arange(token + first - sequence.start, token + stop - sequence.start)
        self._table[rows, column] = torch.arange(self._results, self._results + len(rows))
        padded = _tiles(rows, self._shapes.tokens)
        positions = padded + (sequence.start - token)
        ends = (positions + 1 - begin).clamp_(max=self._size)
        begins = (positions + (1 - self._window - begin)).clamp_(min=0) if self._window else torch.zeros_like(ends)
        self._call(sequence.page_table[index], 0, padded, begins, ends)

    def _call(self, first: int, stride: int, queries: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor) -> None:
        """Add a call: query tokens ``[entries, tokens]`` attend to keys `begins` to `ends`."""
        entries, tokens = queries.shape
        kernel = TorchKernel.BMM
        if self._may_flash:
            kernel = self._shapes.kernel_for(entries, tokens, self._kv_heads, self._like.dtype)
        length = self._shapes.length(kernel, entries, tokens, int(ends.max()), self._size)
        mask = None
        if int(begins.max()) > 0 or int(ends.min()) < length:
            keys = torch.arange(length)
            hidden = (keys < begins[..., None]) | (keys >= ends[..., None])
            dtype = torch.float32 if kernel is TorchKernel.BMM else self._like.dtype
            additive = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            shape = (entries, tokens, self._group, length)
            mask = additive[:, :, None].expand(shape).reshape(entries, 1, tokens * self._group, length)
            mask = mask.to(self._like.device)
        self._calls.append(Call(kernel, first, stride, entries, tokens, length, mask))
        self._queries.append(queries.reshape(-1))
        self._results += queries.numel()

    def _finish(self) -> SplitKvPlan:
        table = self._table
        queries = torch.cat(self._queries)
        last = table.amax(1)
        split_tokens = (table >= 0).sum(1).gt(1).nonzero()[:, 0] if table.shape[1] > 1 else table.new_empty(0)
        splits = table[split_tokens]
        absent = torch.zeros(splits.shape).masked_fill_(splits < 0, -torch.inf)[..., None]
        splits = torch.where(splits < 0, last[split_tokens, None], splits)
        device = self._like.device
        return SplitKvPlan(
            self._calls,
            None if _in_order(queries, len(table)) else queries.to(device),
            None if _in_order(last, self._results) else last.to(device),
            split_tokens.to(device) if len(split_tokens) else None,
            splits.to(device),
            absent.to(device),
        )


def _tiles(rows: torch.Tensor, tile: int | None) -> torch.Tensor:
    """`rows` in tiles ``[n, tile]``, padded with the last row; in one tile if `tile` is None."""
    tile = tile or len(rows)
    return torch.cat((rows, rows[-1:].expand(-len(rows) % tile))).view(-1, tile)


def _in_order(index: torch.Tensor, count: int) -> bool:
    return len(index) == count and torch.equal(index, torch.arange(count))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs ``[start, stop)`` of numbers that rise by a constant stride, and the stride."""
    start = 0
    while start < len(numbers):
        stop = start + 1
        stride = numbers[stop] - numbers[start] if stop < len(numbers) else 0
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == stride:
            stop += 1
        yield start, stop, stride
        start = stop


def plan_split_kv(
    sequences: Sequence[SequenceSlice],
    keys: torch.Tensor,
    window: int,
    query: torch.Tensor,
    may_flash: bool,
    shapes: CallShapes,
) -> SplitKvPlan:
    """Plan the calls of a step whose rows are `sequences`.

    Args:
        sequences: The rows, in the order of their tokens.
        keys: Keys of one layer's store.
        window: Tokens that a token attends to, itself among them; 0 for all before it.
        query: ``[T, H, D]``, of which only the sizes, dtype and device are used.
        may_flash: Whether the fused kernel computes what is asked for, on a CPU.
        shapes: Shapes that calls may have.
    """
    return _Planner(sequences, keys, window, query, may_flash, shapes).plan()
