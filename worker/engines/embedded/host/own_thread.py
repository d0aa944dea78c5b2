"""Work that computes with many threads, but is not done by the thread that computes the steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_own_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread that ends with it; raises what it raises.

    OpenMP keeps the helpers of every thread that has ever computed with some, until that thread
    ends. As soon as there are more of them than processors, none waits awake for more work any
    longer, and a step of thousands of small operations takes about twice as long.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(work).result()
