"""``scripts/verify-gpu`` on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in import STAND_IN

pytestmark = pytest.mark.timeout(280)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "verify-gpu"


def verify(model: Path, report: Path, *argv: str, **switches: object) -> subprocess.CompletedProcess[str]:
    variables = {
        "MODEL_PATH": str(model),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(STAND_IN),
        "REPORT": str(report),
        "TRTLLM_STANDIN": json.dumps(switches),
    }
    return subprocess.run(
        [str(SCRIPT), "--max-batch-size", "16", *argv],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.campaign
def test_it_ends_although_the_executor_is_dead(model: Path, tmp_path: Path) -> None:
    """Its process ended during the first check, and its shutdown blocks whoever calls it."""
    done = verify(model, tmp_path / "report.md", dies_on_prompt=True, shutdown_blocks_s=600)
    assert done.returncode == 1, done.stderr
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if "| FAIL |" in line]
    assert len(rows) == 13
    assert done.stdout.endswith(f"verify-gpu: the report is in {tmp_path}/report.md\n")


def test_without_a_model_it_needs_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MODEL_PATH"}
    environment |= {"PYTHON": sys.executable, "REPORT": str(tmp_path / "report.md"), "CUDA_VISIBLE_DEVICES": ""}
    for arguments, message in (
        ([], "torch sees no CUDA device, and MODEL_PATH is not set"),
        (["--max-batch-size", "16"], "--max-batch-size: without MODEL_PATH it takes no arguments"),
    ):
        done = subprocess.run(
            [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert (done.returncode, done.stderr) == (2, f"verify-gpu: error: {message}\n")
    assert not (tmp_path / "report.md").exists()
