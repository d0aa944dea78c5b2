"""Pieces of an answer in which a model may have written tool calls, in the order of its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
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
    found = list[Piece]()
    for _, group in groupby(pieces, key=_kind):
        first, *others = group
        if others and not isinstance(first, CallBegin):
            texts = [each.text for each in (first, *others) if not isinstance(each, CallBegin)]
            first = replace(first, text="".join(texts))
        found.append(first)
    return found


def _kind(piece: Piece) -> tuple[type, int]:
    """Key that pieces of one text have in common; the beginning of each call has its own."""
    return type(piece), piece.index if isinstance(piece, CallBegin | CallArguments) else 0
