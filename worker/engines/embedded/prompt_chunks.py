"""Chunked prefill: prompt tokens that a step computes, and how the prompts share them."""

from __future__ import annotations

from collections.abc import Iterator

from worker.engines.embedded.plan import TILE, Chunk, Request
from worker.engines.embedded.queues import Queues

FAIR_CHUNK = 128
"""Tokens of each prompt that a step computes before any prompt gets more; a quarter of the token
budget at most. So short prompts do not wait for the end of a long one.
"""

SHARED_CHUNKS = 2
"""Prompt tokens of a step while several clients share the engine, in units of ``max_mixed_chunk``.
"""

FEW_ROWS = 16
"""Below this number of decode rows, a step is so short that ``max_mixed_chunk`` prompt tokens take
longer than two steps without them.
"""

LONG_CONTEXT = 1024
"""Position at which attention over the tokens before it makes a prompt token of a small model half
as expensive again.
"""


def prompt_budget(queues: Queues, max_num_batched_tokens: int, max_mixed_chunk: int | None) -> int:
    """Prompt tokens that the next step may compute.

    While requests decode, prompts are to slow them by about two steps and no more, so a mixed batch
    gets `max_mixed_chunk` prompt tokens, corrected for what makes them cheap or dear. Where several
    clients share the engine, a step is short whatever one of them has sent: another's request waits
    for its end.
    """
    rows, chunk, part = len(queues.decode_rows), max_mixed_chunk, 2
    most = max_num_batched_tokens - rows
    if chunk is not None and queues.turns.is_shared(queues.live):
        return min(most, _whole_tiles(SHARED_CHUNKS * chunk + TILE // 2 - 1, rows))
    if chunk is None or not rows:
        return most
    if rows < FEW_ROWS:
        # a step with few rows is short: half a chunk already takes as long as two of them, and the
        # rows themselves count
        chunk, part = max(1, chunk // 2 - rows), 3
    # One chunk for each prompt that a client waits for: with n of them a decoding request waits n
    # times as long, but so would n clients if they had to share one chunk.
    prefilling = queues.prefilling
    new = min(queues.max_num_seqs - rows - len(prefilling), len(queues.waiting))
    wanted = chunk * (len(prefilling) + new)
    # Attention makes tokens deep in a prompt dearer, so there are fewer of them: a third or half
    # less behind LONG_CONTEXT tokens, in proportion before.
    wanted -= sum(chunk * min(one.num_computed, LONG_CONTEXT) // (part * LONG_CONTEXT) for one in prefilling)
    if wanted >= TILE:
        wanted = _whole_tiles(wanted, rows)
    return min(most, wanted)


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


def _whole_tiles(wanted: int, rows: int) -> int:
    """Prompt tokens beside decode rows: GEMMs compute whole tiles, and a started one is paid."""
    return max(1, (rows + wanted + TILE // 2) // TILE * TILE - rows)
