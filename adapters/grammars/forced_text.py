"""The text that a grammar forces where a request stands, and the tokens in which it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from llguidance import LLMatcher

from adapters.grammars.compiler import is_text
from adapters.vocabulary import Vocabulary, byte_index

MAX_ALLOWED = 64
"""A text begins with fewer tokens than this: where a mask has more, they are not parts of one."""

_LOOKED_AT = 256
"""Bytes of a forced text that are tokenized; the first tokens do not depend on what is behind."""

_KEPT = 4096
"""Forced texts of which each vocabulary keeps the tokens: requests share their schemas."""

_LONGEST_ID = 24
"""Bytes of the spelling of a token that is an id, not a text, at most."""

_FORCED_ID = re.compile(rb"\xff\[(\d+)\]")
"""Spelling of a token that is an id, not a text, in the bytes that llguidance forces."""


class ForcedText:
    """The text that a grammar forces from the position of one request on, and its usual tokens.

    The usual tokens of a text are those in which the tokenizer writes it. A function of the
    position in the grammar: the text is kept while tokens of it are taken, only to save time.

    Args:
        vocabulary: The model's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode: Callable[[str], tuple[int, ...]] = vocabulary.derived(
            "forced_texts", lambda: lru_cache(_KEPT)(lambda text: tuple(vocabulary.encode(text)))
        )
        self._token_bytes = vocabulary.token_bytes
        self._beginnings = byte_index(vocabulary).beginnings
        self._left: bytes | None = None

    def forget(self) -> None:
        """The request stands elsewhere."""
        self._left = None

    def take(self, token_id: int) -> None:
        """The request has moved by a token."""
        written = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        left = self._left or b""
        self._left = left[len(written) :] if is_text(written) and left.startswith(written) else None
        self._left = self._left or None  # behind the text the grammar may force another one

    def first_token(self, copied: Callable[[], LLMatcher], allowed: Sequence[int]) -> int | None:
        """The usual token with which the forced text goes on; None if there is no such text.

        Also None near the end of the text, where a token may reach beyond it: which one it is says
        something about what follows.

        Args:
            copied: Returns a copy of the request's matcher.
            allowed: The tokens that the grammar allows, fewer than `MAX_ALLOWED`.
        """
        longest = max(len(self._token_bytes[token_id]) for token_id in allowed)
        text = _first_part(self._text(copied), max(longest, _LOOKED_AT))
        if longest > len(text):
            return None
        found = self._first_of(text)
        return found if found in allowed else None

    def sure_token(self) -> int | None:
        """The result of `first_token`, where it is known without the tokens that the grammar
        allows: within a text, all with which it begins, unless they are never sampled.

        None where it is not known; also where it is one that is never sampled.
        """
        if self._left is None:
            return None
        text = _first_part(self._left, _LOOKED_AT)
        most = self._beginnings.most_within(text)
        if most is None or most >= MAX_ALLOWED:
            return None
        found = self._first_of(text)
        written = b"" if found is None else self._token_bytes[found]
        return found if written and text.startswith(written) else None

    def _first_of(self, text: bytes) -> int | None:
        try:
            found = self._encode(text[:_LOOKED_AT].decode(errors="ignore"))
        except ValueError:  # it begins within a character
            return None
        return found[0] if found else None

    def tokens(self, copied: Callable[[], LLMatcher], limit: int) -> Sequence[int]:
        """Guess of the next tokens, at most ``limit``: the usual ones of the forced text.

        Raises:
            ValueError: it cannot be written in tokens of this vocabulary.
        """
        found, text = list[int](), ""
        for index, part in enumerate(_FORCED_ID.split(self._text(copied)[:_LOOKED_AT])):
            if index % 2:
                found.append(int(part))
            else:
                text = part.decode(errors="ignore")  # it may end inside a character
                found += self._encode(text)
        if text and (text[-1].isalnum() or text[-1].isspace()):
            ahead = copied()
            ahead.consume_tokens(found)
            if not ahead.is_stopped():
                del found[-1]  # the word may continue
        return found[:limit]

    def _text(self, copied: Callable[[], LLMatcher]) -> bytes:
        if self._left is None:
            self._left = copied().compute_ff_bytes()  # of a copy, which keeps the bytes, or an error
        return self._left


def _first_part(text: bytes, read: int) -> bytes:
    """The text before the first token that is an id; at least `read` bytes of a longer one."""
    return _FORCED_ID.split(text[: read + _LONGEST_ID], maxsplit=1)[0]
