"""Importing in a process of this package, which starts faster so."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage: modules make hundreds of thousands of objects that stay, and to look
    through them again and again takes a fifth of the time of importing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
