"""The results of a batch as files of JSON lines, one for the answers and one for the errors."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from worker.frontdoor.batches.lines import BadLine, Line, lines_of, request_of
from worker.frontdoor.batches.objects import Result, Status, StoredBatch
from worker.frontdoor.batches.store_thread import StoreThread

AT_ONCE = 64
"""Results that are in memory at a time."""

NOT_RUN: Mapping[str, str] = {
    "expired": "the request was not run before the completion window of its batch had passed",
    "cancelled": "the request was not run before its batch was cancelled",
}
"""Message of the error of a request that was not run, by the status of its batch."""


@dataclass(frozen=True, slots=True)
class Output:
    """The results of a batch, in `StoredFiles.incoming`.

    Attributes:
        answers: File of the answers; None if there is none.
        errors: File of the errors; None if there is none.
        num_unanswered: Number of the lines that were not run.
    """

    answers: Path | None
    errors: Path | None
    num_unanswered: int

    def delete(self) -> None:
        """Delete the files, as far as they have not been moved to their place."""
        for path in (self.answers, self.errors):
            if path is not None:
                path.unlink(missing_ok=True)


async def write_output(store: StoreThread, batch: StoredBatch, status: Status, longest: int) -> Output:
    """Write every line's result, in the order of the input.

    Args:
        store: Store with the results.
        batch: The batch.
        status: The status that it is about to end with.
        longest: Most bytes of a line of the input.
    """
    name = secrets.token_hex(16)
    paths = [store.files.incoming / f"{name}.{kind}" for kind in ("answers", "errors")]
    num_unanswered = 0
    try:
        with ExitStack() as stack:
            answers, errors = [stack.enter_context(path.open("wb")) for path in paths]
            lines = lines_of(store.files.path(batch.input_file_id), longest)
            while block := await asyncio.to_thread(_block, lines):
                results = await store.do(store.batches.results, batch.id, block[0].number, block[-1].number)
                await asyncio.to_thread(_write, batch, status, block, results, answers, errors)
                num_unanswered += len(block) - len(results)
            sizes = [answers.tell(), errors.tell()]
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    for path, size in zip(paths, sizes, strict=True):
        if not size:
            path.unlink()
    return Output(paths[0] if sizes[0] else None, paths[1] if sizes[1] else None, num_unanswered)


def _block(lines: Iterator[Line]) -> list[Line]:
    return list(islice((line for line in lines if not line.is_blank), AT_ONCE))


def _write(
    batch: StoredBatch,
    status: Status,
    block: Sequence[Line],
    results: Mapping[int, Result],
    answers: BinaryIO,
    errors: BinaryIO,
) -> None:
    for line in block:
        result = results.get(line.number)
        file = answers if result is not None and result.succeeded else errors
        file.write(_written(batch, line, result, status))


def _written(batch: StoredBatch, line: Line, result: Result | None, status: Status) -> bytes:
    """A line of the output."""
    try:
        custom_id = request_of(line, batch.endpoint).custom_id
    except BadLine:  # a later version takes fewer lines than the one that began the batch
        custom_id = None
    names = _encoded({"id": f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}", "custom_id": custom_id})
    if result is None:
        response, error = b"null", _encoded({"code": f"batch_{status}", "message": NOT_RUN[status]})
    else:
        answered = _encoded({"status_code": result.status_code, "request_id": result.request_id})
        # the body as it was kept: it may be nested as deep as can be read
        response, error = b'%b,"body":%b}' % (answered[:-1], result.body), b"null"
    return b'%b,"response":%b,"error":%b}\n' % (names[:-1], response, error)


def _encoded(found: dict[str, Any]) -> bytes:
    """JSON in ASCII: clients split texts into lines at more characters than JSON Lines does."""
    return json.dumps(found, separators=(",", ":")).encode()
