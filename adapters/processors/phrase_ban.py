"""Phrase ban: an answer that contains a phrase is rewound, and continues without it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from adapters.contract import ArgumentError, BacktrackingProcessor, Context, ProcessorArgs, Reads
from adapters.vocabulary import byte_index

_Phrase = Annotated[str, Field(min_length=1, max_length=256)]

_Decoder = getincrementaldecoder("utf-8")


class _State(NamedTuple):
    """State of the answer after a token.

    Attributes:
        num_characters: Folded characters of the answer so far.
        incomplete: Bytes of a character that is not complete.
        begun_by: Index of the token that the incomplete character begins in.
        matched: Number of characters of each phrase that the answer ends with.
        completed: Index of the token in which a phrase begins that ends in the newest token.
    """

    num_characters: int
    incomplete: bytes
    begun_by: int
    matched: tuple[int, ...]
    completed: int | None


class PhraseBan(BacktrackingProcessor):
    """The answer has none of the phrases, in no tokenization and no case.

    Source: the anti-slop sampler (Paech 2024). Text that may still become a phrase is held back.
    Where a phrase is completed, the answer is rewound to the token in which it begins, that token
    is masked there, and sampling continues from there; so of all continuations only those that
    write the phrase are lost. Two texts are the same if their case foldings (Unicode) are. A token
    without text, such as a special one, does not separate what is around it. An end token belongs
    to the answer if it is shown.

    Only for engines that can rewind tokens that they have not sent.
    """

    name = "phrase_ban"
    version = 3  # a rewound position has another random number each time
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        phrases: list[_Phrase] = Field(min_length=1, max_length=64, description="Texts that the answer must not have.")

    def __init__(self, args: Args, context: Context) -> None:
        try:
            self._bytes = byte_index(context.vocabulary)
        except ValueError as error:
            raise ArgumentError("phrases", str(error)) from error
        self._phrases = [phrase.casefold() for phrase in args.phrases]
        self._fallbacks = [_fallbacks(phrase) for phrase in self._phrases]
        self.reset()

    def reset(self) -> None:
        self._owners: list[int] = []  # of each folded character, the token that its character begins in
        self._state = _State(0, b"", 0, (0,) * len(self._phrases), None)
        self._earlier: list[_State] = []

    def advance(self, token_id: int, index: int) -> None:
        state = self._state
        self._earlier.append(state)
        decoder = _Decoder("replace")
        text = decoder.decode(state.incomplete + self._bytes[token_id])
        incomplete = decoder.getstate()[0]
        owner = state.begun_by if state.incomplete else index
        matched, completed = state.matched, None
        for character in text:
            for folded in character.casefold():
                self._owners.append(owner)
                matched, found = self._step(matched, folded)
                if found is not None:
                    completed = found if completed is None else min(completed, found)
            owner = index
        self._state = _State(len(self._owners), incomplete, owner, matched, completed)

    def _step(self, matched: Sequence[int], character: str) -> tuple[tuple[int, ...], int | None]:
        """Matched characters after one more, and the begin of a phrase that it completes."""
        now, begins = [], None
        for phrase, fallbacks, count in zip(self._phrases, self._fallbacks, matched, strict=True):
            while count and phrase[count] != character:
                count = fallbacks[count - 1]
            count += phrase[count] == character
            if count == len(phrase):
                begin = self._owners[-count]
                begins = begin if begins is None else min(begins, begin)
                count = fallbacks[count - 1]
            now.append(count)
        return tuple(now), begins

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._state = self._earlier[-len(token_ids)]
        del self._earlier[-len(token_ids) :]
        del self._owners[self._state.num_characters :]
        return True

    @property
    def held_from(self) -> int | None:
        """See `BacktrackingProcessor.held_from`."""
        held = [self._state.begun_by] if self._state.incomplete else []
        longest = max(self._state.matched)
        if longest:
            held.append(self._owners[-longest])
        return min(held, default=None)

    @property
    def rewinds_to(self) -> int | None:
        """See `BacktrackingProcessor.rewinds_to`."""
        return self._state.completed

    @property
    def rewinds_to_at_end(self) -> int | None:
        """See `rewinds_to`; an incomplete character at the end of an answer is shown as U+FFFD."""
        num_characters, incomplete, owner, matched, completed = self._state
        for character in incomplete.decode(errors="replace"):
            self._owners.append(owner)
            matched, found = self._step(matched, character)
            completed = min((each for each in (completed, found) if each is not None), default=None)
        del self._owners[num_characters:]
        return completed


def _fallbacks(phrase: str) -> list[int]:
    """Length of the longest proper border of each prefix (Knuth, Morris and Pratt, 1977)."""
    found, count = [0], 0
    for character in phrase[1:]:
        while count and phrase[count] != character:
            count = found[count - 1]
        count += phrase[count] == character
        found.append(count)
    return found
