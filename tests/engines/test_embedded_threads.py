"""A small checkpoint is computed by one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from worker.engines.embedded.host.threads import SMALL_CHECKPOINT, limit_threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def checkpoint(path: Path, *sizes: int) -> Path:
    """Files of zeros, which take no place."""
    for number, size in enumerate(sizes):
        with (path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("sizes", "environ", "expected"),
    [
        ((SMALL_CHECKPOINT,), {}, 1),
        ((SMALL_CHECKPOINT,), {"OMP_NUM_THREADS": ""}, 1),
        ((SMALL_CHECKPOINT,), {"OMP_NUM_THREADS": "2"}, 2),
        ((SMALL_CHECKPOINT, 1), {}, 2),
    ],
)
def test_threads(tmp_path: Path, sizes: tuple[int, ...], environ: dict[str, str], expected: int) -> None:
    limit_threads(checkpoint(tmp_path, *sizes), environ)
    assert torch.get_num_threads() == expected
