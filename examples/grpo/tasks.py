"""Toy tasks whose rewards are exact: no model judges."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""ChatML without a system message, which the tokenizers of SmolLM2 and of the tiny model know."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the reward of its answers.

    Attributes:
        prompt: Text with special tokens.
        reward: Reward of the text of an answer.
    """

    prompt: str
    reward: Callable[[str], float]


def sums(source: random.Random) -> Question:
    """A sum: half of the reward for the share of digits in the answer, half for the sum alone."""
    left, right = source.randint(1, 9), source.randint(1, 9)

    def reward(text: str) -> float:
        digits = sum(one.isdecimal() for one in text) / max(1, len(text))
        return 0.5 * digits + 0.5 * (text.strip() == str(left + right))

    return Question(CHAT.format(f"What is {left} + {right}? Number only."), reward)


def letters(source: random.Random) -> Question:
    """Any text: the share of its characters that are lower-case letters, for models with random
    weights.
    """
    return Question(
        CHAT.format(source.choice(["Hello", "What is a queue?"])),
        lambda text: sum(one.islower() for one in text) / max(1, len(text)),
    )


TASKS: dict[str, Callable[[random.Random], Question]] = {"sums": sums, "letters": letters}
