"""Matches one text against a token history, independent of token boundaries.

For a text that many requests look for, such as a thinking tag: making a matcher looks at the whole
vocabulary. The stop strings of one answer are matched in its text by `worker.text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from adapters.vocabulary.vocabulary import Vocabulary, byte_index


class TextMatcher:
    """Prefix matching of a pattern at the end of a history (Knuth, Morris and Pratt, 1977).

    The pattern is a sequence of symbols: the bytes of a text, or its token ids where bytes are
    unknown or empty (special tokens). A token without a part of the pattern interrupts a match.

    Args:
        pattern: Symbols, at least one.
        pieces: Symbols of each token that can hold a part of the pattern.
    """

    def __init__(self, pattern: Sequence[int], pieces: Mapping[int, Sequence[int]]) -> None:
        if not pattern:
            raise ValueError("a pattern needs at least one symbol")
        self.pattern = tuple(pattern)
        self.pieces = dict(pieces)
        self._fallback = _fallbacks(self.pattern)

    @classmethod
    def of_text(cls, vocabulary: Vocabulary, text: bytes) -> TextMatcher:
        """Matches ``text`` in the bytes of the tokens.

        Raises:
            ValueError: there is no tokenizer.
        """
        return cls(text, byte_index(vocabulary).touching(text))

    @classmethod
    def of_tokens(cls, vocabulary: Vocabulary, token_ids: Sequence[int]) -> TextMatcher:
        """Matches the text of ``token_ids`` however it is split, or these ids if bytes lack."""
        if vocabulary.tokenizer is None:
            return cls.of_ids(token_ids)
        pieces = [byte_index(vocabulary)[token_id] for token_id in token_ids]
        return cls.of_text(vocabulary, b"".join(pieces)) if all(pieces) else cls.of_ids(token_ids)

    @classmethod
    def of_ids(cls, token_ids: Sequence[int]) -> TextMatcher:
        """Matches exactly these tokens."""
        return cls(token_ids, {token_id: (token_id,) for token_id in token_ids})

    def step(self, matched: int, token_id: int) -> tuple[int, int]:
        """Take one token.

        Args:
            matched: Symbols of the pattern at the end of the history: 0, then as returned by
                `step`.
            token_id: The next token.

        Returns:
            Symbols matched now, fewer than the whole pattern; and, if this token completed the
            pattern, the number of its symbols before the token, else -1. Occurrences do not
            overlap.
        """
        piece = self.pieces.get(token_id)
        if piece is None:
            return 0, -1
        before = -1
        for count, symbol in enumerate(piece, 1):
            while matched and self.pattern[matched] != symbol:
                matched = self._fallback[matched]
            matched += self.pattern[matched] == symbol
            if matched == len(self.pattern):
                matched, before = 0, max(0, len(self.pattern) - count)
        return matched, before


def _fallbacks(pattern: tuple[int, ...]) -> list[int]:
    """Lengths of the longest proper prefixes of each ``pattern[:n]`` that are also its suffixes."""
    fallback = [0, 0]
    for symbol in pattern[1:]:
        length = fallback[-1]
        while length and pattern[length] != symbol:
            length = fallback[length]
        fallback.append(length + (pattern[length] == symbol))
    return fallback


def tag_matcher(vocabulary: Vocabulary, tag: Sequence[int]) -> TextMatcher:
    """Finds a tag: one token as that token, any other one as a text. Made once per vocabulary.

    Args:
        vocabulary: Vocabulary of the model.
        tag: Ids of the tag, at least one.
    """
    if len(tag) == 1:
        return TextMatcher.of_ids(tag)
    return vocabulary.derived(f"tag {tuple(tag)}", lambda: TextMatcher.of_tokens(vocabulary, tag))


def continuations(vocabulary: Vocabulary, tag: Sequence[int], matcher: TextMatcher) -> list[int]:
    """The token that continues the tag, for each number of matched symbols."""
    begins = dict(zip(accumulate((len(matcher.pieces[token_id]) for token_id in tag), initial=0), tag, strict=False))
    if len(begins) == len(matcher.pattern):
        return [begins[n] for n in range(len(matcher.pattern))]
    first_ids = byte_index(vocabulary).first_ids(bytes(matcher.pattern))  # or else, the whole tag from its beginning
    return [begins.get(n, tag[0] if first is None else first) for n, first in enumerate(first_ids)]
