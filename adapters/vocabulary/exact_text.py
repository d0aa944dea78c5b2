"""Texts as token ids that add exactly that text to an answer, whatever comes before.

A tokenizer's own ``encode`` is made for whole texts. SentencePiece tokenizers put a space before
one (Llama 2, Mistral: by a normaliser that prepends ``▁``, or by ``prepend_scheme`` ``first`` or
``always``), others normalise it: the ids would add a text other than the given one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from adapters.vocabulary.byte_index import ByteIndex
from adapters.vocabulary.token_bytes import TokenSpelling, added_tokens
from adapters.vocabulary.tokenizer import Tokenizer

_SENTINELS = ("\n", "=", ".", "a", "0")
"""Prefixes to encode a text after; after one of them, mostly a newline, the tokenizer splits."""

_SHOWN = 60


class TextEncoder:
    """Encodes texts for one vocabulary.

    A text is split at the names of added tokens, which become those tokens unless they add another
    text than their name (``▁▁``: two spaces). The parts between are encoded by the tokenizer, first
    alone and then after sentinels that are removed again. The first ids whose bytes are the text
    are taken; where the tokenizer always changes it (a space, a normal form), the fewest tokens
    that spell it.

    Args:
        tokenizer: Tokenizer of the vocabulary.
        size: Width of a row of logits; ids are below it.
        index: Returns the bytes of all tokens; called where the tokenizer's encoding changes the
            text.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, index: Callable[[], ByteIndex]) -> None:
        self._tokenizer = tokenizer
        self._size, self._index = size, index
        self._bytes = TokenSpelling(tokenizer)
        added = {text: token_id for text, token_id in added_tokens(tokenizer).items() if token_id < size}
        written = dict(zip(added, self._bytes(list(added.values())), strict=True))
        self._added = {text: token_id for text, token_id in added.items() if written[text] in (b"", text.encode())}
        self._lengths = sorted({len(name) for name in self._added}, reverse=True)
        begins = {name[0] for name in self._added}
        self._begins = re.compile(f"[{''.join(map(re.escape, sorted(begins)))}]") if begins else None

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, none for an empty one.

        Raises:
            ValueError: it cannot be written in tokens of this vocabulary.
        """
        ids: list[int] = []
        for part in self._parts(text):
            if part in self._added:
                ids.append(self._added[part])
            elif part:
                ids += self._plain(part)
        return ids

    def _parts(self, text: str) -> Iterator[str]:
        """The names of added tokens in ``text``, the longest where several begin, and what is
        between them. Some models have thousands: they are not compared one by one.
        """
        begin = at = 0
        while self._begins is not None and (found := self._begins.search(text, at)):
            at = found.start()
            ends = (at + length for length in self._lengths)
            name = next((text[at:end] for end in ends if text[at:end] in self._added), None)
            if name is None:
                at += 1
                continue
            yield text[begin:at]
            yield name
            begin = at = at + len(name)
        yield text[begin:]

    def _plain(self, text: str) -> list[int]:
        wanted = text.encode()
        for sentinel in ("", *_SENTINELS):
            ids = self._tail(self._tokenizer.encode(sentinel + text, add_special_tokens=False), wanted)
            if ids is not None:
                return ids
        spelled = self._index().spell(wanted)
        if spelled is None:
            raise ValueError(f"{text[:_SHOWN]!r} cannot be written in tokens of this model")
        return spelled

    def _tail(self, token_ids: Sequence[int], wanted: bytes) -> list[int] | None:
        """The suffix of the ids whose bytes are exactly ``wanted``, None if there is none."""
        pieces = self._bytes([token_id if token_id < self._size else 0 for token_id in token_ids])
        left = len(wanted)
        for count, (token_id, piece) in enumerate(zip(reversed(token_ids), reversed(pieces), strict=True), 1):
            left -= len(piece)
            if token_id >= self._size or not piece or left < 0 or not wanted.startswith(piece, left):
                return None
            if left == 0:
                return list(token_ids[len(token_ids) - count :])
        return None
