"""Receipts: what each processor of a request did to its tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(slots=True)
class ProcessorRecord:
    """Counts of what one processor has done to the tokens chosen so far.

    Positions are absolute (prompt + generated).

    Attributes:
        steps_active: Positions at which it asked for an edit.
        tokens_forced: Positions at which it chose the token.
        tokens_masked: Vocabulary entries masked, summed over positions.
        seconds: CPU time spent in it; of a built-in's edits an estimate, from one position in
            `adapters.chain.chain.TIMED_EVERY`.
        rollbacks: Tokens that it took back by rewinding to the positions of these tokens, each of
            which has another one since; None for a processor that does not backtrack.
    """

    name: str
    version: int
    steps_active: int = 0
    tokens_forced: int = 0
    tokens_masked: int = 0
    first_position: int | None = None
    last_position: int | None = None
    seconds: float = 0.0
    rollbacks: int | None = None
    _positions: array[int] = field(default_factory=lambda: array("q"), init=False, repr=False)
    _amounts: array[int] = field(
        default_factory=lambda: array("q"), init=False, repr=False
    )  # 2 * masked + forced, per position
    _rewound: array[int] = field(
        default_factory=lambda: array("q"), init=False, repr=False
    )  # positions of what `rollbacks` counts, in order

    def add(self, position: int, kind: str, masked: int) -> None:
        """Count one step; ``kind`` is ``biased``, ``masked``, ``forced`` or ``shaped``."""
        self.steps_active += 1
        self.tokens_forced += kind == "forced"
        self.tokens_masked += masked
        if self.first_position is None:
            self.first_position = position
        self.last_position = position
        self._positions.append(position)
        self._amounts.append(2 * masked + (kind == "forced"))

    def add_rollbacks(self, position: int, number: int) -> None:
        """Count tokens that it took back at ``position``, which has another one now."""
        self.rollbacks = (self.rollbacks or 0) + number
        self._rewound.extend([position] * number)

    def before(self, position: int) -> ProcessorRecord:
        """A record of its own of what was counted before ``position``."""
        positions, amounts, rewound = self._positions[:], self._amounts[:], self._rewound[:]
        count = min(bisect_left(positions, position), len(amounts))  # a thread may be adding one
        found = ProcessorRecord(self.name, self.version)
        found._positions, found._amounts = positions[:count], amounts[:count]
        found._rewound = rewound[: bisect_left(rewound, position)]
        found.rollbacks = None if self.rollbacks is None else len(found._rewound)
        found.steps_active = count
        if count:
            counted = np.frombuffer(found._amounts, dtype=np.int64)
            found.tokens_forced, found.tokens_masked = int((counted & 1).sum()), int((counted >> 1).sum())
            found.first_position, found.last_position = positions[0], positions[count - 1]
        return found

    def rewind(self, position: int) -> None:
        """Subtract what was counted from ``position`` on: its tokens were rewound."""
        positions, rewound = self._positions, self._rewound
        while rewound and rewound[-1] >= position:
            rewound.pop()
        self.rollbacks = None if self.rollbacks is None else len(rewound)
        while positions and positions[-1] >= position:
            positions.pop()
            masked, forced = divmod(self._amounts.pop(), 2)
            self.steps_active -= 1
            self.tokens_forced -= forced
            self.tokens_masked -= masked
            self.last_position = positions[-1] if positions else None
            self.first_position = self.first_position if positions else None

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name,
            "version": self.version,
            "steps_active": self.steps_active,
            "tokens_forced": self.tokens_forced,
            "tokens_masked": self.tokens_masked,
            "first_position": self.first_position,
            "last_position": self.last_position,
        }
        if self.rollbacks is not None:
            data["rollbacks"] = self.rollbacks
        return data


MAX_ATTRIBUTED = 65_536
"""Most entries of an attribution: about 6 MB of JSON, which is one message to the frontend (32
MiB at most).
"""


@dataclass(slots=True)
class Receipt:
    """Record of what the processors of one choice did, cumulative over its chunks.

    Attributes:
        mode: Way in which the request ran; ``migrated`` is reported with its replayed tokens.
        replayed: Tokens that were generated before a migration, or on a prefill worker.
        seed: Seed of the sampler's and the processors' random numbers, 64 bits.
        numerics: ``exact`` if the engine is batch-invariant, else ``fast``; the engine says so.
        attribution: Keep what each processor did to each token, in `tokens`.
        tokens: ``(position, token id, processor, what it did)``, in the order of the positions, the
            first `MAX_ATTRIBUTED` of them.
        logprobs: ``(position, log probability)`` of tokens in what they were sampled from, after
            all controls, in the order of the positions, the first `MAX_ATTRIBUTED` of them; of
            requests that report log probabilities, which are the model's own.
    """

    records: list[ProcessorRecord]
    attribution: bool = False
    mode: str = "aggregated"
    prompt_length: int = 0
    replayed: int = 0
    numerics: str = "fast"
    seed: int = 0
    tokens: list[tuple[int, int, str, str]] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)

    def begin(self, mode: str, prompt_length: int, replayed: int) -> None:
        """Start after a prompt; ``replayed`` tokens were generated before a migration."""
        self.mode = mode
        self.prompt_length = prompt_length
        self.replayed = replayed
        self.rewind(0)

    def rewind(self, position: int) -> None:
        """Subtract what was counted from ``position`` on."""
        for record in self.records:
            record.rewind(position)
        while self.tokens and self.tokens[-1][0] >= position:
            self.tokens.pop()
        while self.logprobs and self.logprobs[-1][0] >= position:
            self.logprobs.pop()

    def add(self, record: ProcessorRecord, position: int, token_id: int, kind: str, masked: int) -> None:
        """Count what the processor of ``record`` did to the token at ``position``."""
        record.add(position, kind, masked)
        if self.attribution and len(self.tokens) < MAX_ATTRIBUTED:
            self.tokens.append((position, token_id, record.name, kind))

    def before(self, position: int) -> Receipt:
        """The receipt as it was when the token at ``position`` was about to be sampled.

        Any thread: what was counted there does not change, unless ``position`` is rewound.
        """
        records = [record.before(position) for record in self.records]
        tokens = [one for one in self.tokens[:] if one[0] < position]
        logprobs = [one for one in self.logprobs[:] if one[0] < position]
        return replace(self, records=records, tokens=tokens, logprobs=logprobs)

    def add_logprob(self, position: int, logprob: float) -> None:
        """Note the processed log probability of the token at `position`."""
        if len(self.logprobs) < MAX_ATTRIBUTED:
            self.logprobs.append((position, logprob))

    def as_json(self, *, attribution: bool = True) -> dict[str, Any]:
        """JSON data, which does not change afterwards; the key order is stable.

        Args:
            attribution: Include the attribution, if it is kept: all of it, so that only one of an
                answer's chunks, the last one, can have it without sending its beginning again and
                again.
        """
        data: dict[str, Any] = {
            "version": 1,
            "mode": f"migrated at {self.replayed}" if self.mode == "migrated" else self.mode,
            "numerics": self.numerics,
            "seed": self.seed,
            "prompt_length": self.prompt_length,
            "replayed_tokens": self.replayed,
            "processors": [record.as_json() for record in self.records],
        }
        if self.attribution and attribution:
            names = ("position", "token_id", "processor", "did")
            data["tokens"] = [dict(zip(names, each, strict=True)) for each in self.tokens]
            left_out = sum(record.steps_active for record in self.records) - len(self.tokens)
            if left_out:
                data["tokens_left_out"] = left_out
            if self.logprobs:
                data["processed_logprobs"] = [
                    {"position": position, "logprob": logprob} for position, logprob in self.logprobs
                ]
        return data
