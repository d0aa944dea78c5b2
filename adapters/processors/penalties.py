"""Penalties on tokens that occurred: repetition, frequency, presence; no rescan per step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from adapters.contract import Bias, Context, Edit, ProcessorArgs, Reads, Scale, Stage, SteeringProcessor
from adapters.processors.ngrams import Ids


class Occurrences:
    """Distinct token ids with counts, by first occurrence; the newest can be removed again."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, token_id: int) -> None:
        """Count one more occurrence."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._grow()
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += 1

    def add_distinct(self, token_ids: Ids) -> None:
        """Count one occurrence of each of some distinct ids (int64 ``[n]``) in an empty counter."""
        self._slots = dict(zip(token_ids.tolist(), range(len(token_ids)), strict=True))
        spare = np.zeros(64, dtype=np.int64)
        self._ids = np.concatenate([token_ids, spare])
        self._counts = (np.arange(len(self._ids)) < len(token_ids)).astype(np.float32)

    def remove(self, token_id: int) -> None:
        """Remove the newest occurrence, which was of ``token_id``."""
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        if self._counts[slot] == 0:
            del self._slots[token_id]

    def _grow(self) -> None:
        self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])

    def ids(self) -> torch.Tensor:
        """int64 ``[n]``, a view to which later tokens are appended."""
        return torch.from_numpy(self._ids[: len(self._slots)])

    def scaled_counts(self, factor: float) -> torch.Tensor:
        """float32 ``[n]``: count times ``factor``; a copy, since earlier counts change."""
        return torch.from_numpy(self._counts[: len(self._slots)] * np.float32(factor))


class _Counting(SteeringProcessor):
    """Base of penalties: occurrences, and the edit cached until the next token."""

    stage = Stage.PENALTY
    reads = Reads.GENERATED

    def __init__(self, penalty: float, neutral: float, context: Context) -> None:
        self._penalty = penalty
        self._is_off = penalty == neutral
        self._vocab_size = context.vocabulary.size
        self._seen = Occurrences()
        self._known: Edit | None = None

    def reset(self) -> None:
        self._seen.clear()
        self._known = None

    def advance(self, token_id: int, index: int) -> None:
        self._add(token_id)
        self._known = None

    def _add(self, token_id: int) -> None:
        if 0 <= token_id < self._vocab_size:
            self._seen.add(token_id)

    def retract(self, token_ids: Sequence[int]) -> bool:
        for token_id in reversed(token_ids):
            if 0 <= token_id < self._vocab_size:
                self._seen.remove(token_id)
        self._known = None
        return True

    def edit(self) -> Edit | None:
        if self._known is None and not self._is_off and len(self._seen):
            self._known = self._make()
        return self._known

    @abstractmethod
    def _make(self) -> Edit:
        """The edit for the ids seen so far, at least one."""


class RepetitionPenalty(_Counting):
    """Scales down the logits of tokens that occur in the prompt or in the answer.

    Source: CTRL (Keskar et al., arXiv 1909.05858) as in transformers: z / penalty where z > 0, else
    z * penalty, once per distinct token of prompt + generated. Above 1 it discourages repetition,
    below 1 it encourages it.
    """

    name = "repetition_penalty"
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        penalty: float = Field(ge=0.01, le=100.0, description="Factor; 1 changes nothing.")

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.penalty, 1.0, context)
        self._factor = torch.tensor(args.penalty, dtype=torch.float32)

    def reset(self) -> None:
        super().reset()
        self._seen.add_distinct(self.from_prompt((RepetitionPenalty, self._vocab_size), self._distinct))

    def _distinct(self) -> Ids:
        token_ids = np.array(list(dict.fromkeys(self.prompt)), dtype=np.int64)
        return token_ids[(token_ids >= 0) & (token_ids < self._vocab_size)]

    def _make(self) -> Edit:
        return Scale(self._seen.ids(), self._factor.expand(len(self._seen)))


class FrequencyPenalty(_Counting):
    """Lowers the logits of generated tokens by a penalty for every time they occurred.

    Source: OpenAI API reference, ``frequency_penalty``: z_t - c_t * penalty, where c_t is how often
    t occurs in the answer so far; the prompt does not count. Negative values encourage repetition.
    """

    name = "frequency_penalty"

    class Args(ProcessorArgs):
        penalty: float = Field(ge=-2.0, le=2.0, description="Subtracted per occurrence; 0 changes nothing.")

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.penalty, 0.0, context)

    def _make(self) -> Edit:
        return Bias(self._seen.ids(), self._seen.scaled_counts(-self._penalty))


class PresencePenalty(_Counting):
    """Lowers the logits of generated tokens by a penalty, once per distinct token.

    Source: OpenAI API reference, ``presence_penalty``: z_t - penalty for every t that occurs in the
    answer so far; the prompt does not count. Negative values encourage repetition.
    """

    name = "presence_penalty"

    class Args(ProcessorArgs):
        penalty: float = Field(ge=-2.0, le=2.0, description="Subtracted once; 0 changes nothing.")

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.penalty, 0.0, context)
        self._value = torch.tensor(-args.penalty, dtype=torch.float32)

    def _make(self) -> Edit:
        return Bias(self._seen.ids(), self._value.expand(len(self._seen)))
