"""Tasks of the decoding benchmark, and the protocol of peers in other processes.

Standard library only: peers import this in their own environments.

A peer is a process that reads one task per line and answers each with one reply per line; when it
is ready it writes an empty reply.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

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


def serve(start: Callable[[], Callable[[Any], Any]], kind: Callable[..., Any] = Task) -> None:
    """Answer tasks of a kind until standard input ends, by `start`; prints go to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer = start()
    print("{}", file=replies)
    for line in sys.stdin:
        print(json.dumps(asdict(answer(kind(**json.loads(line))))), file=replies)


@contextlib.contextmanager
def peer(
    python: Path,
    checkpoint: Path,
    threads: int,
    script: str,
    *arguments: str,
    kind: Callable[..., Any] = Reply,
    **environ: str,
) -> Iterator[Callable[[Any], Any]]:
    """A peer in its own process, which replies with a `kind`. OpenMP waits as by default, or by
    `environ`.
    """
    command = [str(python), str(HERE / script), str(checkpoint), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
    environment.pop("GOMP_SPINCOUNT", None)  # which is what this process set for itself
    environment |= environ
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        sink, source = process.stdin, process.stdout
        assert sink is not None
        assert source is not None

        def reply() -> Any:
            line = source.readline()
            if not line:
                raise SystemExit(f"{script} ended early; its errors are above")
            return kind(**json.loads(line))

        def answer(task: Any) -> Any:
            print(json.dumps(asdict(task)), file=sink, flush=True)
            return reply()

        reply()
        try:
            yield answer
        finally:
            sink.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


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
