"""The text of a growing answer: incremental detokenisation, and stop strings across tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Text of token ids; invalid UTF-8 and an incomplete last character become U+FFFD."""

_UNFINISHED = "\ufffd"
_CONTEXT = 6
_WINDOW = 16

_LONGEST = 32
"""Longest window that does not end in a whole character; a character has at most four bytes."""

_KEPT = 8
"""Newest tokens of such a window that are kept, more than a character can lack."""

_STRAY = 4
"""Tokens of which some are invalid UTF-8 whatever follows."""


class IncrementalText:
    """Incremental detokenisation; all pieces together are the text of all tokens at once.

    Text that was returned is final. Tokenizers with byte fallback revise whole characters if a
    stray byte directly follows them; here these are final too.

    Args:
        decode: Of the tokenizer.
        context: Tokens before the first one; the last few matter for tokenizers that drop a leading
            space.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-_CONTEXT:])  # the window: decoded as a whole for every token
        self._text = decode(self._tokens) if self._tokens else ""
        if self._text.endswith(_UNFINISHED):  # the answer must not complete a character of the prompt
            self._tokens, self._text = [], ""
        self._num_given = len(
            self._text
        )  # characters of the window's text that were returned, or belong to the context
        self._cut = 0  # tokens of the window that can be dropped, because a character ends there; 0: unknown

    @property
    def num_held_back(self) -> int:
        """Number of characters at the end that the next token may change."""
        return max(0, len(self._text) - self._num_given)

    def append(self, *token_ids: int) -> str:
        """The text completed by the tokens; empty if they end inside its first character."""
        self._tokens += token_ids
        self._text = self._decode(self._tokens)
        whole = len(self._text.rstrip(_UNFINISHED))
        piece = self._text[self._num_given : whole]
        self._num_given = max(self._num_given, whole)
        if whole == len(self._text):
            self._move_window()
        elif len(self._tokens) > _LONGEST:
            piece += self._shorten_window()
        return piece

    def finish(self) -> str:
        """Flush the held-back text."""
        piece = self._text[self._num_given :]
        self._num_given = len(self._text)
        return piece

    def _move_window(self) -> None:
        if self._cut and len(self._tokens) > _WINDOW:
            del self._tokens[: self._cut]
            self._cut = 0
            self._text = self._decode(self._tokens)
            self._num_given = len(self._text)
        if not self._cut and len(self._tokens) >= _WINDOW // 2:
            self._cut = len(self._tokens)

    def _shorten_window(self) -> str:
        """Drop the beginning of a window without a whole character at its end; returns its text."""
        tokens = self._shorter()
        text = self._decode(tokens)
        final = max(0, len(self._text) - len(text))
        piece = self._text[self._num_given : final]
        self._tokens, self._text, self._cut = tokens, text, 0
        self._num_given = max(0, self._num_given - final)
        return piece

    def _shorter(self) -> list[int]:
        """Tokens after which the next ones are decoded as they are after the whole window."""
        tokens = [token_id for token_id in self._tokens if self._decode([token_id])]  # special ones have no text
        if self._decode(tokens) != self._text:
            tokens = self._tokens
        elif len(tokens) <= _WINDOW:
            return tokens
        # the text without its last tokens does not depend on how its last character is completed
        ends = [len(tokens) - count for count in range(_STRAY)]
        whole = [self._decode(tokens[:end]) for end in ends]
        for cut in range(len(tokens) - _KEPT, 0, -1):
            before = self._decode(tokens[:cut])
            if all(before + self._decode(tokens[cut:end]) == text for end, text in zip(ends, whole, strict=True)):
                return tokens[cut:]
        # with byte fallback one stray byte turns every byte of a run into U+FFFD, so it must stay
        # in front of the rest
        for first in range(len(tokens) - _KEPT - _STRAY + 1):
            kept = tokens[first : first + _STRAY] + tokens[-_KEPT:]
            if not any(self._decode(kept[: len(kept) - count]).strip(_UNFINISHED) for count in range(_STRAY)):
                return kept
        return tokens[-_KEPT:]


class AnswerText:
    """The text of one answer, up to the first stop string.

    Of several stop strings the first to end counts, and of those that end together the longest, so
    that the text does not depend on token boundaries.

    Args:
        decode: Of the tokenizer.
        stops: Non-empty strings.
        include: Whether the stop string is part of the answer.
        context: Tokens of the prompt.

    Attributes:
        is_too_short: Set before a token is added: whether a stop string that it completes is
            ignored.
        stopped_by: The stop string, None while there is none.
        num_tokens: Tokens of the answer: those before the stop string and without a part of it or,
            if it is included, up to the one that completes it.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        *,
        include: bool = False,
        context: Sequence[int] = (),
    ) -> None:
        self._pieces = IncrementalText(decode, context)
        self._stops = list(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self.is_too_short = False
        self._floor = 0  # stop strings that end at or before it are ignored
        self._ends: list[int] = []  # of each token, the offset of the end of its last character
        self._later: list[int] = []  # tokens decoded lazily, when the text is read and there are no stop strings
        self._text = ""
        self.stopped_by: str | None = None
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """The text so far, or up to the stop string."""
        if self._later:
            self._decode_later()
        return self._text

    @property
    def shown(self) -> str:
        """The text that is final: without a suffix that may be the start of a stop string."""
        if self.stopped_by is not None:
            return self.text
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return self.text[:-length]
        return self.text

    @property
    def num_shown_tokens(self) -> int:
        """Number of tokens whose every character is in `shown`."""
        if self.stopped_by is not None:
            return self.num_tokens
        return self._num_within(len(self.shown))

    def append(self, token_id: int) -> bool:
        """Take the next token; returns whether the answer ends here."""
        self.num_tokens += 1
        if not self._stops:
            self._later.append(token_id)
            return False
        self._add(self._pieces.append(token_id))
        self._ends.append(len(self._text) + self._pieces.num_held_back)
        return self._stop()

    def finish(self) -> bool:
        """Flush the held-back text at the end; returns whether that completed a stop string."""
        if self.stopped_by is None:
            self._decode_later()
            self._add(self._pieces.finish())
            self._stop()
        return self.stopped_by is not None

    def _decode_later(self) -> None:
        if self._later:
            self._text += self._pieces.append(*self._later)
            self._ends += [len(self._text) + self._pieces.num_held_back] * len(self._later)
            self._later = []

    def _add(self, piece: str) -> None:
        self._text += piece
        if self.is_too_short:
            self._floor = len(self._text)

    def _stop(self) -> bool:
        found = self._first_stop()
        if found is None:
            self._floor = len(self._text)
            return False
        start, end = found
        self.stopped_by = self._text[start:end]
        if self._include:
            self._text = self._text[:end]
        else:
            self._text = self._text[:start]
            self.num_tokens = self._num_within(start)
        return True

    def _first_stop(self) -> tuple[int, int] | None:
        """Start and end of the first stop string ending after `_floor`; the longest of several."""
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            start = self._text.find(stop, max(0, self._floor + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start))
        end, start = min(found, default=(-1, -1))
        return None if end < 0 else (start, end)

    def _num_within(self, length: int) -> int:
        count = len(self._ends)
        while count and self._ends[count - 1] > length:
            count -= 1
        return count
