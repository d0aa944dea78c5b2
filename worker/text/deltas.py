"""An engine's stream, as far as the text of an answer is concerned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self


class TokenBytes(Protocol):
    """The bytes of each token of a vocabulary, ``b""`` for special tokens."""

    def __getitem__(self, token_id: int, /) -> bytes: ...


class Delta(Protocol):
    """Tokens of one choice that came together; see `worker.engines.TokenDelta`."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens, oldest first."""

    @property
    def finish_reason(self) -> str | None:
        """Set once the choice has ended."""

    def stop_after(self, count: int) -> None:
        """End the choice, as ``stop``, after the first `count` tokens."""

    def prepend(self, earlier: Self) -> None:
        """Put the tokens of the delta before this one in front of its own."""
