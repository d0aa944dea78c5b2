"""The text of an answer up to its first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from worker.text.begun_stops import BegunStops
from worker.text.incremental_text import Decode, IncrementalText
from worker.text.stop_strings import StopStrings


class AnswerText:
    """The text of one answer, up to the first stop string.

    The first stop string to end counts, the longest of those that end together, so that the text
    does not depend on token boundaries.

    Args:
        decode: Decodes token ids, as the tokenizer does.
        stops: Non-empty strings.
        include: Whether the stop string is part of the answer.
        context: Tokens of the prompt.

    Attributes:
        is_too_short: Set before a token is added: whether a stop string that it completes is
            ignored, and one that begins before the end of it, as at Dynamo's frontend.
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
        self._stops = StopStrings(stops)
        self._begun = BegunStops(stops)
        self._include = include
        self.is_too_short = False
        self._floor = 0  # stop strings that end at or before it are ignored
        self._first = 0  # those that begin before it, too
        self._ends: list[int] = []  # for each token, the offset of the end of its last character
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
        return self.text[: self._num_final]

    @property
    def num_shown_tokens(self) -> int:
        """Number of tokens whose every character is in `shown`."""
        return self.num_tokens if self.stopped_by is not None else self._num_within(self._num_final)

    @property
    def _num_final(self) -> int:
        """Number of characters of `shown`."""
        return len(self.text) - (0 if self.stopped_by is not None else self._begun.length)

    def text_of(self, num_tokens: int, start: int = 0) -> str:
        """The text of the first `num_tokens`, all of them among `num_shown_tokens`, where there are
        stop strings; else `shown`. Of either the part from the offset `start` on, and no more of it
        is copied.
        """
        if not self._stops:
            return self.text[start : self._num_final]
        return self._text[start : self._ends[num_tokens - 1]] if num_tokens else ""

    def resume(self, token_ids: Sequence[int], num_too_short: int = 0) -> int:
        """Take the tokens of the answer so far, before any other: a stop string may have begun in
        them behind the first `num_too_short`, and none ends there. Returns how many characters were
        shown with them.
        """
        if token_ids:
            self.num_tokens += len(token_ids)
            self._text = self._pieces.append(*token_ids[:num_too_short])
            self._first = len(self._text)
            self._text += self._pieces.append(*token_ids[num_too_short:])
            self._begun.append(self._stops.tail(self._text[self._first :]))
            self._floor = len(self._text)
            self._ends += [self._num_final] * len(token_ids)
        return len(self._text) + (self._pieces.num_held_back if self._stops else 0)

    def append(self, token_id: int, told: str | None = None) -> bool:
        """Take the next token; returns whether the answer ends here.

        Args:
            token_id: The token.
            told: Stop string that it completes, where whoever generated it says so; one that began
                too early as far as is known here counts then.
        """
        self.num_tokens += 1
        if not self._stops:
            self._later.append(token_id)
            return False
        self._add(self._pieces.append(token_id))
        self._ends.append(len(self._text) + self._pieces.num_held_back)
        return self._stop(told)

    def finish(self) -> bool:
        """Flush the held-back text at the end; returns whether that completed a stop string."""
        if self.stopped_by is None:
            self._decode_later()
            self._add(self._pieces.finish())
            self._stop()
        return self.stopped_by is not None

    def _decode_later(self) -> None:
        if self._later:
            self._grow(self._pieces.append(*self._later))
            self._ends += [len(self._text) + self._pieces.num_held_back] * len(self._later)
            self._later = []

    def _grow(self, piece: str) -> None:
        """Add to the text, which CPython does not copy where it has no other reference."""
        text, self._text = self._text, ""
        text += piece
        self._text = text

    def _add(self, piece: str) -> None:
        self._grow(piece)
        self._begun.append(piece)
        if self.is_too_short:
            self._floor = self._first = len(self._text)

    def _stop(self, told: str | None = None) -> bool:
        found = None if told is None else StopStrings([told]).first(self._text, self._floor)
        found = found or self._stops.first(self._text, self._floor, self._first)
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

    def _num_within(self, length: int) -> int:
        count = len(self._ends)
        while count and self._ends[count - 1] > length:
            count -= 1
        return count
