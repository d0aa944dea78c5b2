"""The request channel: which processors a request selects, as bounded JSON data.

An annotation ``logits_processors:{json}`` or a metadata value under ``logits-processors`` holds::

    {"version": 1, "processors": [{"name": "min_tokens", "args": {"n": 8, "scope": "answer"}}],
     "receipt": true, "deadline": 1790000000.5, "order": ["min_p", "temperature"],
     "speculation": false, "prediction": "def f(a):", "choice": 1}

Names and JSON data only: no code, no import path and no pickle ever comes from a request. Parsing
is a pure function; whatever the input is, it gives a `Selection` or raises `SelectionError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from adapters.contract import Scope
from adapters.strict_json import Ambiguous, decoder

ANNOTATION = "logits_processors:"
"""Prefix of the annotation, in ``nvext.annotations``."""

METADATA_KEY = "logits-processors"
"""Key in the request's metadata; the header is ``x-dynamo-meta-logits-processors``."""

VERSION = 1
MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_PROCESSORS = 16
MAX_DEADLINE = 2**33
"""Seconds since 1970; a deadline in milliseconds is beyond it."""

MAX_CHOICES = 128
"""Answers to one prompt, as in OpenAI's API."""

MIN_INT, MAX_INT = -(2**63), 2**64 - 1
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(/[a-z][a-z0-9_]{0,63})?")
"""A processor's name, optionally with a third party's namespace: ``acme/house_style``."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

ReceiptLevel = Literal[False, True, "debug"]

Origin = Literal["client", "default", "mandatory"]
"""Origin of a processor in a chain: the client, or the operator's policy, which has two kinds."""

_FIELDS = ("version", "processors", "receipt", "deadline", "order", "speculation", "prediction", "choice")
_ENTRY_FIELDS = ("name", "args")
_SHOWN = 60
_PATH = 200
_SCALARS = frozenset((int, float, bool, type(None)))


class SelectionError(ValueError):
    """The request's selection cannot be honoured: a caller error.

    Args:
        path: JSON path, ``processors[1].args.tokens``; empty for the whole.
        problem: Expected value and the given one.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[SelectionError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


@dataclass(frozen=True, slots=True)
class Requested:
    """One processor as requested; neither its name nor its arguments have been checked.

    Attributes:
        name: Name in the catalogue.
        args: JSON data, without ``scope``.
        scope: Part of the generation that it applies to.
        path: JSON path in the request; prefix of the path in every error about it.
        origin: The client or the operator's policy.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    scope: Scope = "all"
    path: str = ""
    origin: Origin = "client"


@dataclass(frozen=True, slots=True)
class Selection:
    """The processors that a request selects, in order, with its receipt level and deadline.

    Attributes:
        processors: Processors in the order of the request.
        receipt: Whether it wants a receipt; ``"debug"``: with per-token attribution.
        deadline: Latest end of the answer, seconds since 1970; a stop criterion.
        order: Names of processors of the stages temperature and truncation, in the order in which
            they are applied; those not named are applied after them, by the order law.
        speculation: Whether an engine that can may draft tokens, which changes none of them.
        prediction: Text that much of the answer is likely to be, from which an engine that can
            drafts tokens; it changes none of them.
        choice: Index of the answer, where several requests ask for answers to one prompt; with the
            same seed each has random numbers of its own.
    """

    processors: tuple[Requested, ...] = ()
    receipt: ReceiptLevel = False
    deadline: float | None = None
    order: tuple[str, ...] = ()
    speculation: bool = True
    prediction: str = ""
    choice: int = 0

    def with_processors(self, *processors: Requested) -> Selection:
        """This selection with more processors at its end."""
        return replace(self, processors=(*self.processors, *processors)) if processors else self


def from_channels(annotations: Sequence[str] = (), metadata: Mapping[str, str] | None = None) -> Selection | None:
    """The selection of a request, None if it has none.

    Args:
        annotations: The request's annotations; unrelated ones are ignored.
        metadata: The request's metadata.

    Raises:
        SelectionError: it is malformed, or there is more than one.
    """
    found = [text for text in annotations if text.startswith(ANNOTATION)]
    header = (metadata or {}).get(METADATA_KEY)
    if len(found) + (header is not None) > 1:
        raise SelectionError("", "processors are selected more than once; give one annotation or one header")
    if found:
        return parse_selection(found[0][len(ANNOTATION) :])
    return None if header is None else parse_selection(header)


def parse_selection(text: str) -> Selection:
    """The selection that ``text`` holds.

    Raises:
        SelectionError: it is not JSON within the limits, or not a selection.
    """
    data = _load(text)
    _fields(data, _FIELDS, "")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise SelectionError("version", f"expected {VERSION}, got {shown(data.get('version'))}")
    processors = data.get("processors", [])
    if not isinstance(processors, list):
        raise SelectionError("processors", f"expected a list, got {shown(processors)}")
    if len(processors) > MAX_PROCESSORS:
        raise SelectionError("processors", f"expected at most {MAX_PROCESSORS}, got {len(processors)}")
    receipt = data.get("receipt", False)
    if not isinstance(receipt, bool) and receipt != "debug":
        raise SelectionError("receipt", f'expected true, false or "debug", got {shown(receipt)}')
    speculation = data.get("speculation", True)
    if not isinstance(speculation, bool):
        raise SelectionError("speculation", f"expected true or false, got {shown(speculation)}")
    prediction = data.get("prediction", "")
    if not isinstance(prediction, str):
        raise SelectionError("prediction", f"expected a text, got {shown(prediction)}")
    _check_data(prediction, "prediction", 2)
    choice = data.get("choice", 0)
    if type(choice) is not int or not 0 <= choice < MAX_CHOICES:
        raise SelectionError("choice", f"expected an integer 0 to {MAX_CHOICES - 1}, got {shown(choice)}")
    requested = [parse_processor(entry, f"processors[{i}]") for i, entry in enumerate(processors)]
    deadline, order = _deadline(data.get("deadline")), _order(data.get("order", []))
    return Selection(tuple(requested), cast(ReceiptLevel, receipt), deadline, order, speculation, prediction, choice)


