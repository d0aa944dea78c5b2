"""Log probabilities in the form of OpenAI's completions: four lists with an entry per token."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HIDDEN = "hidden"
"""Key of a list in a chunk of workers behind OpenEngine: which tokens the text leaves out."""

Alternatives = Iterable[tuple[str, float]]
"""Texts of tokens and their log probabilities."""


def empty_logprobs() -> dict[str, list[Any]]:
    """The log probabilities of no token."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def extend(logprobs: dict[str, list[Any]], more: Mapping[str, Sequence[Any]]) -> None:
    """Append the log probabilities of the tokens that follow."""
    for name, values in logprobs.items():
        values += more[name]


def by_text(token: str, logprob: float | None, alternatives: Alternatives) -> dict[str, float | None]:
    """An entry of ``top_logprobs``: the token itself, then its alternatives.

    The most likely one counts of tokens with the same text: parts of characters look alike.

    Args:
        token: Text of the token that is there.
        logprob: Log probability of it.
        alternatives: Likeliest tokens, which it may be among.
    """
    found: dict[str, float | None] = {token: logprob}
    for text, value in alternatives:
        known = found.get(text)
        found[text] = value if known is None else max(value, known)
    return found


def text_offsets(tokens: Iterable[bytes], start: int, end: int, lead: int = 0) -> list[int]:
    """Offset of each token in the text, in characters.

    A token that is part of a character begins where that does.

    Args:
        tokens: UTF-8 bytes of each token.
        start: Offset of the first one.
        end: Length of the text, which no offset exceeds.
        lead: Characters of the tokens that the text begins without, such as those of the name of a
            token that begins every prompt.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], -lead
    for token in tokens:
        offsets.append(min(start + max(length, 0), end))
        length += len(decoder.decode(token))
    return offsets


class Offsets:
    """Tells where in the text of a choice its tokens begin, one after the other.

    How tokens come together in chunks depends on the moment, so that an offset is the length of the
    texts that the frontend gives to the tokens before it, not of the chunks' texts. A token that
    ends within a character has no text there until the last part, and a part of a character begins
    where the character does, as long as it may be one.

    Args:
        start: Offset of the first token.

    Attributes:
        length: Characters before the next token, but for those that are held back.
    """

    def __init__(self, start: int = 0) -> None:
        self.length = start
        self._num_held = 0  # characters that are held back
        self._num_parts = 0  # those behind them that may still be parts of one

    @property
    def next(self) -> int:
        """The offset of a token that adds nothing to the text."""
        return self.length + self._num_held

    def of(self, name: str, token: str) -> int:
        """The offset of the next token.

        Args:
            name: Text that the frontend gives to it, empty if that is held back.
            token: Text of the token alone, in which parts of characters are U+FFFD; or `name`.
        """
        if not token.startswith("\ufffd") and token:  # what was before it was no part of a character
            self._num_held, self._num_parts = self._num_held + self._num_parts, 0
        before = self._num_held
        if name:
            if "\ufffd" not in token and name.endswith(token):
                before = len(name) - len(token)
            offset = self.length + min(before, len(name))
            self.length += len(name)
            self._num_held = self._num_parts = 0
            return offset
        whole = token.rstrip("\ufffd")
        self._num_held += len(whole)
        self._num_parts += len(token) - len(whole)
        return self.length + before


def of_answer(found: Mapping[str, Any], offsets: Offsets) -> dict[str, list[Any]]:
    """Log probabilities of a frontend's chunk, whose alternatives are a list per token, or a map.

    Args:
        found: ``logprobs`` of the chunk's choice.
        offsets: Offsets of the choice's tokens, of which the chunk has the next.
    """
    said = [str(token) for token in found.get("tokens") or ()]
    rounded = found.get("token_logprobs") or [None] * len(said)
    tops = found.get("top_logprobs") or [[]] * len(said)
    hides = found.get(HIDDEN) or [False] * len(said)
    tokens, logprobs, alternatives, begins = [], [], [], []
    for name, value, top, is_hidden in zip(said, rounded, tops, hides, strict=True):
        others = _alternatives(top or ())
        token, logprob = _exact(name, value, others)
        tokens.append(token)
        logprobs.append(logprob)
        alternatives.append(by_text(token, logprob, others))
        begins.append(offsets.next if is_hidden else offsets.of(name, token))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": alternatives,
        "text_offset": begins,
    }


def _alternatives(top: Any) -> list[tuple[str, float]]:
    """Alternatives as 1.4.2 sends them, a list, and as 1.6.1 does, a map of their texts."""
    if isinstance(top, Mapping):
        return [(str(text), float(logprob)) for text, logprob in top.items()]
    return [(str(one["token"]), float(one["logprob"])) for one in top]


def _exact(token: str, value: float | None, others: Sequence[tuple[str, float]]) -> tuple[str, float | None]:
    """Text and log probability of a token as they are among its alternatives, if it is one of them.

    Elsewhere the frontend rounds the number, so that the most likely token would seem to be none
    of them; and the text of a token that is part of a character depends on what came together with
    it.
    """
    if value is None:
        return token, None
    same = [one for one in others if math.isclose(one[1], value, rel_tol=1e-6, abs_tol=1e-6)]
    itself = [one for one in same if one[0] == token] or [one for one in same if _may_show(token, one[0])]
    return itself[0] if itself else (token, value)


def _may_show(name: str, token: str) -> bool:
    """Whether a frontend may show a token by `name` in an answer that alone has the text `token`:
    if not, it is another one that is as likely.
    """
    if "\ufffd" in token:
        return not name or not name.isascii()
    before = name.removesuffix(token)
    is_behind_parts = before != name and before.endswith("\ufffd")
    is_same_word = name.strip() == token.strip() != ""
    return not name or is_behind_parts or is_same_word or name == f" {token}"
