"""Work of a call as counts that do not depend on the machine: lines of code that ran, and bytes."""

from __future__ import annotations

import contextlib
import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_lines(call: Callable[[], object]) -> int:
    """Lines of the adapters and the worker that ``call`` runs; it may raise `ValueError`."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "/adapters/" not in frame.f_code.co_filename and "/worker/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(ValueError):
            call()
    finally:
        sys.settrace(before)
    return count


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes that ``call`` has allocated at most at a time; it may raise `ValueError`."""
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def kept_bytes(call: Callable[[], object]) -> int:
    """Bytes that ``call`` has allocated and that are still there once it has returned."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
