"""``python -m worker`` whose steps take at least ``PACE_S`` seconds, without computing: streams are
as long as a fault needs, whatever the processor can do.
"""

from __future__ import annotations

import os
import time

import worker.__main__
from worker.engines.embedded.plan import Output
from worker.engines.embedded.step import Stepper

PACE_S = float(os.environ.get("PACE_S", "0.01"))

step = Stepper.step


def paced(self: Stepper, *arguments: bool, **named: bool) -> list[Output]:
    time.sleep(PACE_S)
    return step(self, *arguments, **named)


if __name__ == "__main__":
    Stepper.step = paced  # type: ignore[method-assign]
    worker.__main__.run()
