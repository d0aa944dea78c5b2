"""The lines of ``--log-requests``, as a test reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from worker.request_log import LOGGER


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(record.getMessage()))


@contextmanager
def kept_lines() -> Iterator[list[dict[str, Any]]]:
    """A list to which lines are added."""
    handler = _Kept()
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
