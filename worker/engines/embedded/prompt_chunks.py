"""Chunked prefill: prompt tokens that a step computes, and how the prompts share them."""

from __future__ import annotations

from collections.abc import Iterator

from worker.engines.embedded.mixed_steps import MixedSteps
from worker.engines.embedded.plan import Chunk, Request
from worker.engines.embedded.queues import Queues

FAIR_CHUNK = 128
"""Tokens of each prompt that a step computes before any prompt gets more; a quarter of the token
budget at most. So short prompts do not wait for the end of a long one.
"""

SHARED_TOKENS = 128
"""Prompt tokens of a step while several clients share the engine."""

SLOWED = 2.5
"""Time of a step that decodes beside a prompt or two, in units of one that only decodes."""

SLOWED_BY_EACH = 1.0
"""The same for each of many prompts: a step takes longer where more clients wait for its prompts,
so that they wait for hardly longer than if nobody decoded.
"""


def prompt_budget(queues: Queues, max_num_batched_tokens: int, mixed: MixedSteps | int | None) -> int:
    """Prompt tokens that the next step may compute.

    While requests decode, a step with prompts takes `SLOWED` times one without them, or that one
    and `SLOWED_BY_EACH` for each prompt where that is more: it bounds the time between two tokens.
    Where several clients share the engine, a step is short even if nobody decodes: another's
    request waits for its end.

    Args:
        queues: The requests.
        max_num_batched_tokens: Tokens of a step at most.
        mixed: Times of steps; or the prompt tokens of a step that also decodes; None for no limit.
    """
    rows = len(queues.decode_rows)
    most = max_num_batched_tokens - rows
    if mixed is None:
        return most
    if queues.turns.is_shared(queues.live):
        most = min(most, SHARED_TOKENS if isinstance(mixed, MixedSteps) else 2 * mixed)
    if not rows or not (queues.prefilling or queues.waiting):
        return most
    if isinstance(mixed, int):
        return min(most, mixed)
    new = min(queues.max_num_seqs - rows - len(queues.prefilling), len(queues.waiting))
    share = max(SLOWED - 1, SLOWED_BY_EACH * (len(queues.prefilling) + new))
    return min(most, mixed.tokens(rows, share))


def cut_chunks(queues: Queues, budget: int) -> tuple[Chunk, ...]:
    """Chunks of the prompts in prefill: a fair one each while `budget` tokens last, the rest to the
    first. Those of companions come last.
    """
    prompts, fair = queues.prefilling, max(fair_chunk(budget), budget // (2 * len(queues.prefilling)))
    if queues.turns.is_shared(queues.live):
        prompts, fair = queues.turns.prompts(queues.prefilling), FAIR_CHUNK
    queues.turns.computed(prompts[0])
    left = budget
    counts = []
    for request in prompts:
        counts.append(min(fair, remaining(request), left))
        left -= counts[-1]
    chunks: list[Chunk] = []
    for request, count in zip(prompts, counts, strict=True):
        more = min(left, remaining(request) - count)
        left -= more
        chunks += _cut(request, count + more)
    return tuple(sorted(chunks, key=lambda chunk: chunk.request.is_companion))


def _cut(request: Request, count: int) -> Iterator[Chunk]:
    """The next `count` tokens of a companion and its owner: with the owner's last one both rows are
    known.
    """
    for sequence in reversed(request.sequences):
        number = min(count, _left(sequence))
        count -= number
        if number:
            yield Chunk(sequence, sequence.num_computed, sequence.num_computed + number)


def fair_chunk(budget: int) -> int:
    """Tokens of each prompt that a step of `budget` computes before any prompt gets more."""
    return min(FAIR_CHUNK, max(1, budget // 4))


def remaining(request: Request) -> int:
    """Tokens of a request, and of its companion, that are still to be computed."""
    return sum(map(_left, request.sequences))


def _left(sequence: Request) -> int:
    return len(sequence.tokens) - sequence.num_computed
