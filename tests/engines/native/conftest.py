"""Paths of the native kernels, each of which a test of what they compute runs with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from chosen_paths import kept_choices

from worker.engines.embedded import native

PATHS = [path for path in native.PATHS if native.unavailable(torch.float32, path) is None]


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """One that computes in float32."""
    with kept_choices():
        native.choose_path(torch.float32, request.param)
        yield request.param
