"""Tokenising and detokenising for the controller, with Megatron-Core's tokenizer interface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from adapters.signatures import signature_of
from adapters.strict_json import has_half_a_pair
from worker.engines.embedded.controller.types import InferenceRequest
from worker.errors import shown
from worker.text.incremental_text import IncrementalText


class ControllerTokenizer(Protocol):
    """The controller's tokenizer interface.

    Attributes:
        bos: Id that begins a prompt, None if there is none.
        eod: Id that ends a text.
    """

    @property
    def bos(self) -> int | None: ...
    @property
    def eod(self) -> int: ...
    @property
    def detokenize(self) -> Any: ...  # its signature is inspected: skip_special_tokens is optional
    def tokenize(self, text: str) -> list[int]: ...
    def offsets(self, ids: list[int], text: str) -> list[int]: ...


class HfControllerTokenizer:
    """Implements `ControllerTokenizer`.

    Args:
        tokenizer: Hugging Face fast tokenizer.
        eod: Id that ends a text.
        bos: Id that begins a prompt; the tokenizer's own by default.
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
        """Offset of each token in `text`, the text of `ids` with or without special tokens.

        A character of several tokens belongs to the last of them.
        """
        skips = self.detokenize(ids) == text
        pieces = IncrementalText(partial(self.detokenize, skip_special_tokens=skips))
        offsets, offset = [], 0
        for token_id in ids:
            offsets.append(offset)
            offset = min(len(text), offset + len(pieces.append(token_id)))
        return offsets


class Texts:
    """The part of `TextGenerationController` about text.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: ControllerTokenizer) -> None:
        self.tokenizer: ControllerTokenizer = tokenizer

    @staticmethod
    def tokenize_prompt(tokenizer: ControllerTokenizer, prompt: str, add_BOS: bool = False) -> list[int]:  # noqa: N803
        """Ids of `prompt`: every leading ``bos`` is dropped, and one added with `add_BOS`.

        Raises:
            ValueError: `add_BOS`, and the tokenizer has no ``bos``.
        """
        ids = list(tokenizer.tokenize(prompt))
        bos = tokenizer.bos
        if add_BOS and bos is None:
            raise ValueError("add_BOS: the tokenizer has no bos")
        first = next((index for index, token_id in enumerate(ids) if token_id != bos), len(ids))
        return [bos, *ids[first:]] if add_BOS and bos is not None else ids[first:]

    @staticmethod
    def detokenize(
        tokenizer: ControllerTokenizer,
        tokens: Sequence[int],
        remove_EOD: bool = True,  # noqa: N803
        skip_special_tokens: bool = True,
    ) -> str:
        """Text of `tokens`.

        Args:
            tokenizer: Tokenizer; its ``detokenize`` gets `skip_special_tokens` if it takes it.
            tokens: Ids.
            remove_EOD: Drop every ``eod`` at the end.
            skip_special_tokens: Omit special tokens.
        """
        ids = list(tokens)
        while remove_EOD and ids and ids[-1] == tokenizer.eod:
            ids.pop()
        kinds = signature_of(tokenizer.detokenize).parameters
        takes = "skip_special_tokens" in kinds or any(one.kind is one.VAR_KEYWORD for one in kinds.values())
        text: str = (
            tokenizer.detokenize(ids, skip_special_tokens=skip_special_tokens) if takes else (tokenizer.detokenize(ids))
        )
        return text

    def detokenize_generations(
        self,
        tokens: torch.Tensor | Sequence[int],
        lengths: torch.Tensor | int,
        detokenize_segments: bool,
        skip_special_tokens: bool = True,
    ) -> tuple[str, list[list[str]] | None]:
        """Text of a sequence, and the text of each of its tokens.

        Args:
            tokens: Ids ``[T]``.
            lengths: Number of `tokens` that count.
            detokenize_segments: Whether the second part is wanted; it is None otherwise.
            skip_special_tokens: Leave special tokens out.

        Returns:
            The text without ``eod`` at the end, and one list with a text for each token; that of an
            ``eod`` at the end is empty.
        """
        ids = [int(one) for one in tokens][: int(lengths)]
        text = self.detokenize(self.tokenizer, ids, skip_special_tokens=skip_special_tokens)
        if not detokenize_segments:
            return text, None
        offsets = [min(offset, len(text)) for offset in self.tokenizer.offsets(ids, text)]
        ends = [*offsets[1:], len(text)]
        return text, [[text[start:end] for start, end in zip(offsets, ends, strict=True)] if ids else []]

    def _prompt_tokens(self, request: InferenceRequest) -> list[int]:
        if request.prompt_tokens is not None:
            return list(request.prompt_tokens)
        if request.prompt is None:
            raise ValueError(f"request {request.request_id!r} has neither prompt nor prompt_tokens")
        if not isinstance(request.prompt, str):
            raise ValueError(f"prompt of request {request.request_id!r} must be a text, got {shown(request.prompt)}")
        if has_half_a_pair(request.prompt):
            raise ValueError(f"prompt of request {request.request_id!r} has half of a surrogate pair")
        return self.tokenize_prompt(self.tokenizer, request.prompt, request.sampling_params.add_BOS)
