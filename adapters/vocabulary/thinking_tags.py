"""Tags that a model puts around its thinking."""

from __future__ import annotations

from adapters.vocabulary.vocabulary import Vocabulary

KNOWN_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
"""Tags that a model has if both are single tokens of it: those of most, of Mistral, Cohere and
Seed.
"""


def thinking_tags(
    vocabulary: Vocabulary, start: str | None = None, end: str | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the opening and of the closing tag; both are empty if the model has none.

    Args:
        vocabulary: Vocabulary of the model.
        start: Text of the opening tag, of one token or several; given together with ``end``.
        end: Text of the closing tag.

    Raises:
        ValueError: only one is given, or the model's tokens cannot write one.
    """
    if (start is None) != (end is None):
        raise ValueError("an opening and a closing tag are given together")
    if start is not None and end is not None:
        return tuple(vocabulary.encode(start)), tuple(vocabulary.encode(end))
    for known in KNOWN_TAGS:
        opening, closing = (vocabulary.tag(text) for text in known)
        if opening and closing:
            return opening, closing
    return (), ()
