"""Incremental detokenisation: the text that each token completes."""

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
        decode: Decodes token ids, as the tokenizer does.
        context: Tokens before the first one; the last few with a text matter for tokenizers that
            drop a leading space.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-_CONTEXT:])  # the window: decoded as a whole for every token
        self._text = decode(self._tokens) if self._tokens else ""
        while not self._text and len(self._tokens) < len(context):  # special tokens alone, as places of pictures
            self._tokens = list(context[-2 * len(self._tokens) :])
            self._text = decode(self._tokens)
        if self._text.endswith(_UNFINISHED):  # the answer must not complete a character of the prompt
            self._tokens, self._text = [], ""
        self._num_given = len(self._text)  # characters of the window that were returned, or are context
        self._cut = 0  # tokens of the window that can be dropped, because a character ends there; 0: unknown

    @property
    def num_held_back(self) -> int:
        """Number of characters at the end that the next token may change."""
        return max(0, len(self._text) - self._num_given)

    def append(self, *token_ids: int) -> str:
        """The text completed by the tokens, the same whether they come together or one by one;
        empty if they end inside its first character.
        """
        pieces, start = list[str](), 0
        while start < len(token_ids):  # up to each place where the window moves
            end = start + max(1, (_WINDOW + 1 if self._cut else _WINDOW // 2) - len(self._tokens))
            pieces.append(self._append(token_ids[start:end]))
            start = end
        return "".join(pieces)

    def _append(self, token_ids: Sequence[int]) -> str:
        """See `append`; the window does not move before the last of the tokens."""
        tokens = [*self._tokens, *token_ids]
        text = self._decode(tokens)
        if len(token_ids) > 1 and _UNFINISHED in text[self._num_given :]:
            return "".join([self._append([each]) for each in token_ids])
        self._tokens, self._text = tokens, text
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
            kept, before = self._tokens[self._cut :], self._tokens[: self._cut]
            self._text = self._decode(kept)
            if not self._text:  # special tokens alone: the next token would begin a text, and lose its space
                kept, self._text = before, self._decode(before)
            self._tokens, self._cut = kept, 0
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
        tokens = [token_id for token_id in self._tokens if self._decode([token_id])]  # special tokens have no text
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
