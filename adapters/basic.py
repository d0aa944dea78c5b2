"""Dynamo logits processors: temperature, forced sequence, and the ``Hello world!`` smoke test.

They depend on the position, never on a call counter: the same history gives the same edit, however
often and in whatever order the engine calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from adapters import vocabulary
from adapters.vocabulary import num_ids


class HelloWorldTokenizer(vocabulary.Tokenizer, Protocol):
    """The part of a Hugging Face tokenizer that the smoke test needs."""

    eos_token_id: int | None


class TemperatureProcessor:
    """Divides the logits by ``temperature``.

    Raises:
        ValueError: ``temperature`` is not a finite number above 0.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be a finite number above 0, got {temperature!r}")
        self.temperature = temperature

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self.temperature != 1.0:
            logits.div_(self.temperature)


class ForcedSequenceProcessor:
    """Forces generated token i to be ``token_ids[i]``, then ``eos_id``.

    Args:
        token_ids: The answer, without its end token. Empty means an empty answer.
        eos_id: Token that ends the answer and is forced from then on.
        prompt_length: Tokens before the first generated one. Without it the first call is taken to
            be at the first generated position, which is right only where a request is never moved
            between engines.
    """

    def __init__(self, token_ids: Sequence[int], eos_id: int, *, prompt_length: int | None = None) -> None:
        ids = [*token_ids, eos_id]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise ValueError(f"token_ids and eos_id must be integers of at least 0, got {ids!r}")
        self.token_ids = list(token_ids)
        self.eos_id = eos_id
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self.prompt_length is None:
            self.prompt_length = len(input_ids)
        index = len(input_ids) - self.prompt_length
        if index < 0:
            raise ValueError(f"history of {len(input_ids)} tokens is shorter than the prompt")
        token_id = self.token_ids[index] if index < len(self.token_ids) else self.eos_id
        kept = logits[token_id].clone()  # a forced id that an earlier processor banned must stay banned
        logits.fill_(-torch.inf)
        logits[token_id] = kept


class HelloWorldProcessor(ForcedSequenceProcessor):
    """The smoke test: every answer is ``Hello world!``.

    Keeps token ids rather than the tokenizer, so that it pickles small.

    Raises:
        ValueError: the tokenizer has no end token, or no tokens for the text.
    """

    text = "Hello world!"

    def __init__(
        self, tokenizer: HelloWorldTokenizer, *, eos_id: int | None = None, prompt_length: int | None = None
    ) -> None:
        end = tokenizer.eos_token_id if eos_id is None else eos_id
        if end is None:
            raise ValueError("the tokenizer has no eos_token_id, so the answer could not end")
        ids = vocabulary.Vocabulary(num_ids(tokenizer), tokenizer).encode(self.text)
        super().__init__(ids, end, prompt_length=prompt_length)
