"""Pieces of an answer on their way out, some of which wait until it is certain what they are."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.calls import WHITE_SPACE
from worker.frontdoor.calls.pieces import CallArguments, CallBegin, Piece, TextPiece, ThinkingPiece, joined


@dataclass(frozen=True, slots=True)
class Mark:
    """State to which `Output.rewind` returns."""

    blank: str | None
    num_calls: int
    is_complete: bool


class Output:
    """Pieces of one answer.

    White space that begins a text waits for the rest, and is dropped if a call follows.

    Attributes:
        thinks: Whether text is thinking.
        num_calls: Calls that have begun.
        is_complete: Whether the last of them is complete.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._held: list[Piece] | None = None
        self._blank: str | None = ""  # white space that begins a text, None behind other characters
        self.thinks = False
        self.num_calls = 0
        self.is_complete = True

    def say(self, text: str) -> None:
        """Add text."""
        if self.thinks:
            self._add(ThinkingPiece(text), text)
            return
        if self._blank is not None and not text.strip(WHITE_SPACE):
            self._blank += text
            return
        text, self._blank = (self._blank or "") + text, None
        self._add(TextPiece(text), text)

    def begin_call(self, name: str) -> None:
        """Begin a call of the function ``name``."""
        self._blank = ""
        self.is_complete = False
        self._add(CallBegin(self.num_calls, name), name)
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._add(CallArguments(self.num_calls - 1, text), text)

    def _add(self, piece: Piece, text: str) -> None:
        if text:
            (self._pieces if self._held is None else self._held).append(piece)

    def hold(self) -> None:
        """Hold back what comes, until `release` or `rewind`."""
        self._held = []

    def release(self) -> None:
        """Let go what is held back."""
        self._pieces += self._held or ()
        self._held = None

    def mark(self) -> Mark:
        """The state now."""
        return Mark(self._blank, self.num_calls, self.is_complete)

    def rewind(self, mark: Mark) -> None:
        """Drop what is held back, and return to the state ``mark``."""
        self._held = None
        self._blank, self.num_calls, self.is_complete = mark.blank, mark.num_calls, mark.is_complete

    def taken(self) -> list[Piece]:
        """The pieces that are certain."""
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def end(self) -> None:
        """Decide on white space at the end of an answer, which is text if there is nothing else."""
        if self._blank and not self.num_calls:
            self._pieces.append(TextPiece(self._blank))
