"""The proposer protocol: who drafts the tokens that a step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        tokens: Drafted tokens in order; empty for no draft.
        matched: Number of tokens of the history that were found where the draft was taken from; 0
            if it is not a copy.
    """

    tokens: Sequence[int] = ()
    matched: int = 0


NO_DRAFT = Draft()


class Proposer(Protocol):
    """Drafts the next tokens of one request.

    A draft is a guess: what it holds changes how many tokens a step gives, never which.

    Attributes:
        name: Label of its metrics.
        is_model: Whether every drafted token takes a forward pass of its own, so that no more are
            asked for than are computed.
    """

    name: str
    is_model: bool

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """Tokens that may follow `history`.

        Args:
            history: Prompt and generated token ids, oldest first. From call to call it grows, or is
                cut off. One that was cut off and has grown past its old length since need not be
                noticed.
            limit: Most tokens to draft, at least 1.
        """


def repeat(tokens: Sequence[int], end: int, limit: int) -> Sequence[int]:
    """Tokens that follow an earlier place of a text, if it continues as it did there.

    Args:
        tokens: The text, whose end matches that place.
        end: Past the last token of the place; where the text ends, the draft continues with itself,
            so that a loop is drafted at full length.
        limit: Tokens.
    """
    found = tokens[end : end + limit]
    if not found or len(found) == limit:
        return found
    return [found[index % len(found)] for index in range(limit)]
