"""Against repetition: n-gram bans, a penalty growing with the repeat (DRY), loop detection."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from adapters.contract import (
    ArgumentError,
    Ban,
    Bias,
    Context,
    Edit,
    Force,
    ProcessorArgs,
    Reads,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
)
from adapters.processors.arguments import Count
from adapters.processors.characters import split_characters
from adapters.processors.ngrams import PromptNgrams
from adapters.processors.suffixes import SuffixAutomaton
from adapters.vocabulary import byte_index

_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
_LN_FLOAT32_MAX = 88.72
"""Natural logarithm of the largest float32, rounded down: a larger exponent would overflow."""


class NoRepeatNgram(SteeringProcessor):
    """Bans every token that would complete an n-gram for the second time.

    Source: transformers, ``NoRepeatNGramLogitsProcessor`` (prompt and generated); vLLM's processor
    of the same name reads the generated tokens only. Token x is banned if the last n - 1 tokens
    followed by x already occur in the history. With n = 1 every token of the history is banned. No
    token is exempt, end tokens included: an n-gram that ended an earlier turn must not be repeated
    either.

    Cost: the prompt is indexed in a few passes (`adapters.processors.ngrams`), 12 bytes per token;
    a step takes one or two look-ups and the ids that are banned, whatever n is.
    """

    name = "no_repeat_ngram"
    version = 1
    stage = Stage.MASK
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        n: Annotated[int, Field(ge=1, le=256, description="Length of the n-gram in tokens.")]
        over: Annotated[
            Literal["prompt_and_generated", "generated"],
            Field(description="Where the first occurrence may be."),
        ] = "prompt_and_generated"

    def __init__(self, args: Args, context: Context) -> None:
        self._n = args.n
        self._over_prompt = args.over == "prompt_and_generated"
        self._size, self._num_tokens = context.vocabulary.size, context.vocabulary.num_tokens
        self.reset()

    def reset(self) -> None:
        self._begin = 0 if self._over_prompt else self._prompt_length
        self._prompt_grams = self.from_prompt((NoRepeatNgram, self._n, self._begin), self._index)
        # Hashes of the history's prefixes, from the prefix of `_first_head` tokens on.
        self._heads = list(self._prompt_grams.heads)
        self._first_head = self._prompt_length + 1 - len(self._heads)
        # By the hash of n - 1 tokens: the n-grams of that hash that the answer has read.
        self._grams: dict[int, list[_Gram]] = {}
        # For each generated token, whether it completed a new n-gram, which retracting removes.
        self._added: list[bool] = []

    def _index(self) -> PromptNgrams:
        prompt = self._tokens[self._begin : self._prompt_length]
        return PromptNgrams(np.array(prompt, dtype=np.int64), self._n - 1)

    def advance(self, token_id: int, index: int) -> None:
        self._heads.append(self._prompt_grams.head(self._heads[-1], token_id))
        self._added.append(self._count(token_id, self._prompt_length + index))

    def _count(self, token_id: int, last: int) -> bool:
        """Take the n-gram that ends with the token at ``last``."""
        first = last - self._n + 1
        if first < self._begin or not 0 <= token_id < self._size:
            return False
        gram = self._find(first)
        if gram is None:
            gram = _Gram(first)
            self._grams.setdefault(self._hash(first), []).append(gram)
        return gram.add(token_id)

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        end = self._prompt_length + len(self._added)
        for last in range(end - 1, end - 1 - len(token_ids), -1):
            if self._added.pop():
                self._remove_newest(last - self._n + 1)
            self._heads.pop()
        return True

    def _remove_newest(self, first: int) -> None:
        gram = self._find(first)
        assert gram is not None
        gram.remove_newest()
        if not gram.followers:  # its first occurrence is being removed
            self._grams[self._hash(first)].remove(gram)

    def edit(self) -> Edit | None:
        first = len(self._tokens) - self._n + 1
        gram = self._find(first) if first >= self._begin else None
        if gram is None or not gram.followers:
            return None
        if len(gram.followers) >= self._num_tokens:
            raise Unsatisfiable("every token would repeat an n-gram")
        return gram.ban()

    def _hash(self, first: int) -> int:
        """Of the n - 1 tokens from ``first`` on."""
        begin = first - self._first_head
        return self._prompt_grams.window(self._heads[begin], self._heads[begin + self._n - 1])

    def _find(self, first: int) -> _Gram | None:
        """What followed the n - 1 tokens from ``first`` on; equal hashes are verified."""
        key = self._hash(first)
        tokens = self._tokens[first : first + self._n - 1]
        for gram in self._grams.get(key, ()):
            if self._tokens[gram.first : gram.first + self._n - 1] == tokens:
                return gram
        found = self._prompt_grams.find(key)
        if found is None:
            return None
        position = self._begin + found[0]
        if self._tokens[position : position + self._n - 1] != tokens:
            return None
        gram = _Gram(position, [token_id for token_id in found[1] if 0 <= token_id < self._size])
        self._grams.setdefault(key, []).append(gram)
        return gram


class _Gram:
    """The first n - 1 tokens of an n-gram: their first position and their distinct followers."""

    def __init__(self, first: int, followers: Sequence[int] = ()) -> None:
        self.first = first
        self.followers = list(followers)
        self._known = set(followers)
        self._shown: _ShownIds | None = None

    def add(self, token_id: int) -> bool:
        """Add a follower; returns whether it is new."""
        if token_id in self._known:
            return False
        self._known.add(token_id)
        self.followers.append(token_id)
        return True

    def remove_newest(self) -> None:
        self._known.remove(self.followers.pop())
        self._shown = None

    def ban(self) -> Ban:
        if self._shown is None:
            self._shown = _ShownIds(self.followers)
        return self._shown.ban()


class _ShownIds:
    """A growing list of ids as a tensor that grows with it, by doubling."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self._ban = Ban.of(())
        self._buffer = torch.empty(0, dtype=torch.int64)

    def ban(self) -> Ban:
        done, count = len(self._ban.token_ids), len(self.ids)
        if done < count:
            if count > len(self._buffer):
                buffer = torch.empty(max(4, 2 * count), dtype=torch.int64)
                buffer[:done] = self._buffer[:done]
                self._buffer = buffer
            self._buffer[done:count] = torch.tensor(self.ids[done:])
            self._ban = Ban(self._buffer[:count])
        return self._ban


