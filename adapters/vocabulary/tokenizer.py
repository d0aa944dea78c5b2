"""`Tokenizer`: the part of transformers' tokenizers that vocabularies use."""

from __future__ import annotations

from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]: ...
    def decode(self, token_ids: list[int], **kwargs: Any) -> str: ...
    def __len__(self) -> int: ...
