"""Types of fields: the values of each, or a refusal that names the path and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.errors import InvalidRequest
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body, Check, printable
from worker.requests.fields import control_parser
from worker.sampling import Control


def is_one_of(value: Any, known: Sequence[Any]) -> bool:
    """Whether ``value`` is null, or one of ``known`` and of its type: 0 is not false."""
    return value is None or any(type(value) is type(each) and value == each for each in known)


def object_at(path: str, value: Any, known: Sequence[str] | None = None) -> dict[str, Any]:
    """``value``, if it is an object, with known fields alone. Raises `FieldRefused` otherwise."""
    if not isinstance(value, dict):
        raise FieldRefused(path, f"must be an object, got {type(value).__name__}")
    for key, each in value.items():
        if known is not None and key not in known and each is not None:
            raise FieldRefused(f"{path}.{printable(key)}", f"unknown field; known are {', '.join(known)}")
    return value


def text_at(path: str, value: Any) -> str:
    """``value``, if it is a text. Raises `FieldRefused` otherwise."""
    if not isinstance(value, str):
        raise FieldRefused(path, f"must be a text, got {type(value).__name__}")
    return value


def list_at(path: str, value: Any) -> list[Any]:
    """``value``, if it is a list. Raises `FieldRefused` otherwise."""
    if not isinstance(value, list):
        raise FieldRefused(path, f"must be a list, got {type(value).__name__}")
    return value


def truth_at(path: str, value: Any) -> bool:
    """``value``, if it is true or false. Raises `FieldRefused` otherwise."""
    if not isinstance(value, bool):
        raise FieldRefused(path, f"must be true or false, got {printable(str(value))}")
    return value


def integer_at(path: str, value: Any, least: int, most: int | None = None) -> int:
    """``value``, if it is an integer within bounds. Raises `FieldRefused` otherwise."""
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise FieldRefused(path, f"must be an integer {bounds}, got {printable(str(value))}")
    return value


def text(name: str) -> Check:
    """The check of a field that is a text."""

    def check(value: Any, body: Body) -> None:
        text_at(name, value)

    return check


def given_text(name: str) -> Check:
    """The check of a field that is a text with at least one character."""

    def check(value: Any, body: Body) -> None:
        if not text_at(name, value):
            raise FieldRefused(name, "must not be empty")

    return check


def truth(name: str) -> Check:
    """The check of a field that is true or false."""

    def check(value: Any, body: Body) -> None:
        truth_at(name, value)

    return check


def count(name: str, least: int, most: int | None = None) -> Check:
    """The check of a field that is an integer within bounds."""

    def check(value: Any, body: Body) -> None:
        integer_at(name, value, least, most)

    return check


def an_object(name: str) -> Check:
    """The check of a field that is an object."""

    def check(value: Any, body: Body) -> None:
        object_at(name, value)

    return check


def of_control(control: Control) -> Check:
    """The check of a sampling control: the worker's own."""
    parse = control_parser(control)

    def check(value: Any, body: Body) -> None:
        try:
            parse(control.name, value)
        except InvalidRequest as error:
            raise FieldRefused(error.field, error.problem) from None

    return check
