"""Pieces of an answer in which a model may have written tool calls, in the order of its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingPiece:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Beginning of a call; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, a JSON object."""

    index: int
    text: str


Piece: TypeAlias = TextPiece | ThinkingPiece | CallBegin | CallArguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, those of one kind that follow each other put together."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, CallArguments) and isinstance(last, CallArguments) and piece.index == last.index:
            found[-1] = replace(last, text=last.text + piece.text)
        elif isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            found[-1] = TextPiece(last.text + piece.text)
        elif isinstance(piece, ThinkingPiece) and isinstance(last, ThinkingPiece):
            found[-1] = ThinkingPiece(last.text + piece.text)
        else:
            found.append(piece)
    return found
