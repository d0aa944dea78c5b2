"""The golden matrix inside vLLM: a short run of it, and the cells that the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import default_model
from golden_cases import FIELDS, THIRD_PARTIES
from golden_report import differences
from golden_vllm import COLUMN, MIGRATED, run_in_vllm
from golden_workers import Bench

from adapters.processors import BUILTINS
from worker.models import DEFAULT_MODEL


@pytest.mark.real_model
async def test_the_page_is_what_vllm_does(tmp_path: Path) -> None:
    """Sixteen at once, and migrated; `scripts/golden --vllm` has longer texts, alone and preempted
    too.
    """
    bench = Bench(default_model(), tmp_path, is_large=True)
    try:
        matrix = await run_in_vllm(bench, DEFAULT_MODEL, 8, is_short=True)
    finally:
        await bench.close()
    matrix.check()
    assert set(matrix.rows) == {*FIELDS, *(builtin.name for builtin in BUILTINS), *THIRD_PARTIES}
    assert matrix.modes == [COLUMN, MIGRATED]
    assert differences(matrix.as_json()) == []
