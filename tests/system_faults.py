"""Faults of the system that a process can have for itself: no descriptors, disk or memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no file, and accept no connection."""
    os.close(lowest := os.dup(0))  # the number of the next one
    with _limited(resource.RLIMIT_NOFILE, lowest):
        yield


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process have room for so many bytes each."""
    with _limited(resource.RLIMIT_FSIZE, size):
        yield


@contextmanager
def full_memory(size: int) -> Iterator[None]:
    """This process can map so many bytes more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with _limited(resource.RLIMIT_AS, pages * resource.getpagesize() + size):
        yield


@contextmanager
def _limited(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))
