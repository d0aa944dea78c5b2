"""Pieces of a vocabulary that two others make together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from worker.models.gguf_file import GgufError

_MOST_CHARACTERS = 2**28
"""Characters of all splits at most; SentencePiece's vocabulary of 256,000 pieces has some 10**7."""


def splits(pieces: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Each piece with each left and right half, of one character at least, that are pieces too.

    Takes time in proportion to the characters of the pieces and of what it finds, however long a
    piece is.

    Raises:
        GgufError: there are absurdly many.
    """
    prefixes = _longest_prefixes(pieces)
    suffixes = {each[::-1]: found[::-1] for each, found in _longest_prefixes([each[::-1] for each in pieces]).items()}
    left_to_do = _MOST_CHARACTERS
    for piece in pieces:
        rights = {len(right): right for right in _chain(piece, suffixes)}
        for left in _chain(piece, prefixes) if rights else ():
            right = rights.get(len(piece) - len(left))
            if right is None:
                continue
            left_to_do -= len(piece)
            if left_to_do < 0:
                raise GgufError("tokenizer.ggml.tokens: its pieces can be joined in absurdly many ways")
            yield piece, left, right


def _chain(piece: str, longest: dict[str, str]) -> Iterator[str]:
    """The pieces that `piece` begins with, longest first."""
    while piece := longest.get(piece, ""):
        yield piece


def _longest_prefixes(pieces: Collection[str]) -> dict[str, str]:
    """The longest other piece that each piece begins with, where there is one.

    In alphabetical order, pieces that begin with a piece follow it, so those that may be a prefix
    of the next one are a stack.
    """
    found: dict[str, str] = {}
    stack: list[str] = []
    for piece in sorted(each for each in pieces if each):
        while stack and not piece.startswith(stack[-1]):
            stack.pop()
        if stack:
            found[piece] = stack[-1]
        stack.append(piece)
    return found
