"""How much the tests try: ``DLW_EFFORT`` is ``fast`` (`scripts/test`), ``ci`` (the default) or
``nightly`` (`scripts/test --all`).
"""

from __future__ import annotations

import os

FACTORS = {"fast": 0.1, "ci": 1.0, "nightly": 5.0}

EFFORT = os.environ.get("DLW_EFFORT", "ci")
if EFFORT not in FACTORS:
    raise ValueError(f"DLW_EFFORT must be one of {', '.join(FACTORS)}, got {EFFORT!r}")


def examples(number: int) -> int:
    """Of a test of properties that tries `number` in CI."""
    return max(1, round(number * FACTORS[EFFORT]))
