"""Settings of torch that a whole process shares, and that checks leave as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def torch_settings() -> dict[str, object]:
    """The settings by name."""
    return {"default data type": torch.get_default_dtype(), "number of threads": torch.get_num_threads()}


@contextmanager
def kept_settings() -> Iterator[None]:
    """Leaves the settings as they were: they are the test session's."""
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
