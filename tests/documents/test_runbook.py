"""What the runbook looks for in a log is what the worker writes there."""

from __future__ import annotations

import logging
import re
import subprocess

import pytest
from document_pages import ROOT

from worker.lifecycle.drain import InFlightRequests
from worker.metrics import WorkerMetrics
from worker.request_log import RequestEntry
from worker.server.reports import RequestReports


def test_the_first_unknown_error_is_found_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    (script,) = re.findall(r"kubectl logs \$POD \| sed -n \"(.*)\"", (ROOT / "docs/runbook.md").read_text("utf-8"))
    with caplog.at_level(logging.ERROR):
        try:
            raise ZeroDivisionError("the reason")
        except ZeroDivisionError as error:
            RequestReports("m", WorkerMetrics(InFlightRequests())).failed(RequestEntry(request_id="an-id"), error)
    log = f"something before\n{caplog.text}"
    found = subprocess.run(["sed", "-n", script], input=log, capture_output=True, text=True, check=True).stdout
    assert "request an-id failed" in found
    assert "ZeroDivisionError: the reason" in found
    assert "something before" not in found
