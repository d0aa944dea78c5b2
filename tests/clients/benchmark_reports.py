"""Reports of clients that measure servers, once their programs of docs/clients.md have ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

REQUESTS = 24


def _check_aiperf(directory: Path) -> None:
    (path,) = (directory / "artifacts").rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")


def _check_guidellm(directory: Path) -> None:
    (benchmark,) = json.loads((directory / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)


def _check_lm_eval(directory: Path) -> None:
    (path,) = (directory / "results").rglob("results_*.json")
    assert json.loads(path.read_text())["results"]["capitals"]["acc,none"] == 1


CHECKS: dict[str, Callable[[Path], None]] = {
    "aiperf": _check_aiperf,
    "guidellm": _check_guidellm,
    "lm-eval": _check_lm_eval,
}
"""Raise `AssertionError` if a request failed, by client."""
