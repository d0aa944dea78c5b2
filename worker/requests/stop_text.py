"""Ends an answer at the token that completes a stop string.

The frontend matches stop strings on the decoded text and cancels the request, which takes as long
as it takes: how many tokens behind the stop string came along, and count, would be chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.engines import TokenDelta


class TokenBytes(Protocol):
    """The bytes of each token of a vocabulary, ``b""`` for special tokens."""

    def __getitem__(self, token_id: int, /) -> bytes: ...


class StopText:
    """Looks for the stop strings of one answer in the bytes of its tokens.

    What it does not find, the frontend may still: nothing is matched across special tokens, which
    the frontend shows or leaves out.

    Args:
        token_bytes: Of the vocabulary.
        stops: The stop strings, none of them empty.
        min_tokens: Tokens of the answer before the frontend looks for a stop string.
        num_generated: Tokens of the answer so far.

    Attributes:
        found: Whether the answer has ended at a stop string.
    """

    def __init__(
        self, token_bytes: TokenBytes, stops: Sequence[str], min_tokens: int = 0, num_generated: int = 0
    ) -> None:
        self.found = False
        self._token_bytes = token_bytes
        self._stops = [stop.encode() for stop in stops]
        self._reach = max(map(len, self._stops)) - 1
        self._text = b""  # as far back as a stop string may have begun
        self._ignored = min_tokens - num_generated

    def end(self, delta: TokenDelta) -> None:
        """Leave out of ``delta`` what follows a stop string, and make it the last."""
        for count, token_id in enumerate(delta.token_ids, 1):
            if self._completes(token_id):
                self.found = True
                del delta.token_ids[count:]
                if delta.logprobs is not None:
                    del delta.logprobs[count:]
                delta.finish_reason, delta.stop_reason, delta.error = "stop", None, None
                return

    def _completes(self, token_id: int) -> bool:
        self._ignored -= 1
        if self._ignored > 0:
            return False
        added = self._token_bytes[token_id]
        text = self._text + added if added else b""
        self._text = text[-self._reach :] if self._reach else b""
        return any(stop in text for stop in self._stops)
