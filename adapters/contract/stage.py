"""Declarations of a processor: its stage in the order law, and the history that it reads."""

from __future__ import annotations

from enum import Enum, IntEnum


class Stage(IntEnum):
    """The order law, the same on every engine; within a stage, the order of the request."""

    GUIDANCE = 0
    BIAS = 1
    PENALTY = 2
    SOFT = 3
    MASK = 4
    FORCE = 5
    TEMPERATURE = 6
    TRUNCATION = 7
    SAMPLING = 8


class Reads(Enum):
    """History that a processor reads.

    One that reads ``NOTHING`` still knows the position and its own chain's forcing.
    """

    NOTHING = "nothing"
    GENERATED = "generated"
    PROMPT_AND_GENERATED = "prompt and generated"
