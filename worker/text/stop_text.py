"""Ends an answer at the token that completes a stop string.

The frontend matches stop strings on the decoded text and cancels the request, which takes as long
as it takes: how many tokens behind the stop string came along, and count, would be chance.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence

from worker.text.deltas import Delta, TokenBytes
from worker.text.stop_strings import StopStrings

MOST_PARTS = 3
"""Tokens that a character can have begun in, without its last byte."""


class StopText:
    """Looks for the stop strings of one answer in the bytes of its tokens.

    What it does not find, the frontend may still: nothing is matched across special tokens, which
    the frontend shows or leaves out.

    Args:
        token_bytes: Bytes of the vocabulary's tokens.
        stops: The stop strings, none of them empty.
        min_tokens: Tokens of the answer before the frontend looks for a stop string.
        generated: Tokens of the answer so far, in which a stop string may have begun.
        hidden: Tokens that end the answer and are no part of it, so that they complete no stop
            string.

    Attributes:
        stopped_by: The stop string at which the answer has ended, None while there is none.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stops: Sequence[str],
        min_tokens: int = 0,
        generated: Sequence[int] = (),
        hidden: Collection[int] = frozenset(),
    ) -> None:
        self.stopped_by: str | None = None
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._stops = StopStrings([stop.encode() for stop in stops])
        self._ignored = min_tokens - len(generated)
        first = max(0, min_tokens - 1)
        self._text = b""  # as far back as a stop string may have begun
        for token_id in generated[:first][-MOST_PARTS:]:
            self._ignore(token_id)
        self._text = self._tail_of(generated[first:])

    @property
    def found(self) -> bool:
        """Whether the answer has ended at a stop string."""
        return self.stopped_by is not None

    def end(self, delta: Delta) -> None:
        """Leave out of ``delta`` what follows a stop string, and make it the last."""
        for count, token_id in enumerate(delta.token_ids, 1):
            if token_id not in self._hidden and self._completes(token_id):
                delta.stop_after(count)
                return

    def _tail_of(self, token_ids: Sequence[int]) -> bytes:
        """The end of the text of tokens, as far back as a stop string may have begun."""
        text = b""
        for token_id in reversed(token_ids):
            piece = self._token_bytes[token_id]
            text = piece + text
            if not piece or len(self._stops.tail(text)) < len(text):
                break
        else:
            text = self._text + text
        return self._stops.tail(text)

    def _ignore(self, token_id: int) -> None:
        """Take a token of too few: a stop string may begin with a character that it begins."""
        added = self._token_bytes[token_id]
        self._text = _begun_character(self._text + added) if added else b""

    def _completes(self, token_id: int) -> bool:
        self._ignored -= 1
        if self._ignored > 0:
            self._ignore(token_id)
            return False
        added = self._token_bytes[token_id]
        text = self._text + added if added else b""
        self._text = self._stops.tail(text)
        found = self._stops.first(text, len(text) - len(added))
        if found is not None:
            start, end = found
            self.stopped_by = text[start:end].decode()
        return found is not None


def _begun_character(text: bytes) -> bytes:
    """The end of a text that is the beginning of a character."""
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return decoder.getstate()[0]
