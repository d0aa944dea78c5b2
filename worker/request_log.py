"""``--log-requests``: one line of JSON for each request, when it has ended.

A line has counts, times and names. It never has text of a prompt or an answer, nor an argument of a
logits processor, nor a value that a client sent: of an error it has the class and the field.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TextIO

from worker.errors import InvalidRequest
from worker.requests.fields import FIELDS, SECTIONS
from worker.requests.response import ResponseBuilder

if TYPE_CHECKING:
    from adapters.chain import ProcessorFailed
    from worker.engines import QueueTimes
    from worker.sampling import SamplingParams

logger = logging.getLogger("worker.log_requests")  # not LOGGER's, whose lines have no room

LOGGER = "worker.request_log"
"""Name of the logger. Without handlers of the operator's own, its lines go to standard output."""

MAX_PENDING = 10_000
"""Lines that may wait for a slow reader; more are lost, and the next line says how many."""

FLUSH_S = 5.0
"""Seconds that `RequestLog.close` waits for a slow reader."""


@dataclass(slots=True, kw_only=True)
class RequestEntry:
    """Record of one request; filled in while it runs.

    Attributes:
        request_id: Id that the runtime gave it.
        model: Served model name.
        numerics: Numerics of the engine; None before it has started.
        is_probe: The runtime's health probe, which is not logged.
        seed: Seed of its random numbers, None if it was refused before, or where the engine draws
            its own.
        num_prompt_tokens: None if the request could not be parsed.
        processors: Names of its logits processors, in order.
        builder: Counts its tokens, None if it was refused.
        finish_reason: Finish reason of its answer, ``cancelled`` if it was dropped; None with an
            error.
        error: Class of the error that ended it.
        error_field: Field that was refused.
        params: Sampling parameters that the engine was given, None if the request was refused.
        queue_times: Times at which it left the waiting queue, where the engine reports them.
        failure: The processor that failed it.
        clock: Monotonic clock, seconds.
        began_s: Time of its arrival by `clock`.
        first_token_s: Time at which its first token was on its way; None before.
    """

    request_id: str
    model: str = ""
    numerics: str | None = None
    is_probe: bool = False
    seed: int | None = None
    num_prompt_tokens: int | None = None
    processors: Collection[str] = ()
    builder: ResponseBuilder | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_field: str | None = None
    params: SamplingParams | None = None
    queue_times: QueueTimes | None = None
    failure: ProcessorFailed | None = None
    clock: Callable[[], float] = time.monotonic
    began_s: float = field(init=False)
    first_token_s: float | None = None
    _last_token_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self._last_token_s = self.clock()

    def tokens_sent(self) -> float:
        """Note that tokens are on their way to the client.

        Returns:
            Seconds since the last ones, or since the request came.
        """
        now_s = self.clock()
        if self.first_token_s is None:
            self.first_token_s = now_s
        passed_s, self._last_token_s = now_s - self._last_token_s, now_s
        return passed_s

    def failed(self, error: BaseException) -> None:
        """The request ended with an error."""
        self.finish_reason, self.error = None, type(error).__name__
        self.error_field = known_field(error.field) if isinstance(error, InvalidRequest) else None

    def as_json(self) -> dict[str, Any]:
        """The line's data; the key order is stable."""
        builder = self.builder
        first_s = None if self.first_token_s is None else round(self.first_token_s - self.began_s, 6)
        data: dict[str, Any] = {
            "request_id": self.request_id,
            "model": self.model,
            "seed": self.seed,
            "numerics": self.numerics,
            "prompt_tokens": self.num_prompt_tokens if builder is None else builder.num_prompt_tokens,
            "cached_tokens": 0 if builder is None else builder.num_cached_tokens,
            "generated_tokens": 0 if builder is None else builder.num_generated_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "error_field": self.error_field,
            "time_to_first_token_s": first_s,
            "total_s": round(self.clock() - self.began_s, 6),
            "preemptions": None if builder is None else builder.num_preemptions,
            "processors": list(self.processors),
        }
        if builder is not None and builder.weights.entries:
            data["weight_versions"] = builder.weights.as_json(builder.num_generated_tokens)
        return data


_KNOWN = SECTIONS | {row.path for row in FIELDS} | {"logits_processors", "request", "request_id", "prompt_token_ids"}
_PROCESSOR = re.compile(r"logits_processors\.processors\[\d+\](\.name|\.args)?")
_PARAMETER = re.compile(r"sampling_params\.[a-z_]+")


def known_field(path: str) -> str:
    """``path`` as far as its names are this worker's own; keys below them may be a client's."""
    matched = _PROCESSOR.match(path) or _PARAMETER.match(path)
    if matched is not None:
        return matched[0]
    while path and path not in _KNOWN:
        path = path.rpartition(".")[0]
    return path or "other"


class LineHandler(logging.Handler):
    """Writes whole lines to a stream whose disk may be full.

    Args:
        stream: The stream; None, as where the process has no standard output, takes no line.

    Attributes:
        failed: Whether the last line could not be written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self.failed = False
        self._stream = stream
        self._is_cut = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or none: no traceback of each that finds no room."""
        had_failed = self.failed
        try:
            self._write(f"{self.format(record)}\n")
            self.failed = False
        except OSError as error:
            self.failed = True
            if not had_failed:
                logger.warning("--log-requests: lines are lost: %s", error.strerror or error)

    def _write(self, line: str) -> None:
        """Past the stream's buffer, which would keep a part of what it reports as not written."""
        if self._stream is None:
            raise OSError("there is no standard output")
        try:
            number = self._stream.fileno()
        except (OSError, ValueError):  # a stream in memory
            self._stream.write(line)
            self._stream.flush()
            return
        self._stream.flush()
        data = line.encode("utf-8", "backslashreplace")
        if self._is_cut:
            data = b"\n" + data  # what there is of the line that had no room
        written = 0
        try:
            while written < len(data):
                written += os.write(number, data[written:])
        finally:
            self._is_cut = 0 < written < len(data) or (self._is_cut and not written)


class RequestLog:
    """Writes lines in a thread of its own, so that a slow reader holds up no request.

    Attributes:
        num_lost: Lines that were dropped since the last one that was not.
    """

    def __init__(self) -> None:
        self.num_lost = 0
        self._logger = logging.getLogger(LOGGER)
        self._handler: LineHandler | None = None
        self._num_unwritten = 0
        if not self._logger.handlers:
            self._handler = LineHandler(sys.stdout)
            self._logger.addHandler(self._handler)
            self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def write(self, entry: RequestEntry) -> None:
        """Log a request that has ended. Never blocks; may be called from any thread."""
        if entry.is_probe:
            return
        if self._lines.qsize() >= MAX_PENDING:
            self.num_lost += 1
            return
        data = entry.as_json()
        if self.num_lost:
            data["lines_lost_before"], self.num_lost = self.num_lost, 0
        self._lines.put(data)

    def close(self) -> None:
        """Write what waits, for `FLUSH_S` at most. Idempotent."""
        self._lines.put(None)
        self._thread.join(FLUSH_S)
        if self._handler is not None:
            self._logger.removeHandler(self._handler)
            self._logger.propagate = True
            self._handler = None

    def _run(self) -> None:
        while (data := self._lines.get()) is not None:
            lost, handler = self._num_unwritten + data.get("lines_lost_before", 0), self._handler
            if lost:
                data["lines_lost_before"] = lost
            self._logger.info("%s", json.dumps(data))
            self._num_unwritten = lost + 1 if handler is not None and handler.failed else 0
