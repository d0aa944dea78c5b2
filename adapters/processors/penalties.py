"""Penalties on tokens that occurred: repetition, frequency, presence; no rescan per step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from adapters.contract import Bias, Context, Edit, ProcessorArgs, Reads, Scale, Stage, SteeringProcessor
from adapters.processors.arguments import Count

Window = Annotated[Count, Field(description="Most recent tokens that count; 0 counts all.")]


class Occurrences:
    """Distinct token ids with counts and values, in the order in which they were added.

    Any occurrence can be removed; the order stays the same if it is always the newest one.

    Args:
        value: Value of an id.
        by_count: Whether the value is multiplied by the count.
    """

    __slots__ = ("_by_count", "_counts", "_ids", "_known_ids", "_slots", "_value", "_values")

    def __init__(self, value: float, by_count: bool) -> None:
        self._value, self._by_count = value, by_count
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.set(array("q"), [])

    def __len__(self) -> int:
        return len(self._ids)

    def set(self, token_ids: array[int], counts: list[int]) -> None:
        """Forget all, and count distinct ids so often each."""
        self._slots = dict(zip(token_ids, range(len(token_ids)), strict=True))
        self._ids, self._counts = token_ids[:], counts[:]
        one = array("f", [self._value])
        self._values = array("f", [self._value * n for n in counts]) if self._by_count else one * len(counts)
        self._known_ids: array[int] | None = None

    def add(self, token_id: int) -> bool:
        """Count one more occurrence; whether an id or a value has changed."""
        slot = self._slots.get(token_id)
        if slot is not None:
            count = self._counts[slot] = self._counts[slot] + 1
            if self._by_count:  # rounded to float32 as a product of two of them
                self._values[slot] = count * self._value
            return self._by_count
        self._slots[token_id] = len(self._ids)
        self._ids.append(token_id)
        self._counts.append(1)
        self._values.append(self._value)
        self._known_ids = None
        return True

    def remove(self, token_id: int) -> bool:
        """Remove one occurrence; whether an id or a value has changed."""
        slot = self._slots[token_id]
        if self._counts[slot] > 1:
            count = self._counts[slot] = self._counts[slot] - 1
            if self._by_count:
                self._values[slot] = count * self._value
            return self._by_count
        del self._slots[token_id]
        self._known_ids = None
        last_id, count, value = self._ids.pop(), self._counts.pop(), self._values.pop()
        if last_id != token_id:  # it takes the slot that became free
            self._slots[last_id] = slot
            self._ids[slot], self._counts[slot], self._values[slot] = last_id, count, value
        return True

    def ids(self) -> array[int]:
        """A copy, the same until an id joins or leaves."""
        if self._known_ids is None:
            self._known_ids = self._ids[:]
        return self._known_ids

    def values(self) -> array[float]:
        """A copy."""
        return self._values[:]


class _Counting(SteeringProcessor):
    """Base of penalties: occurrences, and the edit cached while it stays the same.

    Args:
        value: Value of the edit for an id that has occurred.
        neutral: Value that changes nothing.
        window: Most recent tokens that are counted; 0 counts all.
        context: Context of the request.

    Class attributes:
        _by_count: Whether the value is multiplied by the number of occurrences.
        _makes: Class of the edit.
    """

    stage = Stage.PENALTY
    reads = Reads.GENERATED
    _counts_prompt = False
    _by_count = False
    _makes: type[Bias | Scale] = Bias

    def __init__(self, value: float, neutral: float, window: int, context: Context) -> None:
        self._is_off = value == neutral
        self._window = window
        self._vocab_size = context.vocabulary.size
        single = float(np.float32(value))
        self._seen = Occurrences(single, self._by_count)
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
        if 0 <= token_id < self._vocab_size and self._seen.add(token_id):
            self._known = None

    def _remove(self, token_id: int) -> None:
        if 0 <= token_id < self._vocab_size and self._seen.remove(token_id):
            self._known = None

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
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
            self._known = self._makes(self._seen.ids(), self._seen.values())
        return self._known


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
    _makes = Scale

    class Args(ProcessorArgs):
        penalty: float = Field(ge=0.01, le=100.0, description="Factor; 1 changes nothing.")
        window: Window = 0

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.penalty, 1.0, args.window, context)

    def reset(self) -> None:
        super().reset()
        key = (RepetitionPenalty, self._vocab_size, self._window)
        self._seen.set(*self.from_prompt(key, self._in_prompt))

    def _in_prompt(self) -> tuple[array[int], list[int]]:
        """Distinct ids of the prompt's window, and how often each counts."""
        counts = Counter(self.prompt[-self._window :])
        known = [token_id for token_id in counts if 0 <= token_id < self._vocab_size]
        return array("q", known), [counts[token_id] for token_id in known]


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
        super().__init__(-args.penalty, 0.0, args.window, context)


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
        super().__init__(-args.penalty, 0.0, args.window, context)
