"""The special tokens of a model, read without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.models.checkpoint import find_gguf
from worker.models.gguf_file import GgufError, GgufFile

_CONTROL = 3
"""Type of special tokens in a GGUF file."""


def read_special_tokens(path: Path) -> frozenset[str]:
    """Texts of the tokens that are no text, by which a tokenizer leaves them out of an answer.

    Args:
        path: Directory of a checkpoint, or a GGUF file.

    Raises:
        ValueError: the tokenizer cannot be read; one line, which names the file.
        OSError: it cannot be opened.
        StartupError: it is a directory with several GGUF files.
    """
    file = find_gguf(path)
    if file is None:
        return _of_tokenizer(path / "tokenizer.json")
    try:
        metadata = GgufFile(file).metadata
    except GgufError as error:
        raise ValueError(f"{file.name}: {error}") from None
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    return frozenset(token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL)


def _of_tokenizer(file: Path) -> frozenset[str]:
    try:
        found: Any = json.loads(file.read_bytes())
        added = [token for token in found["added_tokens"] if token["special"]]
        return frozenset(str(token["content"]) for token in added)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}: {error}") from None
