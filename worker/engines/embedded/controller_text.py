"""A Hugging Face tokenizer with the surface that Megatron-Core's controller asks of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from worker.engines.embedded.stop_strings import IncrementalText


class ControllerTokenizer(Protocol):
    """What the controller needs of a tokenizer.

    Attributes:
        bos: Id that a prompt may begin with, None if there is none.
        eod: Id that ends a text.
    """

    @property
    def bos(self) -> int | None: ...
    @property
    def eod(self) -> int: ...
    @property
    def detokenize(self) -> Any: ...  # its signature is looked at: not each one takes skip_special_tokens
    def tokenize(self, text: str) -> list[int]: ...
    def offsets(self, ids: list[int], text: str) -> list[int]: ...


class HfControllerTokenizer:
    """Implements `ControllerTokenizer`.

    Args:
        tokenizer: Hugging Face fast tokenizer.
        eod: Id that ends a text.
        bos: Id that a prompt may begin with; the tokenizer's own by default.
    """

    def __init__(self, tokenizer: Any, eod: int, bos: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.eod = eod
        self.bos: int | None = tokenizer.bos_token_id if bos is None else bos

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """Where in `text`, the text of `ids` with or without special tokens, each token begins.

        A character that several tokens make up belongs to the last of them.
        """
        skips = self.detokenize(ids) == text
        pieces = IncrementalText(partial(self.detokenize, skip_special_tokens=skips))
        places, place = [], 0
        for token_id in ids:
            places.append(place)
            place = min(len(text), place + len(pieces.append(token_id)))
        return places
