"""`ReasoningTokens`: how many tokens of an answer are thinking."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from adapters.vocabulary.text_match import TextMatcher


class ReasoningTokens:
    """Counts the tokens of an answer's thinking, without its tags, as ``thinking_budget`` does.

    Args:
        start: Matches the opening tag.
        end: Matches the closing tag.
        is_inside: Whether the answer begins with thinking.
        blank: Tokens of white space, where the opening tag may be before that thinking, behind any
            of them; None where it may not.

    Attributes:
        count: Tokens so far.
    """

    def __init__(
        self, start: TextMatcher, end: TextMatcher, *, is_inside: bool, blank: Collection[int] | None = None
    ) -> None:
        self.count = 0
        self._start, self._end = start, end
        self._is_inside = is_inside
        self._matched = 0
        self._blank = blank
        self._begun: list[int] = []  # tokens of the answer while they may be that tag
        self._sizes: list[int] = []  # symbols of the next tag in each of the newest thinking tokens

    def feed(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens of the answer."""
        for token_id in token_ids:
            for each in [token_id] if self._blank is None else self._behind_tag(token_id, self._blank):
                self._take(each)

    def _behind_tag(self, token_id: int, blank: Collection[int]) -> list[int]:
        """The tokens that are certain not to be the tag at the beginning of the answer."""
        if not self._begun and token_id in blank:
            return [token_id]
        self._begun.append(token_id)
        self._matched, before = self._start.step(self._matched, token_id)
        if self._matched and before < 0:
            return []
        self._blank = None
        return [] if before >= 0 else self._begun

    def _take(self, token_id: int) -> None:
        tag = self._end if self._is_inside else self._start
        self._matched, before = tag.step(self._matched, token_id)
        if before >= 0:
            self._close(before)
        elif self._is_inside:
            self.count += 1
            self._sizes.append(len(tag.pieces.get(token_id, ())))

    def _close(self, before: int) -> None:
        """End a section, or begin one, at a tag that has `before` symbols in the tokens before."""
        while self._is_inside and before > 0:
            before -= self._sizes.pop()
            self.count -= 1
        self._is_inside = not self._is_inside
        self._matched = 0
        self._sizes.clear()
