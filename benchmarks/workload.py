"""Tasks of the decoding benchmark, and the protocol of peers in other processes.

Standard library only: peers import this in their own environments.

A peer is a process that reads one `Task` per line and answers each with one `Reply` per line; when
it is ready it writes an empty `Reply`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

VOCABULARY = 32_000
LONGEST = 1280
"""Tokens of the longest prompt and answer together, rounded up."""
MOST_ROWS = 32
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
EACH = (
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.6, "top_k": 100, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.85},
)
"""What requests with controls of their own ask for, in turn."""


@dataclass(frozen=True, slots=True)
class Task:
    """`rows` random prompts of `prompt` tokens, each to be answered with `new` tokens.

    Attributes:
        controls: ``greedy``; ``sampled``, which is `SAMPLED` for every row; or ``each``, which is
            `EACH` in turn.
    """

    rows: int
    prompt: int
    new: int
    controls: str
    seed: int

    def prompts(self) -> list[list[int]]:
        """The prompts, which no two tasks have in common: nobody finds them in a cache."""
        source = random.Random(repr(self))
        return [[source.randrange(VOCABULARY) for _ in range(self.prompt)] for _ in range(self.rows)]

    def controls_of(self, row: int) -> dict[str, float]:
        """Temperature and truncation of a row; empty if it is greedy."""
        if self.controls == "greedy":
            return {}
        return dict(SAMPLED if self.controls == "sampled" else EACH[row % len(EACH)])


@dataclass(slots=True)
class Reply:
    """What became of a task.

    Attributes:
        num_tokens: New tokens, of all rows together.
        first: The first new token of each row.
        decode_s: The time in which every row was decoding, seconds, where it is known.
        decode_tokens: New tokens of that time.
    """

    num_tokens: int = 0
    first: list[int] = field(default_factory=list)
    decode_s: float = 0.0
    decode_tokens: int = 0


def serve(start: Callable[[], Callable[[Task], Reply]]) -> None:
    """Answer tasks until standard input ends, by `start`; prints go to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer = start()
    print(json.dumps(asdict(Reply())), file=replies)
    for line in sys.stdin:
        print(json.dumps(asdict(answer(Task(**json.loads(line))))), file=replies)


class Stopwatch:
    """Notes the time after each step in which every row got a token."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._times: list[float] = []

    def tick(self) -> None:
        """A step has ended."""
        self._times.append(time.perf_counter())

    def fill(self, reply: Reply) -> Reply:
        """The reply, with what was noted."""
        if len(self._times) > 1:
            reply.decode_s = self._times[-1] - self._times[0]
            reply.decode_tokens = self._rows * (len(self._times) - 1)
        return reply
