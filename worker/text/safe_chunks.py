"""Chunks after which a request can migrate without losing text in the frontend.

The frontend decodes the tokens of each worker's stream apart. Text that it still withholds when a
worker dies, because a character is not complete or a stop string may have begun, is lost in
ai-dynamo 1.4.2. So tokens whose text would be withheld are sent together with those that complete
it: the client sees no difference, and a worker that takes the request over generates them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from worker.text.begun_stops import BegunStops
from worker.text.deltas import Delta, TokenBytes

D = TypeVar("D", bound=Delta)

MAX_HELD = 64
"""Tokens held back at most: a model that writes no text at all would never send one."""


class SafeChunks(Generic[D]):
    """Holds tokens of one stream back until a chunk may end.

    Args:
        token_bytes: Bytes of the vocabulary's tokens.
        stops: The request's stop strings.
    """

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._has_stops = any(stops)
        self._begun = BegunStops([stop.encode() for stop in stops if stop])
        self._held: D | None = None
        self._held_bytes = b""

    def take(self, delta: D) -> D | None:
        """Take the next delta; returns what may be sent, None if its tokens are held back."""
        added = b"".join([self._token_bytes[token_id] for token_id in delta.token_ids])
        if not self._has_stops and self._held is None and added.isascii():
            return delta
        self._held_bytes += added
        self._begun.append(added)
        if self._held is not None:
            delta.prepend(self._held)
        is_safe = delta.finish_reason is not None or not delta.token_ids or len(delta.token_ids) >= MAX_HELD
        if not is_safe and self._is_withheld():
            self._held = delta
            return None
        self._held = None
        self._held_bytes = b""
        return delta

    def _is_withheld(self) -> bool:
        """Whether the frontend would withhold some of the text now.

        A whole stop string in it changes nothing: the answer ends there, or goes on, since it is
        shorter than ``min_tokens``, and another one may begin.
        """
        return bool(self._begun.length) or self._held_bytes.decode(errors="replace").endswith("\ufffd")
