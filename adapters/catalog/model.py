"""The context that all requests to one model share, and data that is made in advance."""

from __future__ import annotations

from adapters.contract import Context
from adapters.processors.characters import split_characters
from adapters.processors.grammar import grammar_cache
from adapters.vocabulary import Vocabulary, byte_index, thinking_tags


def model_context(vocabulary: Vocabulary, think_start: str | None = None, think_end: str | None = None) -> Context:
    """The part of a `Context` that all requests to a model share: vocabulary and thinking tags.

    Args:
        vocabulary: Vocabulary of the model.
        think_start: Text of the opening tag; by default the model's own, if it has a known one.
        think_end: Text of the closing tag.

    Raises:
        ValueError: only one tag is given, or the model's tokens cannot write one.
    """
    start, end = thinking_tags(vocabulary, think_start, think_end)
    return Context(vocabulary, think_start=start, think_end=end)


def precompute(vocabulary: Vocabulary) -> None:
    """Derive from the tokenizer what takes long: seconds for a large vocabulary.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """
    byte_index(vocabulary)
    split_characters(vocabulary)
    grammar_cache(vocabulary).tokenizer()
