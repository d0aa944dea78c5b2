"""Spinning time of OpenMP's threads at a barrier; set before torch, hence OpenMP, is loaded."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

SPIN_COUNT = 5000
"""Iterations that a GNU OpenMP thread spins at a barrier before it sleeps: about 0.1 ms.

That covers the gaps between the parallel regions of a decoding step. The library's own default,
300,000, is several milliseconds, the length of a time slice: where another process needs the core,
each barrier then waits for the scheduler, and a step has hundreds of them. Measured by
``benchmarks/neighbours.py``.
"""


def bound_spin(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set ``GOMP_SPINCOUNT`` to `SPIN_COUNT`, unless the environment already sets the wait policy.

    ``OMP_WAIT_POLICY`` also counts as set. The torch wheels for Linux come with GNU OpenMP, and the
    native kernels are linked with it; other OpenMP libraries ignore the variable.

    Returns:
        Whether it takes effect in this process: not if torch was imported before, which is logged.
    """
    if environ.get("GOMP_SPINCOUNT") or environ.get("OMP_WAIT_POLICY"):
        return True
    environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if "torch" not in sys.modules:
        return True
    log.info(
        "torch was imported before this package: its threads spin for milliseconds at barriers, which makes decoding "
        "slow beside busy processes; import adapters or worker.engines first, or set GOMP_SPINCOUNT=%d",
        SPIN_COUNT,
    )
    return False
