"""Hard masks: allowed tokens, banned tokens and bad words."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Annotated, Any, Protocol, Self

from pydantic import Field, model_validator

from adapters.contract import (
    ALWAYS,
    Allow,
    ArgumentError,
    Ban,
    Context,
    Edit,
    ProcessorArgs,
    Reads,
    Stage,
    SteeringProcessor,
)
from adapters.processors.arguments import TokenId, TokenIds, check_tokens, encode
from adapters.vocabulary import ByteIndex, byte_index

MAX_WORDS = 1024
"""Most words per request."""

MAX_WORD_TOKENS = 128
"""Longest word given as token ids."""

MAX_WORD_TEXT = 256
"""Longest word given as text, characters."""

_MOST_BANS = 1024

Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_TEXT)]
WordIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_WORD_TOKENS)]


class AllowedTokens(SteeringProcessor):
    """Masks every token but the listed ones and, with ``allow_end``, the end tokens.

    Source: vLLM's ``allowed_token_ids``, which is ``allow_end`` false: an end token that is not
    listed is masked like any other, and an answer without one runs to its length limit. With
    ``allow_end``, the default here, the request's end tokens are not masked, so that an answer can
    end; ``min_tokens`` masks them.
    """

    name = "allowed_tokens"
    stage = Stage.MASK
    reads = Reads.NOTHING

    class Args(ProcessorArgs):
        token_ids: TokenIds = Field(description="Ids that may be sampled.")
        allow_end: bool = Field(default=True, description="The request's end tokens may be sampled too.")

    def __init__(self, args: Args, context: Context) -> None:
        check_tokens(context, "token_ids", args.token_ids)
        size = context.vocabulary.size
        ends = (token_id for token_id in context.end_token_ids if args.allow_end and token_id < size)
        self._edit = Allow.of({*args.token_ids, *ends}, size)

    def edit(self) -> Edit | None:
        return self._edit

    def same_until(self) -> int:
        return ALWAYS


class BannedTokens(SteeringProcessor):
    """Masks the listed tokens.

    Source: transformers' ``suppress_tokens``. End tokens may be listed; the answer then runs to its
        length limit.
    """

    name = "banned_tokens"
    stage = Stage.MASK
    reads = Reads.NOTHING

    class Args(ProcessorArgs):
        token_ids: TokenIds = Field(description="Ids that must not be sampled.")

    def __init__(self, args: Args, context: Context) -> None:
        context.check_ids("token_ids", args.token_ids)
        check_some_left(context, "token_ids", args.token_ids)
        self._edit = Ban.of(set(args.token_ids))

    def edit(self) -> Edit | None:
        return self._edit

    def same_until(self) -> int:
        return ALWAYS


class BadWords(SteeringProcessor):
    """Keeps words out of the answer, given as text or as token ids.

    Source: transformers' ``bad_words_ids`` and vLLM's ``bad_words``: the last token of a word is
    masked wherever the tokens before it are the word's other tokens. Only generated tokens count,
    as in vLLM: a word that would begin in the prompt is not masked.

    A text stands for every sequence of tokens that spells it: as given, without leading white
    space, and with one leading space. So it never occurs at token boundaries: as a separate word,
    or within a longer word that the tokens split there. A token that holds more than the word
    ("secretary", ".secret") is not masked; other cases and inflections are other words. A text that
    names special tokens is masked as the tokenizer encodes it. An end token alone is refused; use
    ``banned_tokens``.
    """

    name = "bad_words"
    stage = Stage.MASK
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        words: list[Word] | None = Field(
            default=None,
            min_length=1,
            max_length=MAX_WORDS,
            description="Words as text, in every tokenisation; each also with a leading space.",
        )
        token_ids: list[WordIds] | None = Field(
            default=None, min_length=1, max_length=MAX_WORDS, description="Words as token ids, exactly these sequences."
        )

        @model_validator(mode="after")
        def _exactly_one(self) -> Self:
            if (self.words is None) == (self.token_ids is None):
                raise ValueError("give either words or token_ids")
            return self

    def __init__(self, args: Args, context: Context) -> None:
        argument = "words" if args.token_ids is None else "token_ids"
        for i, sequence in enumerate(args.token_ids or ()):
            context.check_ids(f"{argument}[{i}]", sequence)
        texts, sequences = _split(args.words or (), context)
        sequences += args.token_ids or ()
        self._parts: list[_Words] = [WordAutomaton(sequences)] if sequences else []
        if texts:
            self._parts.append(SpelledWords(texts, byte_index(context.vocabulary)))
        self.reset()
        alone = self._ban([part.START for part in self._parts])
        banned = [] if alone is None else alone.token_ids.tolist()
        ending = context.end_token_ids.intersection(banned)
        if ending:
            raise ArgumentError(argument, f"token {min(ending)} ends the answer; use banned_tokens to ban it")
        check_some_left(context, argument, banned)

    def reset(self) -> None:
        self._states = [[part.START for part in self._parts]]

    def advance(self, token_id: int, index: int) -> None:
        states = zip(self._parts, self._states[-1], strict=True)
        self._states.append([part.step(state, token_id) for part, state in states])

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        del self._states[len(self._states) - len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        return self._ban(self._states[-1])

    def _ban(self, states: Sequence[Any]) -> Ban | None:
        found = [part.ban(state) for part, state in zip(self._parts, states, strict=True)]
        bans = [ban for ban in found if ban is not None]
        if len(bans) < 2:
            return bans[0] if bans else None
        return Ban.of({token_id for ban in bans for token_id in ban.token_ids.tolist()})


class _Words(Protocol):
    """An automaton of words over token histories."""

    START: Any
    """The state of the empty history."""

    def step(self, state: Any, token_id: int) -> Any: ...
    def ban(self, state: Any) -> Ban | None: ...


def _split(words: Iterable[str], context: Context) -> tuple[list[bytes], list[list[int]]]:
    """Plain words as bytes, in each form; and the ids of words that name tokens without bytes."""
    texts: list[bytes] = []
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        forms = [word, bare, " " + bare] if bare else [word]
        ids = encode(context, "words", word)
        index = byte_index(context.vocabulary)
        if all(index[token_id] for token_id in ids):
            texts += [form.encode() for form in forms]
        else:
            sequences += [encode(context, "words", form) for form in forms]
    return texts, sequences


class SpelledWords:
    """Automaton that finds the tokens that would complete one of some texts, however it is spelled.

    A text counts where it begins at the beginning of a token.

    A state is the set of text prefixes (by number) that the history ends with.

    Args:
        texts: Texts, not empty.
        index: Byte index of the vocabulary.
    """

    START: tuple[int, ...] = ()

    def __init__(self, texts: Iterable[bytes], index: ByteIndex) -> None:
        self._texts, self._index = sorted(set(texts)), index
        self._beginnings = [b""]
        self._numbers = {b"": 0}
        self._last: dict[int, set[int]] = {}
        self._bans: dict[tuple[int, ...], Ban | None] = {}

    def step(self, state: tuple[int, ...], token_id: int) -> tuple[int, ...]:
        """The state after one more token."""
        piece = self._index[token_id]
        if not piece:
            return ()
        begun = (self._beginnings[number] + piece for number in (0, *state))
        return tuple(self._number(beginning) for beginning in begun if self._goes_on(beginning))

    def ban(self, state: tuple[int, ...]) -> Ban | None:
        """The tokens that would complete a text, None if there are none."""
        if state not in self._bans:
            if len(self._bans) >= _MOST_BANS:
                self._bans.clear()
            banned = set().union(*(self._completing(number) for number in (0, *state)))
            self._bans[state] = Ban.of(banned) if banned else None
        return self._bans[state]

    def _goes_on(self, beginning: bytes) -> bool:
        """Whether ``beginning`` is a proper prefix of a text."""
        at = bisect_right(self._texts, beginning)
        return at < len(self._texts) and self._texts[at].startswith(beginning)

    def _number(self, beginning: bytes) -> int:
        number = self._numbers.setdefault(beginning, len(self._beginnings))
        if number == len(self._beginnings):
            self._beginnings.append(beginning)
        return number

    def _completing(self, number: int) -> set[int]:
        if number not in self._last:
            beginning = self._beginnings[number]
            longer = self._texts[bisect_right(self._texts, beginning) :]
            texts = takewhile(lambda text: text.startswith(beginning), longer)
            found = (self._index.ids.get(text[len(beginning) :], ()) for text in texts)
            self._last[number] = {token_id for token_ids in found for token_id in token_ids}
        return self._last[number]


class WordAutomaton:
    """Aho-Corasick automaton: which tokens would complete a word; a step costs O(1).

    Source: Aho and Corasick, CACM 1975, over the words without their last tokens. State 0 is the
        empty history.

    Args:
        words: Non-empty sequences of token ids.
    """

    START = 0

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._last: list[set[int]] = [set()]
        for word in words:
            state = 0
            for token_id in word[:-1]:
                state = self._child(state, token_id)
            self._last[state].add(word[-1])
        self._fail = [0] * len(self._next)
        self._link()
        self._bans: dict[int, Ban | None] = {}

    def _child(self, state: int, token_id: int) -> int:
        child = self._next[state].setdefault(token_id, len(self._next))
        if child == len(self._next):
            self._next.append({})
            self._last.append(set())
        return child

    def _link(self) -> None:
        """Set fail links breadth first: the longest proper suffix that is a prefix of a word."""
        queue = list(self._next[0].values())
        for state in queue:
            for token_id, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], token_id)
                queue.append(child)

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token."""
        while state and token_id not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(token_id, 0)

    def ban(self, state: int) -> Ban | None:
        """The tokens that would complete a word, None if there are none."""
        if state not in self._bans:
            self._bans[state] = self._collect(state)
        return self._bans[state]

    def _collect(self, state: int) -> Ban | None:
        found = set(self._last[state])
        while state:
            state = self._fail[state]
            found |= self._last[state]
        return Ban.of(found) if found else None


def check_some_left(context: Context, argument: str, banned: Sequence[int]) -> None:
    """Raises `ArgumentError` if banning ``banned`` leaves no token."""
    num_tokens, gap_ids = context.vocabulary.num_tokens, context.vocabulary.gap_ids
    if len({token_id for token_id in banned if token_id < num_tokens} - gap_ids) == num_tokens - len(gap_ids):
        raise ArgumentError(argument, "leaves no token of the vocabulary")
