"""CUDA graphs of decode steps: a step of few rows is hundreds of small kernels, whose launches one
by one take longer than they compute.

A graph is captured when its first step comes. It computes a number of rows, the next larger one of
`ROWS`, over splits of the keys, the next power of two; rows of padding read and write no KV. The
kernels are those of any other step, so that a row's bits are the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from worker.engines.embedded import cuda
from worker.engines.embedded.attention import AttentionStep
from worker.engines.embedded.attention.triton_backend import TritonStep
from worker.engines.embedded.kv_cache import KvStore
from worker.engines.embedded.model.batch_packing import Batch

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, *range(16, 129, 16), 192, 256, 384, 512)
"""Numbers of rows that graphs are captured for; steps of more run without."""

_NUMBERS_OF_A_ROW = 7
"""Id, position, page, slot and an entry of `cuda.Sequences.singles`."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of a decode step, valid until the next one.

    Attributes:
        hidden: Last hidden states ``[n, hidden]``.
        sum: Sum of them, and of those of padding.
        logits: float32 ``[n, vocab_size]``.
    """

    hidden: torch.Tensor
    sum: torch.Tensor
    logits: torch.Tensor


Compute = Callable[[torch.Tensor, torch.Tensor, AttentionStep], tuple[torch.Tensor, torch.Tensor]]
"""Last hidden states and logits of ids, positions and their attention."""


class _Graph:
    """The graph of `rows` rows whose keys are in `splits` splits at most."""

    def __init__(self, rows: int, splits: int, store: KvStore, compute: Compute, pool: Any) -> None:
        page_size, device = store.keys[0].shape[2], store.keys[0].device
        self._rows, self._pages = rows, -(-splits * cuda.SPLIT // page_size)
        self._host = torch.zeros(rows * (_NUMBERS_OF_A_ROW + self._pages), dtype=torch.int32, pin_memory=True)
        self._given = torch.zeros_like(self._host, device=device)
        numbers, table = self._given[: rows * _NUMBERS_OF_A_ROW], self._given[rows * _NUMBERS_OF_A_ROW :]
        ids, positions = numbers[: 2 * rows].view(2, rows)
        nothing = numbers.new_empty(0, 4)
        sequences = cuda.Sequences(table.view(rows, -1), numbers[4 * rows :].view(rows, 3), nothing, splits)
        step = TritonStep(store, (), numbers[2 * rows : 4 * rows].view(2, rows), sequences)
        self._fill(Batch())
        self._given.copy_(self._host)
        compute(ids, positions, step)  # compiles kernels, which a capture cannot
        self._graph = torch.cuda.CUDAGraph()
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # torch.cuda.graph collects garbage first, which takes longer than a capture
            self._graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may transfer KV
            try:
                hidden, logits = compute(ids, positions, step)
                self._results = Computed(hidden, hidden.sum(dtype=torch.float32), logits)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def _fill(self, batch: Batch) -> None:
        rows, count = self._rows, len(batch.ids)
        host = self._host.numpy()
        numbers, singles = host[: 4 * rows].reshape(4, rows), host[4 * rows : 7 * rows].reshape(rows, 3)
        for row, given in enumerate((batch.ids, batch.positions, batch.pages, batch.slots)):
            numbers[row, :count] = given
        numbers[:2, count:], numbers[2, count:], numbers[3, count:] = 0, -1, 0
        singles[:, 0] = singles[:, 1] = np.arange(rows)
        singles[:count, 2] = numbers[1, :count] + 1
        singles[count:, 2] = 0
        table = host[_NUMBERS_OF_A_ROW * rows :].reshape(rows, -1)
        for row, sequence in enumerate(batch.sequences):
            pages = sequence.page_table[: self._pages]
            table[row, : len(pages)] = pages

    def replay(self, batch: Batch) -> Computed:
        """Compute the step of `batch`."""
        self._fill(batch)
        self._given.copy_(self._host, non_blocking=True)
        self._graph.replay()
        count, results = len(batch.ids), self._results
        return Computed(results.hidden[:count], results.sum, results.logits[:count])


class DecodeGraphs:
    """The graphs of a network over a KV store.

    Args:
        store: The KV store.
        compute: Function that is captured.
    """

    def __init__(self, store: KvStore, compute: Compute) -> None:
        self._store, self._compute = store, compute
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._is_usable = True
        self._pool = torch.cuda.graph_pool_handle()

    def compute(self, batch: Batch) -> Computed | None:
        """The results of a step of one token per row; None for a step that no graph computes."""
        rows = next((each for each in ROWS if each >= len(batch.ids)), None)
        if rows is None or not self._is_usable or len(batch.sequences) != len(batch.ids):
            return None
        splits = -(-(max(batch.positions) + 1) // cuda.SPLIT)
        key = rows, 1 << (splits - 1).bit_length()
        graph = self._graphs.get(key)
        if graph is None:
            started_s = time.perf_counter()
            try:
                graph = self._graphs[key] = _Graph(*key, self._store, self._compute, self._pool)
            except RuntimeError as error:  # a kernel that reads its results on the host, or no memory
                self._is_usable = False
                self._graphs.clear()  # with the memory of their results, of which there may be too little
                logger.warning("decode steps run without CUDA graphs: %s", str(error).split("\n", 1)[0])
                return None
            logger.info("captured a graph of %d rows over %d splits in %.2f s", *key, time.perf_counter() - started_s)
        return graph.replay(batch)
