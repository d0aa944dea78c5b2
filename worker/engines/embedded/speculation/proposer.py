"""The proposer protocol: who drafts the tokens that a step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Drafts the next tokens of one request.

    A draft is a guess: what it holds changes how many tokens a step gives, never which.

    Attributes:
        name: Label of its metrics.
    """

    name: str

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        """Tokens that may follow `history`, the likeliest first one first; none for no draft.

        Args:
            history: Prompt and generated token ids, oldest first. From call to call it grows, or is
                cut off. One that was cut off and has grown past its old length since need not be
                noticed.
            limit: Most tokens to draft, at least 1.
        """
