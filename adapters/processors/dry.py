"""Against repetition: a penalty that grows with the length of the repeat (DRY)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from adapters.contract import ArgumentError, Bias, Context, Edit, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.processors.arguments import Count
from adapters.processors.length import LARGEST
from adapters.processors.suffixes import SuffixAutomaton
from adapters.vocabulary import byte_index

_LN_FLOAT32_MAX = 88.72
"""Natural logarithm of the largest float32, rounded down: a larger exponent would overflow."""

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
    penalty is at most 1e30: no temperature makes a ban of it. The context is prompt and generated,
    its last ``range`` tokens if ``range`` is not 0; both occurrences are inside it.

    A breaker is a text. The suffix begins after the last token that completes a breaker, wherever
    token boundaries fall, and a token that holds a whole breaker is never penalised.

    Cost: each token O(1) amortised (suffix automaton); each edit iterates over at most
    ``max_exponent + 1`` lengths and the penalised tokens. Neither grows with the history. With
    ``range`` a generated token also costs one update for each distinct repeat that ends at it, at
    most ``allowed_length + max_exponent + 1``.
    """

    name = "dry"
    version = 2  # a penalty is at most 1e30
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
        return min(LARGEST, self._multiplier * self._base ** min(length - self._shortest, self._max_exponent))


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
            raise ArgumentError("breakers", f"{error}; with [] none is needed") from error
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
