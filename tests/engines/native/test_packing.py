"""Rows packed into panels, in every path; and threads that compute alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional

from worker.engines.embedded import native
from worker.engines.embedded.native import paths
from worker.engines.embedded.native.packed import COLUMNS, fill_panels

pytestmark = pytest.mark.native

PATHS = [path for path in native.PATHS if native.unavailable(torch.float32, path) is None]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.int32, torch.float32], ids=str)
def test_panels_are_rows_transposed(dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paths._chosen, torch.float32, path)
    for count, width in (1, 1), (31, 17), (32, 16), (70, 5), (300, 33):
        rows = torch.randint(-128, 128, (count, width), dtype=torch.int32).to(dtype)
        padded = functional.pad(rows, (0, 0, 0, -count % COLUMNS))
        expected = padded.view(-1, COLUMNS, width).mT.contiguous()
        for num_threads in (1, 3):
            panels = torch.full_like(expected, 99)
            fill_panels(rows, panels, num_threads)
            assert torch.equal(panels, expected)
        fill_panels(rows.T.contiguous().T, panels)  # rows that are not contiguous
        assert torch.equal(panels, expected)


def test_panels_of_another_shape_are_refused() -> None:
    rows = torch.zeros(40, 8)
    for panels in (torch.zeros(1, 8, 32), torch.zeros(2, 8, 32).half(), torch.zeros(2, 32, 8).mT):
        with pytest.raises(ValueError, match=r"expected panels torch.float32 \[2, 8, 32\]"):
            fill_panels(rows, panels)


def test_a_thread_may_compute_alone() -> None:
    """The threads that begin after it compute with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(paths.compute_alone).result()
            alone = executor.submit(torch.get_num_threads).result()
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert alone in (1, 3), "1 where torch and the kernels share one OpenMP"
