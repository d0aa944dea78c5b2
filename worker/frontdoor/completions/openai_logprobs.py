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


def of_answer(found: Mapping[str, Any], text: str, start: int) -> dict[str, list[Any]]:
    """Log probabilities of a frontend's chunk, whose alternatives are a list per token, or a map.

    Args:
        found: ``logprobs`` of the chunk's choice.
        text: Text of the chunk.
        start: Offset of that in the answer.
    """
    tokens = [str(token) for token in found.get("tokens") or ()]
    rounded = found.get("token_logprobs") or [None] * len(tokens)
    tops = found.get("top_logprobs") or [[]] * len(tokens)
    logprobs, alternatives = [], []
    for token, value, top in zip(tokens, rounded, tops, strict=True):
        others = _alternatives(top or ())
        exact = _exact(token, value, others)
        logprobs.append(exact)
        alternatives.append(by_text(token, exact, others))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": alternatives,
        "text_offset": text_offsets(map(str.encode, tokens), start, start + len(text)),
    }


def _alternatives(top: Any) -> list[tuple[str, float]]:
    """Alternatives as 1.4.2 sends them, a list, and as 1.6.1 does, a map of their texts."""
    if isinstance(top, Mapping):
        return [(str(text), float(logprob)) for text, logprob in top.items()]
    return [(str(one["token"]), float(one["logprob"])) for one in top]


def _exact(token: str, value: float | None, others: Sequence[tuple[str, float]]) -> float | None:
    """The token's log probability with the digits that it has among the alternatives.

    The frontend rounds it elsewhere, so that the likeliest token would seem to be none of them.
    """
    if value is None:
        return None
    same = (other for text, other in others if text == token and math.isclose(other, value, rel_tol=1e-6, abs_tol=1e-6))
    return next(same, value)
