"""Work with OpenMP threads outside the step thread, in a thread that ends with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_own_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread that ends with it; raises what it raises.

    OpenMP keeps a pool of worker threads for every thread that has ever computed in parallel, until
    that thread ends. As soon as there are more of them than CPUs, none spins at barriers any more,
    and a step of thousands of small operations takes about twice as long.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(work).result()