MAX_EXPONENT = 512
"""Largest exponent of DRY's base, at which longer repeats are capped.

Only bases below 1.19 reach it.
"""

_Breaker = Annotated[str, Field(min_length=1, max_length=64)]


class Dry(SteeringProcessor):
    """Penalises tokens that would continue a repeat, exponentially in its length (DRY).

    Source: p-e-w, text-generation-webui pull request 5677, with llama.cpp's limits. For a token x
    let ``rep`` be the length of the longest suffix of the context that also occurs earlier in it,
    followed by x. Where ``rep >= allowed_length``: ``z_x <- z_x - multiplier * base ** min(rep -
    allowed_length, max_exponent)``, max_exponent = min(floor(88.72 / ln base), 512), and the
    penalty is at most the largest float32. The context is prompt and generated, its last ``range``
    tokens if ``range`` is not 0; both occurrences are inside it.

    A breaker is a text. The suffix begins after the last token that completes a breaker, wherever
    token boundaries fall, and a token that holds a whole breaker is never penalised.

    Cost: each token O(1) amortised (suffix automaton); each edit iterates over at most
    ``max_exponent + 1`` lengths and the penalised tokens. Neither grows with the history. With
    ``range`` a generated token also costs one update for each distinct repeat that ends at it, at
    most ``allowed_length + max_exponent + 1``.
    """

    name = "dry"
    version = 1
    once = True  # a prompt's automaton costs more time and memory than any other processor's admission
    stage = Stage.PENALTY
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        multiplier: Annotated[float, Field(ge=0, le=1000, description="Penalty of the shortest repeat; 0 is off.")] = (
            0.8
        )
        base: Annotated[float, Field(ge=1, le=16, description="Growth per token of the repeat.")] = 1.75
        allowed_length: Annotated[int, Field(ge=1, le=512, description="Shortest repeat that is penalised.")] = 2
        breakers: Annotated[
            list[_Breaker], Field(max_length=32, description="Texts across which no repeat is counted.")
        ] = ["\n", ":", '"', "*"]  # noqa: RUF012 - pydantic copies defaults
        range: Annotated[Count, Field(description="Number of newest tokens to search, 0 for all.")] = 0

    def __init__(self, args: Args, context: Context) -> None:
        self._multiplier, self._base, self._shortest = args.multiplier, args.base, args.allowed_length
        self._max_exponent = MAX_EXPONENT if args.base > 1 else 0
        if args.base > 1:
            self._max_exponent = min(MAX_EXPONENT, int(_LN_FLOAT32_MAX / math.log(args.base)))
        self._range = args.range
        self._size = context.vocabulary.size
        self._breakers = _Breakers(args.breakers, context)
        self.reset()

    def reset(self) -> None:
        depth = self._shortest + self._max_exponent
        self._automaton = SuffixAutomaton(depth, track_ends=self._range > 0)
        # Number of tokens after the last breaker, and the tail that may be part of a breaker.
        self._limit, self._tail = 0, b""
        self._limits: list[tuple[int, bytes]] = []
        prompt = self.prompt[-self._range :]
        self._automaton.extend(prompt)
        # Repeats count up to the depth, and the tail before them depends on as many tokens as a
        # breaker has bytes.
        for token_id in prompt[-(depth + self._breakers.longest) :]:
            self._take(token_id)

    def advance(self, token_id: int, index: int) -> None:
        self._limits.append((self._limit, self._tail))
        self._automaton.append(token_id)
        self._take(token_id)

    def _take(self, token_id: int) -> None:
        broken, self._tail = self._breakers.take(self._tail, token_id)
        self._limit = 0 if broken else self._limit + 1

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        if not self._automaton.rewind(len(token_ids)):
            return False
        self._limit, self._tail = self._limits[-len(token_ids)]
        del self._limits[-len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        repeats = self._repeats()
        if not repeats:
            return None
        return Bias.of(list(repeats), [-self._penalty(length) for length in repeats.values()])

    def _repeats(self) -> dict[int, int]:
        """Length of the longest repeat that each penalised token would continue."""
        limit = self._limit
        if limit < self._shortest or self._multiplier == 0:
            return {}
        window_begin = self._automaton.size - self._range
        repeats: dict[int, int] = {}
        for token_id, length, end in self._automaton.followers(self._shortest):
            length = min(length, limit, end - window_begin) if self._range else min(length, limit)
            if length >= self._shortest and length > repeats.get(token_id, 0):
                repeats[token_id] = length
        return {
            token_id: length
            for token_id, length in repeats.items()
            if token_id not in self._breakers.token_ids and token_id < self._size
        }

    def _penalty(self, length: int) -> float:
        return min(_FLOAT32_MAX, self._multiplier * self._base ** min(length - self._shortest, self._max_exponent))


class _Breakers:
    """Finds where breakers end in the bytes of consecutive tokens.

    Attributes:
        token_ids: Tokens that hold a whole breaker: by their bytes, special tokens by their name.
        longest: Bytes of the longest breaker.
    """

    def __init__(self, texts: Sequence[str], context: Context) -> None:
        self._texts = sorted({text.encode() for text in texts})
        self._pieces: dict[int, bytes] = {}
        self.token_ids: frozenset[int] = frozenset()
        self._special: frozenset[int] = frozenset()
        self.longest = max(map(len, self._texts), default=1)
        if not texts:
            return
        try:
            index = byte_index(context.vocabulary)
        except ValueError as error:
            raise ArgumentError("breakers", f"{error}, or []") from error
        for text in self._texts:
            self._pieces.update(index.touching(text))
        whole = {token_id for token_id, piece in self._pieces.items() if any(text in piece for text in self._texts)}
        self._special = _special_tokens_holding(texts, context)
        self.token_ids = frozenset(whole) | self._special

    def take(self, tail: bytes, token_id: int) -> tuple[bool, bytes]:
        """Whether a breaker ends in this token, and the new tail (``tail`` is the previous one)."""
        piece = self._pieces.get(token_id)
        if piece is None:
            return token_id in self._special, b""
        held = tail + piece
        broken = any(held.find(text, max(0, len(tail) - len(text) + 1)) >= 0 for text in self._texts)
        return broken, held[len(held) - min(len(held), self.longest - 1) :]


def _special_tokens_holding(texts: Sequence[str], context: Context) -> frozenset[int]:
    vocabulary = context.vocabulary
    special = sorted(i for i in vocabulary.special_token_ids if i < vocabulary.num_tokens)
    assert vocabulary.tokenizer is not None
    names = vocabulary.tokenizer.convert_ids_to_tokens(special)
    return frozenset(
        token_id
        for token_id, name in zip(special, names, strict=True)
        if isinstance(name, str) and any(text in name for text in texts)
    )


class LoopStop(SteeringProcessor):
    """Ends the answer when it loops: the generated tail is ``copies`` exact copies of a cycle.

    Source: vLLM's ``repetition_detection`` and SGLang pull request 27778, as a processor. The
    generated tokens end with a cycle of p tokens, 1 <= p <= ``max_period``, repeated ``copies``
    times in a row; then an end token is forced, the model's own with the lowest id. Prompt tokens
    are not counted. If another processor bans the end (``min_tokens``) a loop cannot be stopped,
    and the request fails as unsatisfiable.

    A loop found inside a character is stopped after it: until then every token must reduce the
    number of missing bytes.

    Cost per token: a few operations on ``max_period`` numbers.
    """

    name = "loop_stop"
    version = 1
    stage = Stage.FORCE
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        max_period: Annotated[int, Field(ge=1, le=1024, description="Longest cycle in tokens.")] = 64
        copies: Annotated[int, Field(ge=2, le=1024, description="Copies in a row that count as a loop.")] = 8

    _UNDOABLE = 64

    def __init__(self, args: Args, context: Context) -> None:
        if context.end_token_id is None:
            raise ArgumentError("copies", "expected a request with an end token, this one has none")
        self._end = Force(context.end_token_id)
        self._characters = split_characters(context.vocabulary)
        self._max_period = args.max_period
        periods = np.arange(args.max_period, 0, -1, dtype=np.int64)
        self._enough = periods * (args.copies - 1)
        self.reset()

    def reset(self) -> None:
        # The end of `_recent` holds the newest max_period tokens, -1 before the answer.
        self._recent = np.full(max(1024, 4 * self._max_period), -1, dtype=np.int64)
        self._count = self._max_period
        # For each period, longest first: how many of the newest tokens equal the token one period
        # before.
        self._runs = np.zeros(self._max_period, dtype=np.int64)
        self._looping = False
        self._earlier: deque[tuple[np.ndarray[Any, np.dtype[np.int64]], bool]] = deque(maxlen=self._UNDOABLE)

    def advance(self, token_id: int, index: int) -> None:
        self._earlier.append((self._runs, self._looping))
        if self._count == len(self._recent):
            kept = self._max_period + self._UNDOABLE
            self._recent[:kept] = self._recent[-kept:].copy()
            self._count = kept
        window = self._recent[self._count - self._max_period : self._count]
        self._runs = (self._runs + 1) * (window == token_id)
        waits = self._looping and bool(self._open(self._prompt_length + index))
        self._looping = waits or bool((self._runs >= self._enough).any())
        self._recent[self._count] = token_id
        self._count += 1

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        if len(token_ids) > len(self._earlier):
            return False
        for _ in token_ids:
            self._runs, self._looping = self._earlier.pop()
        self._count -= len(token_ids)
        return True

    def edit(self) -> Edit | None:
        if not self._looping:
            return None
        beginning = self._open(len(self._tokens))
        return self._characters.room(beginning, 0) if beginning else self._end

    def _open(self, end: int) -> bytes:
        """The incomplete character at the end of the generated tokens before position ``end``."""
        return self._characters.open_after(self._tokens, self._prompt_length, end)
