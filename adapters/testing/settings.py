"""Settings that a whole process or a thread of it shares, and that checks leave as they were."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default data type": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's deterministic mode": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "torch's flushing of small numbers": (lambda: _flushes_small_numbers(), torch.set_flush_denormal),
    "numpy's handling of errors": (np.geterr, lambda handling: np.seterr(**handling)),
    "Python's recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the working directory": (os.getcwd, os.chdir),
}
"""Each setting, and what sets it."""


def shared_settings() -> dict[str, Any]:
    """The settings by name."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


@contextmanager
def kept_settings() -> Iterator[None]:
    """Leaves the settings as they were: they are the test session's."""
    before = shared_settings()
    try:
        yield
    finally:
        for name, (read, write) in _SETTINGS.items():
            if read() != before[name]:
                write(before[name])


def _flushes_small_numbers() -> bool:
    smallest = torch.full((1,), 1e-40, dtype=torch.float32, device="cpu")
    return not bool(smallest * 1.0 > 0)
