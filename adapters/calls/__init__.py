"""Formats in which models write tool calls: how each is spelled, and which one a model has."""

from adapters.calls.formats import FORMATS, NAME, NEUTRAL, NUMBER, WHITE_SPACE, CallFormat, Channels, Notation, Opening
from adapters.calls.writing import written_calls

__all__ = [
    "FORMATS",
    "NAME",
    "NEUTRAL",
    "NUMBER",
    "WHITE_SPACE",
    "CallFormat",
    "Channels",
    "Notation",
    "Opening",
    "written_calls",
]
