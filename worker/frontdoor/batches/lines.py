"""The requests of a batch: lines of a file, each a JSON object."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.strict_json import LoneSurrogate, RepeatedKey, read_object
from worker.frontdoor.values import printable

FIELDS = ("custom_id", "method", "url", "body")
MAX_LINES = 50_000
"""Requests of one batch, as OpenAI has it."""

MAX_ID = 512
"""Characters of a ``custom_id``."""

SHOWN_PROBLEMS = 50
"""Problems of one file that a batch names; one more says how many there are."""

_MARK = b"\xef\xbb\xbf"
"""Byte order mark with which some editors begin a file in UTF-8 (RFC 8259: it may be ignored)."""

ROOM_BESIDE_BODY = 64 * 1024
"""Bytes of a line beside the body of its request."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file.

    Attributes:
        number: Number of the line, from 1; blank lines count.
        data: Bytes of the line, without its end.
        end: Offset of the next line.
        is_too_long: Whether ``data`` is only the beginning.
    """

    number: int
    data: bytes
    end: int
    is_too_long: bool = False

    @property
    def is_blank(self) -> bool:
        """Whether it is no request; of one that is too long the rest may be."""
        return not (self.is_too_long or self.data.strip())


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of an input file.

    Attributes:
        code: OpenAI's code of it.
        message: One sentence.
        line: Number of the line, None for the whole file.
        param: Field of the line.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def as_json(self) -> dict[str, Any]:
        """An entry of ``errors`` of a batch."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request in a line.

    Attributes:
        custom_id: The client's id of it.
        url: Path that it is for.
        body: JSON object.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


class BadLine(Exception):
    """A line is no request.

    Args:
        code: See `Problem`.
        message: See `Problem`.
        param: See `Problem`.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def lines_of(path: Path, longest: int, offset: int = 0, number: int = 1) -> Iterator[Line]:
    """The lines of a file, of which one at a time is in memory.

    Args:
        path: The file.
        longest: Most bytes of a line; of a longer one only the beginning is read.
        offset: Offset at which the first line begins.
        number: Number of the first line.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.readline(longest + 1):
            offset += len(data)
            is_too_long = len(data) > longest and not data.endswith(b"\n")
            rest = data
            while is_too_long and rest and not rest.endswith(b"\n"):
                rest = file.readline(longest)
                offset += len(rest)
            text = data.removeprefix(_MARK) if offset == len(data) else data
            yield Line(number, text.rstrip(b"\r\n"), offset, is_too_long)
            number += 1


def request_of(line: Line, endpoint: str) -> LineRequest:
    """The request in a line of a batch for ``endpoint``. Raises `BadLine`."""
    if line.is_too_long:
        raise BadLine("line_too_long", f"the line is longer than {len(line.data)} bytes")
    try:
        found = read_object(line.data)
    except RepeatedKey as error:
        raise BadLine("invalid_json_line", f"{error.path}: occurs twice in one object", error.path) from None
    except LoneSurrogate as error:
        raise BadLine("invalid_json_line", f"{error.path}: has half of a surrogate pair", error.path) from None
    except ValueError as error:
        raise BadLine("invalid_json_line", f"the line {error}") from None
    for name in found:
        if name not in FIELDS:
            raise BadLine(
                "unknown_parameter", f"{printable(name)}: no field of a line; it has {', '.join(FIELDS)}", name[:60]
            )
    for name in FIELDS:
        if name not in found:
            raise BadLine("missing_required_parameter", f"{name}: is missing", name)
    custom_id, body = found["custom_id"], found["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID:
        raise BadLine("invalid_custom_id", f"custom_id: must be a string of 1 to {MAX_ID} characters", "custom_id")
    if found["method"] != "POST":
        raise BadLine("invalid_method", "method: must be POST", "method")
    if found["url"] != endpoint:
        raise BadLine("invalid_url", f"url: must be the endpoint of the batch, {endpoint}", "url")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body: must be a JSON object", "body")
    if not isinstance(body.get("model"), str):
        raise BadLine("missing_required_parameter", "body.model: must be the name of a model", "body.model")
    if body.get("stream") not in (None, False):
        raise BadLine("unsupported_parameter", "body.stream: must be false: the answer comes in a file", "body.stream")
    if body.get("background") not in (None, False):
        problem = "body.background: must be false: its answer would be a response that has not begun"
        raise BadLine("unsupported_parameter", problem, "body.background")
    return LineRequest(custom_id, endpoint, body)


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that has been checked.

    Attributes:
        total: Number of its requests.
        model: The model of all of them, None if they name several.
        problems: The first problems; none: it can be run.
    """

    total: int
    model: str | None
    problems: list[Problem]

    @property
    def lacks_models_alone(self) -> bool:
        """Whether nothing is wrong but that models are not served, as far as problems are named."""
        codes = {problem.code for problem in self.problems}
        return "model_not_found" in codes and codes <= {"model_not_found", "too_many_errors"}


def checked(path: Path, endpoint: str, longest: int, models: Collection[str]) -> Checked:
    """Check every line of a file.

    Args:
        path: The file.
        endpoint: Path that all of its requests must be for.
        longest: Most bytes of a line.
        models: Names of the models that are served.
    """
    problems: list[Problem] = []
    num_problems = total = 0
    first_line_of: dict[str, int] = {}
    used: set[str] = set()
    for line in lines_of(path, longest):
        if line.is_blank:
            continue
        total += 1
        if total > MAX_LINES:
            problems = [Problem("too_many_requests", f"the file has more than {MAX_LINES} requests")]
            return Checked(total, None, problems)
        try:
            request = request_of(line, endpoint)
            _check_model(request, models)
            _check_unique(request.custom_id, line.number, first_line_of)
            used.add(request.body["model"])
        except BadLine as error:
            num_problems += 1
            if num_problems <= SHOWN_PROBLEMS:
                problems.append(Problem(error.code, error.message, line.number, error.param))
    if num_problems > SHOWN_PROBLEMS:
        problems.append(Problem("too_many_errors", f"{num_problems - SHOWN_PROBLEMS} more lines have problems"))
    if not total:
        problems.append(Problem("empty_file", "the file has no request"))
    return Checked(total, next(iter(used)) if len(used) == 1 else None, problems)


def _check_model(request: LineRequest, models: Collection[str]) -> None:
    model = request.body["model"]
    if model not in models:
        raise BadLine("model_not_found", f"body.model: {printable(model)} is not served here", "body.model")


def _check_unique(custom_id: str, number: int, first_line_of: dict[str, int]) -> None:
    first = first_line_of.setdefault(custom_id, number)
    if first != number:
        problem = f"custom_id: {printable(custom_id)} is that of line {first}, too"
        raise BadLine("duplicate_custom_id", problem, "custom_id")
