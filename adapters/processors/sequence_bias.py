"""Sequence bias: a number added to a token where it would complete a sequence of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from adapters.contract import ArgumentError, Bias, Context, Edit, ProcessorArgs, Stage, SteeringProcessor
from adapters.processors.arguments import Phrase
from adapters.processors.bias import Value
from adapters.processors.masks import WordAutomaton

MAX_SEQUENCES = 1024


class BiasedSequence(Phrase):
    """A phrase and its bias."""

    bias: Value = Field(description="Added to the logit of the token that completes the sequence.")


class SequenceBias(SteeringProcessor):
    """Adds a bias to tokens that would complete a given sequence of tokens.

    Source: transformers' ``SequenceBiasLogitsProcessor``: where prompt + generated ends with all of
    a sequence but its last token, that token's logit gets its bias. Biases of several sequences
    that a token completes add up; a sequence of one token is biased everywhere. A text is the one
    sequence of tokens that `Vocabulary.encode` gives.
    """

    name = "sequence_bias"
    stage = Stage.BIAS

    class Args(ProcessorArgs):
        sequences: list[BiasedSequence] = Field(
            min_length=1, max_length=MAX_SEQUENCES, description="The sequences, each at most once."
        )

    def __init__(self, args: Args, context: Context) -> None:
        biases = {tuple(sequence.ids(context)): sequence.bias for sequence in args.sequences}
        if len(biases) < len(args.sequences):
            raise ArgumentError("sequences", "a sequence is given twice")
        self._automaton = BiasAutomaton(biases)
        self._longest = max(map(len, biases)) - 1
        self.reset()

    def reset(self) -> None:
        state = 0
        if self._longest:
            for token_id in self.prompt[-self._longest :]:
                state = self._automaton.step(state, token_id)
        self._states = [state]

    def advance(self, token_id: int, index: int) -> None:
        self._states.append(self._automaton.step(self._states[-1], token_id))

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        del self._states[len(self._states) - len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        return self._automaton.bias(self._states[-1])


class BiasAutomaton(WordAutomaton):
    """Automaton that finds the tokens that complete a sequence, and the sum of their biases.

    Args:
        biases: Bias of each sequence of token ids; no sequence is empty.
    """

    def __init__(self, biases: Mapping[tuple[int, ...], float]) -> None:
        super().__init__(biases)
        self._own: list[dict[int, float]] = [{} for _ in self._next]
        for sequence, bias in biases.items():
            state = 0
            for token_id in sequence[:-1]:
                state = self._next[state][token_id]
            self._own[state][sequence[-1]] = bias
        self._edits: dict[int, Bias | None] = {}

    def bias(self, state: int) -> Bias | None:
        """The biases after a history, None if there are none."""
        if state not in self._edits:
            self._edits[state] = self._sum(state)
        return self._edits[state]

    def _sum(self, state: int) -> Bias | None:
        found: dict[int, list[float]] = {}
        while True:
            for token_id, bias in self._own[state].items():
                found.setdefault(token_id, []).append(bias)
            if not state:
                break
            state = self._fail[state]
        if not found:
            return None
        ids = sorted(found)
        return Bias.of(ids, [math.fsum(found[token_id]) for token_id in ids])
