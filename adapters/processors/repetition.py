"""Against repetition: n-gram bans and loop detection."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from adapters.contract import (
    ArgumentError,
    Ban,
    Context,
    Edit,
    Force,
    ProcessorArgs,
    Reads,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
)
from adapters.processors.characters import split_characters
from adapters.processors.ngrams import PromptNgrams


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
    stage = Stage.MASK
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        n: Annotated[int, Field(ge=1, le=256, description="Length of the n-gram in tokens.")]
        over: Annotated[
            Literal["prompt_and_generated", "generated"],
            Field(description="Text in which the first occurrence may be."),
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
        """Hash of the n - 1 tokens from ``first`` on."""
        begin = first - self._first_head
        return self._prompt_grams.window(self._heads[begin], self._heads[begin + self._n - 1])

    def _find(self, first: int) -> _Gram | None:
        """N-grams that begin with the n - 1 tokens from ``first`` on; equal hashes are verified."""
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
