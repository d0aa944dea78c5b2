"""Small vocabularies and phrases that must not be written in them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from adapters.chain import ProcessorChain
from adapters.contract import Context, Processor
from adapters.processors.phrase_ban import PhraseBan
from adapters.vocabulary import Vocabulary

PROMPT = [0, 1]


class Spelled:
    """A tokenizer of these pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[bytes]:
        return [self.pieces[token_id] for token_id in ids]


class World:
    """A vocabulary, and the phrases of each `phrase_ban` of a chain."""

    def __init__(self, pieces: Sequence[str | bytes], *phrases: list[str]) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.phrases = phrases
        self.longest = max(len(each.casefold().encode()) for group in phrases for each in group)

    def chain(self, history: Sequence[int] = (), others: Sequence[Processor] = ()) -> ProcessorChain:
        """A chain of the processors, and of ``others``, after ``history``."""
        vocabulary = Vocabulary(len(self.pieces), Spelled(self.pieces))  # type: ignore[arg-type]
        context = Context(vocabulary)
        processors = [PhraseBan(PhraseBan.Args(phrases=group), context) for group in self.phrases]
        chain = ProcessorChain([*processors, *others], context)
        chain.start(PROMPT, history)
        return chain

    def breaks(self, history: Sequence[int], *, ends: bool = False) -> bool:
        """Whether the text has a phrase; an incomplete character is none before the end."""
        data = b"".join(self.pieces[token_id] for token_id in history)
        text = getincrementaldecoder("utf-8")("replace").decode(data, final=ends).casefold()
        return any(phrase.casefold() in text for group in self.phrases for phrase in group)