def _order(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_PROCESSORS:
        raise SelectionError("order", f"expected a list of at most {MAX_PROCESSORS} names, got {shown(value)}")
    for i, name in enumerate(value):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SelectionError(f"order[{i}]", f"expected a processor's name, got {shown(name)}")
        if name in value[:i]:
            raise SelectionError(f"order[{i}]", f"{name} is named twice")
    return tuple(value)


def _deadline(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_DEADLINE:
        raise SelectionError("deadline", f"expected seconds since 1970, at most {MAX_DEADLINE}, got {shown(value)}")
    return float(value)


def parse_processor(entry: object, path: str) -> Requested:
    """Parse ``{"name": ..., "args": {...}}``, from a request or a policy file.

    Raises:
        SelectionError: it is malformed.
    """
    _fields(entry, _ENTRY_FIELDS, path)
    assert isinstance(entry, dict)
    name, args = entry.get("name"), entry.get("args", {})
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SelectionError(f"{path}.name", f"expected a processor's name, got {shown(name)}")
    if not isinstance(args, dict):
        raise SelectionError(f"{path}.args", f"expected an object, got {shown(args)}")
    _check_data(args, f"{path}.args", 4)
    scope = args.get("scope", "all")
    if scope not in SCOPES:
        raise SelectionError(f"{path}.args.scope", f"expected one of {', '.join(SCOPES)}, got {shown(scope)}")
    return Requested(name, {key: value for key, value in args.items() if key != "scope"}, scope, path)


def shown(value: object) -> str:
    """``value`` for an error message, as short JSON."""
    text = json.dumps(value, default=repr) if not isinstance(value, list | dict) else type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _load(text: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES or _num_bytes(text) > MAX_BYTES:
        raise SelectionError("", f"expected at most {MAX_BYTES} bytes, got more")
    if not _OPENING.match(text):
        raise SelectionError("", "expected a JSON object")
    try:
        data = (_CHECKING_NUMBERS if _LARGE.search(text) else _PLAIN).decode(text)
    except Ambiguous as error:
        raise SelectionError("", str(error)) from None
    except RecursionError:
        raise SelectionError("", f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise SelectionError("", f"is not JSON: {error}") from None
    assert isinstance(data, dict)
    return data


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise SelectionError("", "is not valid Unicode") from None


def _fields(data: object, known: Sequence[str], path: str) -> None:
    if not isinstance(data, dict):
        raise SelectionError(path, f"expected an object, got {shown(data)}")
    for key in data:
        if key not in known:
            raise SelectionError(path, f"unknown field {shown(key)}; known are {', '.join(known)}")


def _check_data(value: object, path: str, depth: int) -> None:
    """Refuse JSON that later stages cannot carry: deep nesting, lone surrogates, NUL.

    Args:
        value: JSON data.
        path: JSON path of the value.
        depth: Depth of the value; the outermost object of the request is at 1.
    """
    flaw = _flaw(value, depth)
    if flaw is not None:
        raise SelectionError((path + flaw[0])[:_PATH], flaw[1])


def _flaw(value: object, depth: int) -> tuple[str, str] | None:
    """Path below ``value`` and problem of the first element to refuse, None if there is none."""
    if isinstance(value, str):
        problem = _flaw_of_text(value)
        return None if problem is None else ("", problem)
    if not isinstance(value, dict | list):
        return None
    if depth > MAX_DEPTH:
        return "", f"is nested more than {MAX_DEPTH} deep"
    if isinstance(value, dict):
        for key in value:
            problem = _flaw_of_text(str(key))  # a policy file may hold integers as keys
            if problem is not None:
                return "", f"in a key: {problem}"
    children = value.values() if isinstance(value, dict) else value
    if _SCALARS.issuperset(map(type, children)):
        return None
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        flaw = _flaw(child, depth + 1)
        if flaw is not None:
            return (f"[{key}]" if isinstance(value, list) else f".{key}") + flaw[0], flaw[1]
    return None


def _flaw_of_text(text: str) -> str | None:
    if "\0" in text:
        return "a text must not hold NUL"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a text holds half of a surrogate pair"
    return None


def _integer(digits: str) -> int:
    if len(digits) > 20 or not MIN_INT <= int(digits) <= MAX_INT:
        raise Ambiguous(f"the integer {shown(digits)} is out of range")
    return int(digits)


_OPENING = re.compile(r"[ \t\r\n]*\{")
_LARGE = re.compile(r"[0-9]{19}|[0-9][eE]")
"""Matches every text with a number out of range.

Without a match the decoder's number hooks, a Python call per number, are not needed.
"""

_PLAIN = decoder(checks_floats=False)
_CHECKING_NUMBERS = decoder(_integer)
