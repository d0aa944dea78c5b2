"""Prompts as token ids, and tokens as text, by the tokenizer of the workers' model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.vocabulary import Vocabulary
from worker.errors import StartupError
from worker.models.checkpoint import find_gguf
from worker.models.gguf_file import GgufError, GgufFile
from worker.models.tokenizer import GgufTokenizer
from worker.requests.prompt_scores import TokenText, token_text
from worker.runtimes.direct.contents import takes_texts
from worker.runtimes.direct.request import DirectRequest, parse

_LAST = 16
"""Tokens at the end of a prompt among which a tag of thinking is looked for."""


class Prompts:
    """The tokenizer and the chat template of a model, as the workers load them.

    Args:
        tokenizer: Hugging Face fast tokenizer.
        template: Chat template that replaces the model's own, None for that.

    Attributes:
        tokenizer: The same.
        vocabulary: Tokens of the tokenizer.
        token_text: Text of each token.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        size = 1 + max(tokenizer.get_vocab().values())
        self.vocabulary = Vocabulary(size, tokenizer)
        made = token_text(self.vocabulary)
        assert made is not None
        known: TokenText = made
        self.token_text: TokenText = lambda token_id: known(token_id) if token_id < size else b""
        self._template = template
        self._takes_texts = takes_texts(tokenizer, template)

    @classmethod
    def load(cls, path: Path, template: Path | None) -> Prompts:
        """The tokenizer and template of a checkpoint's directory or a GGUF file.

        Raises:
            StartupError: it has no tokenizer that can be read.
        """
        try:
            source = None if template is None else template.read_text(encoding="utf-8")
            gguf = find_gguf(path)
            if gguf is None:
                return cls(_tokenizer(path), source)
            with tempfile.TemporaryDirectory() as directory:
                for name, content in GgufTokenizer(GgufFile(gguf).metadata).files(0).items():
                    (Path(directory) / name).write_text(content, encoding="utf-8")
                return cls(_tokenizer(Path(directory)), source)
        except (OSError, ValueError, GgufError) as error:
            raise StartupError(f"--model-path {path}: {error}") from None

    def request(self, message: Mapping[str, Any]) -> DirectRequest:
        """The request in a message, its prompt as token ids. Raises `InvalidRequest`."""
        return parse(message, self.tokenizer, self._template, takes_texts=self._takes_texts)

    def ends_with(self, token_ids: list[int], tag: str) -> bool:
        """Whether a prompt ends with ``tag``, but for white space."""
        return str(self.tokenizer.decode(token_ids[-_LAST:])).rstrip().endswith(tag)


def _tokenizer(path: Path) -> Any:
    return Vocabulary.from_pretrained(str(path), 1, ()).tokenizer
