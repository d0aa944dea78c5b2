"""The registry of checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapters.testing.subject import Subject

Run = Callable[[Subject], str | None]


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement of the contract.

    Attributes:
        name: Short name.
        meaning: One line: the property of a processor that passes.
        run: Takes the subject; raises `CheckFailed`, or returns a remark for the report or None.
    """

    name: str
    meaning: str
    run: Run


CHECKS: list[Check] = []
"""Every check, in the order in which they run."""


def check(name: str, meaning: str) -> Callable[[Run], Run]:
    """Adds a function to `CHECKS`."""

    def add(run: Run) -> Run:
        CHECKS.append(Check(name, meaning, run))
        return run

    return add
