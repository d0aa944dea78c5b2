"""Types of fields: the values of each, or a refusal that names the path and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.errors import InvalidRequest
from worker.frontdoor import values
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body, Check
from worker.requests.fields import control_parser
from worker.sampling import Control


def is_one_of(value: Any, known: Sequence[Any]) -> bool:
    """Whether ``value`` is null, or one of ``known`` and of its type: 0 is not false."""
    return value is None or any(type(value) is type(each) and value == each for each in known)


def text(name: str) -> Check:
    """The check of a field that is a text."""

    def check(value: Any, body: Body) -> None:
        values.text(name, value)

    return check


def given_text(name: str) -> Check:
    """The check of a field that is a text with at least one character."""

    def check(value: Any, body: Body) -> None:
        if not values.text(name, value):
            raise FieldRefused(name, "must not be empty")

    return check


def truth(name: str) -> Check:
    """The check of a field that is true or false."""

    def check(value: Any, body: Body) -> None:
        values.truth(name, value)

    return check


def count(name: str, least: int, most: int | None = None) -> Check:
    """The check of a field that is an integer within bounds."""

    def check(value: Any, body: Body) -> None:
        values.integer(name, value, least, most)

    return check


def an_object(name: str) -> Check:
    """The check of a field that is an object."""

    def check(value: Any, body: Body) -> None:
        values.object_of(name, value)

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
