"""The text of token ids, by the tokenizer of the model that the workers serve."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tokenizers import Tokenizer

from worker.frontdoor.errors import FieldRefused, Refused
from worker.models.checkpoint import find_gguf
from worker.models.gguf_file import GgufFile
from worker.models.tokenizer import GgufTokenizer


class Texts:
    """Turns token ids into text, with the tokenizer of the model that the workers serve.

    Args:
        model_path: Directory or GGUF file of the model, None if it is not known.
    """

    def __init__(self, model_path: str | None) -> None:
        self._model_path = model_path
        self._tokenizer: Tokenizer | None = None
        self._size = 0  # one more than its highest id: ids may have gaps
        self._loading = asyncio.Lock()

    async def tokenizer(self) -> Tokenizer:
        """The tokenizer, which is loaded when it is first needed.

        Raises:
            Refused: 501, the model's path is not known, or has no tokenizer that can be read.
        """
        async with self._loading:
            if self._tokenizer is None:
                if self._model_path is None:
                    raise Refused(501, "needs the model's tokenizer: give the front door --model-path")
                self._tokenizer = await asyncio.to_thread(_load, Path(self._model_path))
                self._size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        return self._tokenizer

    def text(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens among it, once `tokenizer` has loaded it.

        Raises:
            Refused: one is no id of the vocabulary.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        for i, each in enumerate(ids):
            if not 0 <= each < self._size:
                raise FieldRefused(f"tokens[{i}]", f"must be a token id below {self._size}, got {each}")
        # of all functions of the tokenizer, this one leaves the interpreter to others meanwhile
        (text,) = tokenizer.decode_batch([ids], skip_special_tokens=False)
        return str(text)

    async def token_text(self, token_id: int) -> str:
        """The text of one token, empty for an id without a token. Raises `Refused`."""
        tokenizer = await self.tokenizer()
        return str(tokenizer.decode([token_id], skip_special_tokens=False))

    async def token_texts(self, ids: list[int]) -> list[str]:
        """The vocabulary's text of each token. Raises `FieldRefused`: there is no tokenizer."""
        try:
            tokenizer = await self.tokenizer()
        except Refused as refused:
            raise FieldRefused("return_token_strs", refused.message) from None
        return [tokenizer.id_to_token(each) or "" for each in ids]


def _load(path: Path) -> Tokenizer:
    try:
        gguf = find_gguf(path)
        if gguf is not None:
            return Tokenizer.from_str(GgufTokenizer(GgufFile(gguf).metadata).files(0)["tokenizer.json"])
        return Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise Refused(501, f"--model-path {path}: no tokenizer.json or GGUF file that can be read: {error}") from None
