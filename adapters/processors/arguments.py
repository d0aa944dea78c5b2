"""Argument types that several processors share: bounded ids, phrases as text or as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from adapters.contract import (
    MAX_INT,
    MAX_LIST,
    MAX_TEXT,
    ArgumentError,
    Context,
    Count,
    PositiveCount,
    ProcessorArgs,
    Text,
    TokenId,
    TokenIds,
)

__all__ = [
    "MAX_INT",
    "MAX_LIST",
    "MAX_TEXT",
    "Boost",
    "Count",
    "Phrase",
    "PositiveCount",
    "ShortText",
    "Text",
    "TokenId",
    "TokenIds",
    "check_no_end",
    "check_tokens",
    "encode",
]

ShortText = Annotated[str, Field(min_length=1, max_length=256)]
Boost = Annotated[float, Field(ge=-100, le=100)]


class Phrase(ProcessorArgs):
    """One phrase: ``text``, written exactly, or ``token_ids``."""

    text: Text | None = Field(default=None, description="The phrase as text.")
    token_ids: TokenIds | None = Field(default=None, description="The phrase as token ids.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("give either text or token_ids")
        return self

    def ids(self, context: Context) -> list[int]:
        """The phrase as ids of the vocabulary.

        Raises:
            ArgumentError: an id is outside the vocabulary, or there is no tokenizer for the text.
        """
        if self.token_ids is not None:
            context.check_ids("token_ids", self.token_ids)
            return list(self.token_ids)
        return encode(context, "text", self.text or "")


def encode(context: Context, argument: str, text: str) -> list[int]:
    """Ids that add exactly ``text`` (not empty) after any history (`Vocabulary.encode`).

    Raises:
        ArgumentError: there is no tokenizer, or the text cannot be written in its tokens.
    """
    try:
        return context.vocabulary.encode(text)
    except ValueError as error:
        raise ArgumentError(argument, str(error)) from error


def check_tokens(context: Context, argument: str, token_ids: Sequence[int]) -> None:
    """Raise `ArgumentError` if an id is outside the vocabulary or is padding of the row."""
    context.check_ids(argument, token_ids)
    for token_id in token_ids:
        if token_id >= context.vocabulary.num_tokens or token_id in context.vocabulary.gap_ids:
            expected = f"token ids between 0 and {context.vocabulary.num_tokens - 1}"
            raise ArgumentError(argument, f"expected {expected}, got {token_id}, which is padding")


def check_no_end(context: Context, argument: str, token_ids: Sequence[int]) -> None:
    """Raise `ArgumentError` if a token of a text that will be written would end the answer."""
    for i, token_id in enumerate(token_ids):
        if token_id in context.end_token_ids:
            raise ArgumentError(argument, f"token {i}, id {token_id}, would end the answer there")
