"""``--log-requests`` on a disk that is full for a while: whole lines, and the lost ones counted."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.request_log import LOGGER, LineHandler, RequestEntry, RequestLog


@given(st.lists(st.integers(0, 400), max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_each_line_is_whole_or_counted(room: list[int]) -> None:
    """``room`` are the bytes that each write finds; in the end there is enough."""
    real, left, number = os.write, list(room), len(room) + 1

    def write(number: int, data: bytes) -> int:
        free = left.pop(0) if left else len(data)
        if not free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(number, data[:free])

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        path = Path(directory) / "log"
        with path.open("w") as file:
            patched.setattr(sys, "stdout", file)
            patched.setattr(os, "write", write)
            log = RequestLog()
            try:
                for index in range(number):
                    log.write(RequestEntry(request_id=str(index)))
            finally:
                log.close()
        found = [each for each in map(parsed, path.read_text().splitlines()) if each is not None]
    assert len(found) + sum(each.get("lines_lost_before", 0) for each in found) == number
    ids = [int(each["request_id"]) for each in found]
    assert ids == sorted(set(ids))
    assert ids[-1] == number - 1


def parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except ValueError:
        return None  # what there was room for


def test_a_full_disk_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("w") as full:
        handler = LineHandler(full)
        logger = logging.Logger(LOGGER)
        logger.addHandler(handler)
        for index in range(5):
            logger.info("line %d", index)
        assert handler.failed
    assert caplog.messages == ["--log-requests: lines are lost: No space left on device"]
