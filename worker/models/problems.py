"""Refusals of a model's files: one line each, with what was found there."""

from __future__ import annotations

_LONGEST_MESSAGE = 600
_LONGEST_VALUE = 60


class ModelFileError(Exception):
    """A file of a model is damaged or not served; one line that names the file and, where there is
    one, the key or tensor, without the directory.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:_LONGEST_MESSAGE])  # names of a file may hold anything


def shown(value: object) -> str:
    """A value of a file in an error: not more than fits a line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = "an integer of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
