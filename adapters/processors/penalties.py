"""Penalties on tokens that occurred: repetition, frequency, presence; no rescan per step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from adapters.contract import Bias, Context, Edit, ProcessorArgs, Reads, Scale, Stage, SteeringProcessor
from adapters.processors.arguments import Count
from adapters.processors.ngrams import Ids

Window = Annotated[Count, Field(description="Most recent tokens that count; 0 counts all.")]


class Occurrences:
    """Distinct token ids with counts, by first occurrence; the newest can be removed again."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._known_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, token_id: int) -> bool:
        """Count one more occurrence; whether it is the first one."""
        slot = self._slots.get(token_id)
        if slot is not None:
            self._counts[slot] += 1
            return False
        slot = self._slots[token_id] = len(self._slots)
        if slot == len(self._ids):
            self._grow()
        self._ids[slot], self._counts[slot] = token_id, 1
        self._known_ids = None
        return True

    def add_distinct(self, token_ids: Ids) -> None:
        """Count one occurrence of each of some distinct ids (int64 ``[n]``) in an empty counter."""
        self._slots = dict(zip(token_ids.tolist(), range(len(token_ids)), strict=True))
        spare = np.zeros(64, dtype=np.int64)
        self._ids = np.concatenate([token_ids, spare])
        self._counts = (np.arange(len(self._ids)) < len(token_ids)).astype(np.float32)
        self._known_ids = None

    def remove(self, token_id: int) -> bool:
        """Remove the newest occurrence, which was of ``token_id``; whether it was the only one."""
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        if self._counts[slot] > 0:
            return False
        del self._slots[token_id]
        self._known_ids = None
        return True

    def add_counted(self, token_ids: Ids, counts: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Count distinct ids (int64 ``[n]``) so often each; nothing has been counted before."""
        self.add_distinct(token_ids)
        self._counts[: len(counts)] = counts

    def _grow(self) -> None:
        self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])

    def ids(self) -> torch.Tensor:
        """int64 ``[n]``; the same tensor until an id joins or leaves."""
        if self._known_ids is None:
            self._known_ids = self._tensor_of_ids()
        return self._known_ids

    def _tensor_of_ids(self) -> torch.Tensor:
        """A view, to which later ids are appended."""
        return torch.from_numpy(self._ids[: len(self._slots)])

    def scaled_counts(self, factor: np.ndarray[Any, np.dtype[np.float32]]) -> torch.Tensor:
        """float32 ``[n]``: count times ``factor`` (``[]``); a copy, since earlier counts change."""
        return torch.from_numpy(self._counts[: len(self._slots)] * factor)


class WindowOccurrences(Occurrences):
    """As `Occurrences`, in any order; any occurrence can be taken back."""

    def remove(self, token_id: int) -> bool:
        """Take back one occurrence of ``token_id``; if it was the only one, the last slot moves."""
        slot = self._slots[token_id]
        was_only_one = super().remove(token_id)
        last = len(self._slots)
        if was_only_one and slot < last:
            moved = int(self._ids[last])
            self._ids[slot], self._counts[slot], self._slots[moved] = moved, self._counts[last], slot
        return was_only_one

    def _tensor_of_ids(self) -> torch.Tensor:
        """A copy, as slots are filled again."""
        return super()._tensor_of_ids().clone()


class _Counting(SteeringProcessor):
    """Base of penalties: occurrences, and the edit cached while it stays the same.

    Args:
        penalty: The penalty.
        neutral: The one that changes nothing.
        window: Most recent tokens that are counted; 0 counts all.
        context: Of the request.

    Class attributes:
        _by_count: The edit depends on how often ids occurred, not only on which ones did.
    """

    stage = Stage.PENALTY
    reads = Reads.GENERATED
    _counts_prompt = False
    _by_count = False

    def __init__(self, penalty: float, neutral: float, window: int, context: Context) -> None:
        self._is_off = penalty == neutral
        self._window = window
        self._vocab_size = context.vocabulary.size
        self._seen = WindowOccurrences() if window else Occurrences()
        self._known: Bias | Scale | None = None

    def reset(self) -> None:
        self._seen.clear()
        self._known = None

    def advance(self, token_id: int, index: int) -> None:
        self._add(token_id)
        if self._window:
            left = self._left(self._prompt_length + index)
            if left is not None:
                self._remove(left)

    def _left(self, position: int) -> int | None:
        """The token that leaves the window as the one at ``position`` enters it."""
        place = position - self._window
        if not self._window or place < (0 if self._counts_prompt else self._prompt_length):
            return None
        return self._tokens[place]

    def _add(self, token_id: int) -> None:
        if 0 <= token_id < self._vocab_size and (self._seen.add(token_id) or self._by_count):
            self._known = None

    def _remove(self, token_id: int) -> None:
        if 0 <= token_id < self._vocab_size and (self._seen.remove(token_id) or self._by_count):
            self._known = None

    def retract(self, token_ids: Sequence[int]) -> bool:
        position = self._consumed
        for token_id in reversed(token_ids):
            position -= 1
            left = self._left(position)
            if left is not None:
                self._add(left)
            self._remove(token_id)
        return True

    def edit(self) -> Edit | None:
        if self._known is None and not self._is_off and len(self._seen):
            self._known = self._make(self._seen.ids())
        return self._known

    @abstractmethod
    def _make(self, ids: torch.Tensor) -> Bias | Scale:
        """The edit for ``ids``, which are those seen so far, at least one."""


class RepetitionPenalty(_Counting):
    """Scales down the logits of tokens that occur in the prompt or in the answer.

    Source: CTRL (Keskar et al., arXiv 1909.05858) as in transformers: z / penalty where z > 0, else
    z * penalty, once per distinct token of prompt + generated. Above 1 it discourages repetition,
    below 1 it encourages it. With a ``window`` only that many of the most recent tokens of prompt +
    generated count, as with llama.cpp's ``repeat_last_n``.
    """

    name = "repetition_penalty"
    reads = Reads.PROMPT_AND_GENERATED
    _counts_prompt = True

    class Args(ProcessorArgs):
        penalty: float = Field(ge=0.01, le=100.0, description="Factor; 1 changes nothing.")
        window: Window = 0

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.penalty, 1.0, args.window, context)
        self._factor = torch.tensor(args.penalty, dtype=torch.float32)

    def reset(self) -> None:
        super().reset()
        if self._window:
            key = (RepetitionPenalty, self._vocab_size, self._window)
            self._seen.add_counted(*self.from_prompt(key, self._in_window))
            return
        self._seen.add_distinct(self.from_prompt((RepetitionPenalty, self._vocab_size), self._distinct))

    def _in_window(self) -> tuple[Ids, Ids]:
        token_ids = np.array(self.prompt[-self._window :], dtype=np.int64)
        return np.unique(token_ids[(token_ids >= 0) & (token_ids < self._vocab_size)], return_counts=True)

    def _distinct(self) -> Ids:
        token_ids = np.array(list(dict.fromkeys(self.prompt)), dtype=np.int64)
        return token_ids[(token_ids >= 0) & (token_ids < self._vocab_size)]

    def _make(self, ids: torch.Tensor) -> Scale:
        return Scale(ids, self._factor.expand(len(ids)))


class FrequencyPenalty(_Counting):
    """Lowers the logits of generated tokens by a penalty for every time they occurred.

    Source: OpenAI API reference, ``frequency_penalty``: z_t - c_t * penalty, where c_t is how often
    t occurs in the most recent ``window`` tokens of the answer, by default in all of it; the prompt
    does not count. Negative values encourage repetition.
    """

    name = "frequency_penalty"
    _by_count = True

    class Args(ProcessorArgs):
        penalty: float = Field(ge=-2.0, le=2.0, description="Subtracted per occurrence; 0 changes nothing.")
        window: Window = 0

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.penalty, 0.0, args.window, context)
        self._factor = np.array(-args.penalty, dtype=np.float32)

    def _make(self, ids: torch.Tensor) -> Bias:
        return Bias(ids, self._seen.scaled_counts(self._factor))


class PresencePenalty(_Counting):
    """Lowers the logits of generated tokens by a penalty, once per distinct token.

    Source: OpenAI API reference, ``presence_penalty``: z_t - penalty for every t that occurs in the
    most recent ``window`` tokens of the answer, by default in all of it; the prompt does not count.
    Negative values encourage repetition.
    """

    name = "presence_penalty"

    class Args(ProcessorArgs):
        penalty: float = Field(ge=-2.0, le=2.0, description="Subtracted once; 0 changes nothing.")
        window: Window = 0

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.penalty, 0.0, args.window, context)
        self._value = torch.tensor(-args.penalty, dtype=torch.float32)

    def _make(self, ids: torch.Tensor) -> Bias:
        return Bias(ids, self._value.expand(len(ids)))
