"""Chunks that end with a whole character, so that a request may migrate after any of them.

The frontend turns tokens into text as they come, and keeps back bytes that end inside a character.
Where a request migrates, ai-dynamo 1.4.2 forgets what it kept back: the client's text would lack a
character. So no chunk ends there, and the worker that takes the request over makes the rest again.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.engines import TokenDelta

MAX_HELD = 64
"""Most tokens that are held back: a run of bytes that are no text is sent in chunks of this size,
and only text that is cut there can still lose what the frontend kept back.
"""

LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""

REPLACEMENT = "\ufffd"
"""What the frontend's decoder makes of bytes that are no character, or not yet. It keeps back text
that ends with it.
"""


class WholeCharacters:
    """Holds back the deltas of one answer while its text ends inside a character.

    Args:
        pieces: Bytes of each token id, as in `Vocabulary.token_bytes`; empty if they are unknown:
            then nothing is held back.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._tail = b""  # the text's last bytes, as many as one character may have
        self._held: TokenDelta | None = None

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """`delta` and all that was held back before it; None if it is held back as well.

        The last delta of an answer is never held back, nor is one that says nothing.
        """
        if delta.is_empty:
            return delta
        for token_id in delta.token_ids if self._pieces else ():
            self._tail = (self._tail + self._pieces[token_id])[-LONGEST_CHARACTER:]
        whole = delta if self._held is None else joined(self._held, delta)
        is_held = whole.finish_reason is None and len(whole.token_ids) < MAX_HELD and self._ends_inside()
        self._held = whole if is_held else None
        return None if is_held else whole

    def _ends_inside(self) -> bool:
        if self._tail[-1:] < b"\x80":
            return False
        return self._tail.decode(errors="replace").endswith(REPLACEMENT)


def joined(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """One delta that says what two consecutive ones of an answer say."""
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None or second.logprobs is not None:
        second.logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    second.num_cached_tokens = max(first.num_cached_tokens, second.num_cached_tokens)
    if second.num_preemptions is None:
        second.num_preemptions = first.num_preemptions
    if second.engine_data is None:
        second.engine_data = first.engine_data
    return second
