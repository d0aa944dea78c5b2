"""The tokens of a step, one row after another, as the model wants them."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.engines.embedded.kv_cache import Span
from worker.engines.embedded.plan import Plan, Request


@dataclass(slots=True)
class Batch:
    """Parallel lists over the tokens of a step, decode rows first, and its rows.

    Attributes:
        ids: Token ids.
        positions: In their sequences.
        segments: Where their KV goes.
        slots: Likewise, within the segment.
        spans: The rows.
        opened: Segments of which the first slot is written.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)


def pack(plan: Plan, segment_size: int) -> Batch:
    """The batch of `plan`, for a KV store with `segment_size` tokens per segment."""
    batch = Batch()
    for request in plan.decode:
        _append(batch, request, len(request.tokens) - 1, len(request.tokens), segment_size)
    for chunk in plan.chunks:
        _append(batch, chunk.request, chunk.start, chunk.stop, segment_size)
    return batch


def _append(batch: Batch, request: Request, start: int, stop: int, size: int) -> None:
    batch.ids += request.tokens[start:stop]
    batch.positions += range(start, stop)
    batch.spans.append(Span(request.segments, start, stop))
    while start < stop:
        segment, slot = request.segments[start // size], start % size
        end = min(stop, start - slot + size)
        batch.segments += [segment] * (end - start)
        batch.slots += range(slot, slot + end - start)
        if slot == 0:
            batch.opened.append(segment)
        start = end
