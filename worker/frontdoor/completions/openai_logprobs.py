"""Log probabilities in the form of OpenAI's completions: four lists with an entry per token."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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

    Of tokens with the same text it has the likeliest: parts of characters look alike.

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


def of_answer(found: Mapping[str, Any], start: int) -> dict[str, list[Any]]:
    """Log probabilities of a frontend's chunk, whose alternatives are a list per token, or a map.

    Args:
        found: ``logprobs`` of the chunk's choice.
        start: Offset of its first token.

    How tokens come together in chunks depends on the moment, so that an offset is the length of the
    texts that the frontend gives to the tokens before it, not of the chunks' texts. A token that is
    part of a character has no text there until the last part, and begins where the character does.
    """
    said = [str(token) for token in found.get("tokens") or ()]
    rounded = found.get("token_logprobs") or [None] * len(said)
    tops = found.get("top_logprobs") or [[]] * len(said)
    tokens, logprobs, alternatives, offsets = [], [], [], []
    for name, value, top in zip(said, rounded, tops, strict=True):
        others = _alternatives(top or ())
        token, logprob = _exact(name, value, others)
        tokens.append(token)
        logprobs.append(logprob)
        alternatives.append(by_text(token, logprob, others))
        offsets.append(start + _length_withheld(name, token))
        start += len(name)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": alternatives,
        "text_offset": offsets,
    }


def _length_withheld(name: str, token: str) -> int:
    """Characters of the text that the frontend gives to a token that are of the tokens before it:
    parts of characters that nothing completed.
    """
    if "\ufffd" in token or not name.endswith(token):
        return 0
    return len(name) - len(token)


def _alternatives(top: Any) -> list[tuple[str, float]]:
    """Alternatives as 1.4.2 sends them, a list, and as 1.6.1 does, a map of their texts."""
    if isinstance(top, Mapping):
        return [(str(text), float(logprob)) for text, logprob in top.items()]
    return [(str(one["token"]), float(one["logprob"])) for one in top]


def _exact(token: str, value: float | None, others: Sequence[tuple[str, float]]) -> tuple[str, float | None]:
    """Text and log probability of a token as they are among its alternatives, if it is one of them.

    Elsewhere the frontend rounds the number, so that the likeliest token would seem to be none of
    them; and the text of a token that is part of a character depends on what came together with it.
    """
    if value is None:
        return token, None
    same = [one for one in others if math.isclose(one[1], value, rel_tol=1e-6, abs_tol=1e-6)]
    return next((one for one in same if one[0] == token), same[0] if same else (token, value))
