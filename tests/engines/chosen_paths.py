"""Paths of the native kernels, for tests that choose among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker.engines.embedded import native
from worker.engines.embedded.native import paths


@contextmanager
def kept_choices(*, clear: bool = False) -> Iterator[None]:
    """Paths that are chosen within are chosen no more behind it.

    Args:
        clear: Whether none is chosen at first.
    """
    before = paths._chosen.copy()
    if clear:
        paths._chosen.clear()
    try:
        yield
    finally:
        paths._chosen.clear()
        paths._chosen.update(before)


@contextmanager
def plain_c(dtype: torch.dtype) -> Iterator[None]:
    """The oracle of all paths computes in `dtype`."""
    with kept_choices():
        native.choose_path(dtype, "generic")
        yield
