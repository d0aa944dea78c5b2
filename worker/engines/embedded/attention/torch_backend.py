"""The torch attention backend: split-KV attention with torch's kernels, on CPU and CUDA.

The keys of a token are split at the boundaries of pages, always, and its result is the LSE merge of
one partial attention per page, in ascending order. So it depends on the tokens alone, not on the
page layout, nor on which step computed them, as far as torch's kernels are batch-invariant in the
shapes that they are called with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from worker.engines.embedded.attention.backend import AttentionLayer, AttentionSizes, AttentionStep, RopeTables
from worker.engines.embedded.attention.online_softmax import (
    CallShapes,
    TorchKernel,
    lse_merge,
    partial_attention,
    with_sinks,
)
from worker.engines.embedded.attention.split_kv import SplitKvPlan, plan_split_kv
from worker.engines.embedded.kv_cache import KvStore, SequenceSlice

_PROBED_ENTRIES = 8

_ENTRY_QUERIES = 16
"""Queries in one entry of a fused call at most, as far as the heads that share keys allow."""


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """Implements `AttentionBackend` with torch's kernels.

    Args:
        shapes: Shapes that calls may have; the default is the fastest.
    """

    shapes: CallShapes = field(default_factory=CallShapes)

    kernels = "torch"
    is_batch_invariant = False  # in some shapes on some processors: see `candidates`
    wants_dense_pages = True  # each run of pages at a constant distance is a call
    reads_behind = True

    @classmethod
    def supports(cls, sizes: AttentionSizes) -> bool:
        """All of them, everywhere."""
        return True

    def candidates(self, sizes: AttentionSizes, may_cost: bool) -> Iterator[TorchAttention]:
        """See `AttentionBackend.candidates`; those whose batched GEMMs are not are left out."""
        # torch computes small GEMMs with another kernel, so that those of a single token may need
        # padding to get the bits of large ones
        for query_multiple in (1, 8, 16) if may_cost else (1,):
            for whole_pages in (False, True):
                shapes = CallShapes(TorchKernel.BMM, whole_pages=whole_pages, query_multiple=query_multiple)
                if _are_gemms_invariant(query_multiple, sizes, torch.get_num_threads()):
                    yield TorchAttention(shapes)
        tile = max(1, _ENTRY_QUERIES * sizes.kv_heads // sizes.heads)
        # entries of one size, and aligned: the fused kernel is then always called with one shape
        for tokens in (tile, 1) if may_cost else ():
            yield TorchAttention(CallShapes(TorchKernel.FLASH, tokens, whole_pages=True, query_multiple=8))

    def plan(self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor) -> TorchStep:
        """See `AttentionBackend.plan`."""
        return TorchStep(store, sequences, slot_mapping, self.shapes)


class TorchStep(AttentionStep):
    """A step of torch's kernels; `shapes` as in `TorchAttention`."""

    def __init__(
        self, store: KvStore, sequences: Sequence[SequenceSlice], slot_mapping: torch.Tensor, shapes: CallShapes
    ) -> None:
        super().__init__(store, sequences, slot_mapping)
        self._shapes = shapes
        self._plans: dict[int, SplitKvPlan] = {}

    def attend_qkv(self, layer: AttentionLayer, qkv: torch.Tensor, rope: RopeTables) -> torch.Tensor:
        """See `AttentionStep.attend_qkv`."""
        heads, kv_heads = layer.heads, layer.kv_heads
        rotated, value = qkv[:, :-kv_heads], qkv[:, -kv_heads:]  # queries and keys are rotated at once
        if layer.head_norms is not None:
            query_norm, key_norm, epsilon = layer.head_norms
            query = torch.rms_norm(rotated[:, :heads], query_norm.shape, query_norm, epsilon)
            key = torch.rms_norm(rotated[:, heads:], key_norm.shape, key_norm, epsilon)
            rotated = torch.cat((query, key), 1)
        cosine, sine = rope.for_roll
        rotated = torch.addcmul(rotated * cosine, rotated.roll(qkv.shape[-1] // 2, -1), sine)
        return self.attend(layer.index, rotated[:, :heads], rotated[:, heads:], value, layer.scale, layer.window)

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = self._store.keys[layer], self._store.values[layer]
        plan = self._plans.get(window)
        if plan is None:
            plan = plan_split_kv(self._sequences, keys, window, query, softcap is None, self._shapes)
            self._plans[window] = plan
        if plan.queries is not None:
            query = query.index_select(0, plan.queries)
        outputs, lses = [], []
        wants_lse = plan.split_tokens is not None or sinks is not None
        start = 0
        for call in plan.calls:
            stop = start + call.entries * call.tokens
            output, lse = partial_attention(
                call.kernel,
                query[start:stop],
                call.tokens,
                call.view(keys, self._store.code_rows),
                call.view(values, self._store.code_rows),
                call.mask,
                scale,
                softcap,
                self._shapes.query_multiple,
                wants_lse,
            )
            outputs.append(output)
            if lse is not None:
                lses.append(lse)
            start = stop
        output, lse = _merge(plan, outputs, lses)
        return output if sinks is None or lse is None else with_sinks(output, lse, sinks)


def _merge(
    plan: SplitKvPlan, outputs: list[torch.Tensor], lses: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each token's result ``[T, H, D]`` and LSE ``[T, H]``, from the calls' ``[n, H, D]`` and
    ``[n, H]``; no LSEs where there are none.
    """
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    merged = output if plan.last is None else output.index_select(0, plan.last)
    if not lses:
        return merged, None
    lse = lses[0] if len(lses) == 1 else torch.cat(lses)
    last = lse if plan.last is None else lse.index_select(0, plan.last)
    if plan.split_tokens is None:
        return merged, last
    of_splits, lse_of_splits = lse_merge(output, lse, plan.splits, plan.absent)
    tokens = plan.split_tokens
    return merged.index_copy(0, tokens, of_splits), last.index_copy(0, tokens, lse_of_splits)


@cache
def _are_gemms_invariant(query_multiple: int, sizes: AttentionSizes, num_threads: int) -> bool:
    """Whether a query's two batched GEMMs have the same bits in calls of all shapes.

    Shapes differ in the number of queries, entries and keys. In bfloat16, sums whose terms were
    added in another order nearly always round to the same. So these sums are all 0, and what is
    left of the terms is what was lost in between. `num_threads` is what torch computes with.
    """
    group = sizes.heads // sizes.kv_heads
    numbers = [-(-group * tokens // query_multiple) * query_multiple for tokens in (64, 1, 2, 3, 7, 33)]
    half = sizes.page_size // 2
    head_dim, page_size = sizes.head_dim, sizes.page_size
    for inner, outer in ((head_dim, page_size), (page_size, head_dim), (half, head_dim)):
        queries, keys = _cancelling(_PROBED_ENTRIES * sizes.kv_heads, numbers[0], inner, outer, sizes.dtype)
        if inner == head_dim:
            keys = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as in the KV store
        expected = torch.bmm(queries, keys)
        for entries in (1, 2, _PROBED_ENTRIES):
            matrices = entries * sizes.kv_heads
            for number in numbers:
                found = torch.bmm(queries[:matrices, :number].contiguous(), keys[:matrices])
                if not torch.equal(found, expected[:matrices, :number]):
                    return False
    return True


def _cancelling(
    matrices: int, rows: int, inner: int, outer: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[matrices, rows, inner]`` and ``[matrices, inner, outer]`` with a product of 0 before
    rounding.
    """
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(matrices, rows, inner // 2, generator=generator).to(dtype)
    right = torch.randn(matrices, inner // 2, outer, generator=generator).to(dtype)
    order = torch.randperm(2 * (inner // 2), generator=generator)
    return torch.cat((left, left), 2)[:, :, order].contiguous(), torch.cat((right, -right), 1)[:, order].contiguous()
