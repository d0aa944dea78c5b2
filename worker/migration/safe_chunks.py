"""Chunks after which a request can migrate without losing text in the frontend.

The frontend decodes the tokens of each worker's stream apart. Text that it still withholds when a
worker dies, because a character is not complete or a stop string may have begun, is lost in
ai-dynamo 1.4.2. So tokens whose text would be withheld are sent together with those that complete
it: the client sees no difference, and a worker that takes the request over generates them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.engines import TokenDelta
from worker.requests.stop_text import TokenBytes

MAX_HELD = 64
"""Tokens held back at most: a model that writes no text at all would never send one."""


class SafeChunks:
    """Holds tokens of one stream back until a chunk may end.

    Args:
        token_bytes: Of the vocabulary.
        stops: The request's stop strings.
    """

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._stops = [stop.encode() for stop in stops if stop]
        self._reach = max(map(len, self._stops), default=1) - 1
        self._held: TokenDelta | None = None
        self._num_bytes_held = 0
        self._text = b""  # as far back as a stop string may have begun, and all that is held

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """What may be sent now that ``delta`` has come; None if its tokens are held back."""
        added = b"".join([self._token_bytes[token_id] for token_id in delta.token_ids])
        if not self._stops and self._held is None and added.isascii():
            return delta
        self._text += added
        self._num_bytes_held += len(added)
        merged = delta if self._held is None else _merged(self._held, delta)
        is_safe = delta.finish_reason is not None or not merged.token_ids or len(merged.token_ids) >= MAX_HELD
        if not is_safe and self._is_withheld():
            self._held = merged
            return None
        self._held = None
        self._num_bytes_held = 0
        self._text = self._text[-self._reach :] if self._reach else b""
        return merged

    def _is_withheld(self) -> bool:
        """Whether the frontend would withhold some of the text now.

        A whole stop string in it changes nothing: the answer ends there, or goes on, since it is
        shorter than ``min_tokens``, and another one may begin.
        """
        text, stops = self._text, self._stops
        held = text[len(text) - self._num_bytes_held :]
        if held.decode(errors="replace").endswith("\ufffd"):
            return True
        return any(
            stop.startswith(text[-length:]) for stop in stops for length in range(1, min(len(stop), len(text) + 1))
        )


def _merged(first: TokenDelta, second: TokenDelta) -> TokenDelta:
    """``second`` with the tokens of ``first`` before its own; the rest is cumulative."""
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None or second.logprobs is not None:
        second.logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    second.num_cached_tokens = max(first.num_cached_tokens, second.num_cached_tokens)
    second.engine_data = second.engine_data if second.engine_data is not None else first.engine_data
    return second
