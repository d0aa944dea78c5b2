"""Hard masks by token id: allowed tokens, banned tokens, and words that must not come up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from adapters.contract import ArgumentError, Context, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.edits import Allow, Ban, Edit
from adapters.processors.arguments import TokenId, TokenIds, check_tokens, encode

MAX_WORDS = 1024
"""Most words of one request."""

MAX_WORD_TOKENS = 128
"""Longest word, tokens."""

MAX_WORD_TEXT = 256
"""Longest word, characters."""

Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_TEXT)]
WordIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_WORD_TOKENS)]


class AllowedTokens(SteeringProcessor):
    """Masks every token but the listed ones and, with ``allow_end``, the end tokens.

    Source: vLLM's ``allowed_token_ids``, which is ``allow_end`` false: an end token that is not listed is masked like
    any other, and an answer without one runs to its length limit. With ``allow_end``, the default here, the request's
    end tokens stay as they are, so that an answer can end; ``min_tokens`` holds them back.
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


class BannedTokens(SteeringProcessor):
    """Masks the listed tokens.

    Source: transformers' ``suppress_tokens``. End tokens may be listed; the answer then runs to its length limit.
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


class BadWords(SteeringProcessor):
    """Keeps words, each one or more tokens, out of the answer.

    Source: transformers' ``bad_words_ids``: the last token of a word is masked wherever the tokens before it are the
    word's other tokens. Only generated tokens count, as in vLLM: a word that would begin in the prompt is not masked.
    Of each text two token sequences are banned, "w" and " w" (with a space before it); other ways to spell a text
    in tokens, another case and other inflections are not. An end token alone is refused, ``banned_tokens`` bans it.
    """

    name = "bad_words"
    stage = Stage.MASK
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        words: list[Word] | None = Field(
            default=None,
            min_length=1,
            max_length=MAX_WORDS,
            description="Words as text; each also with a space before it.",
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
        sequences = args.token_ids or [ids for word in args.words or () for ids in spellings(context, word)]
        for i, sequence in enumerate(sequences):
            context.check_ids(argument if args.words else f"{argument}[{i}]", sequence)
            if len(sequence) == 1 and sequence[0] in context.end_token_ids:
                raise ArgumentError(argument, f"token {sequence[0]} ends the answer; use banned_tokens to ban it")
        check_some_left(context, argument, [sequence[0] for sequence in sequences if len(sequence) == 1])
        self._words = WordAutomaton(sequences)
        self._states = [0]

    def reset(self) -> None:
        self._states = [0]

    def advance(self, token_id: int, index: int) -> None:
        self._states.append(self._words.step(self._states[-1], token_id))

    def retract(self, token_ids: Sequence[int]) -> bool:
        del self._states[len(self._states) - len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        return self._words.ban(self._states[-1])


class WordAutomaton:
    """Which tokens would complete a word, for every history; a step costs the same however long the history is.

    Source: Aho and Corasick, CACM 1975, over the words without their last tokens. State 0 is the empty history.

    Args:
        words: Non-empty sequences of token ids.
    """

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
        """Breadth first: the fall-back of a state is its longest proper suffix that begins a word, too."""
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


def spellings(context: Context, word: str) -> list[list[int]]:
    """Token ids of ``word`` as given, and without and with one space before it, each once.

    Raises:
        ArgumentError: there is no tokenizer, or a spelling is too long or encodes to nothing.
    """
    bare = word.lstrip()
    texts = dict.fromkeys([word, bare, " " + bare] if bare else [word])
    found: list[list[int]] = []
    for text in texts:
        ids = encode(context, "words", text)
        if len(ids) > MAX_WORD_TOKENS:
            raise ArgumentError("words", f"expected at most {MAX_WORD_TOKENS} tokens a word, {text!r} has {len(ids)}")
        if ids not in found:
            found.append(ids)
    return found


def check_some_left(context: Context, argument: str, banned: Sequence[int]) -> None:
    """Raises `ArgumentError` if banning ``banned`` leaves no token."""
    num_tokens = context.vocabulary.num_tokens
    if len(banned) >= num_tokens and len({token_id for token_id in banned if token_id < num_tokens}) == num_tokens:
        raise ArgumentError(argument, "leaves no token of the vocabulary")
