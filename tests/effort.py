"""The effort of the tests: ``DLW_EFFORT`` is ``fast`` (`scripts/test`), ``ci`` (the default) or
``nightly`` (`scripts/test --all`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

FACTORS = {"fast": 0.1, "ci": 0.1, "nightly": 5.0}
"""Share of a property's examples that is tried: the same ones each time, except ``nightly``."""

EFFORT = os.environ.get("DLW_EFFORT", "ci")
if EFFORT not in FACTORS:
    raise ValueError(f"DLW_EFFORT must be one of {', '.join(FACTORS)}, got {EFFORT!r}")


def examples(number: int) -> int:
    """Number of examples of a property that is written to try `number` of them."""
    return max(1, round(number * FACTORS[EFFORT]))


def grid(cases: Iterable[object], *, fast: int | Callable[[Any], bool]) -> list[Any]:
    """Parameters of a test for all `cases`, of which only some are among the fast tests.

    Args:
        cases: Values of the one argument, or tuples with those of several.
        fast: Whether a case is a fast one, or a number n for each n-th. The others are marked
            ``slow``.
    """
    parameters = []
    for index, case in enumerate(cases):
        is_fast = index % fast == 0 if isinstance(fast, int) else fast(case)
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=() if is_fast else pytest.mark.slow))
    return parameters
