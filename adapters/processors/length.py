"""Length of an answer: a minimum, and two length penalties on the end tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field

from adapters.contract import (
    ALWAYS,
    ArgumentError,
    Ban,
    Bias,
    Context,
    Edit,
    Processor,
    ProcessorArgs,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
)
from adapters.processors.arguments import Count
from adapters.vocabulary import Vocabulary

LARGEST = 1e30
"""Cap of growing terms: far beyond any logit, and exact enough in float32 sums."""

# Quotes, brackets, emphasis; then full stops of Latin scripts, ideographic and full-width ones.
_CLOSERS = " \t\"')]}*_\u00bb\u201d\u2019"
_STOPS = (".", "!", "?", "\u2026", "\n", "\u3002", "\uff01", "\uff1f")


class MinTokens(SteeringProcessor):
    """Masks the end tokens until the answer has n tokens.

    Source: transformers' ``min_new_tokens``: every end token of the request is -inf while fewer
    than n tokens were generated. The end token itself is not counted. Stop strings do not end the
    answer of the offline engine earlier either; where an answer is served, the field ``min_tokens``
    alone holds them off.
    """

    name = "min_tokens"
    stage = Stage.MASK
    reads = Reads.NOTHING

    class Args(ProcessorArgs):
        n: Count = Field(description="Fewest tokens of the answer, its end token not counted; 0 changes nothing.")

    def __init__(self, args: Args, context: Context) -> None:
        if context.max_tokens is not None and args.n > context.max_tokens:
            problem = f"expected at most {context.max_tokens}, the most tokens of the answer, got {args.n}"
            raise ArgumentError("n", problem)
        self._n = args.n
        self._ban = Ban.of(context.end_token_ids) if context.end_token_ids else None

    @property
    def is_too_short(self) -> bool:
        return self.num_generated < self._n

    def edit(self) -> Edit | None:
        return self._ban if self.is_too_short else None

    def same_until(self) -> int:
        missing = self._n - self.num_generated
        return self.position + missing if missing > 0 else ALWAYS


class GenLength(SteeringProcessor):
    """Raises the logits of the end tokens as the answer grows; negative boosts lengthen answers.

    Source: ``GenLengthLogitsProcessor`` of NVIDIA's logits-processor-zoo: z_e + boost * n^power /
    10^power for every end token e, where n is the number of generated tokens. With
    ``complete_sentences`` only where the newest generated token ends a sentence: its text, without
    closing quotes, brackets and spaces, ends with a full stop, an exclamation or question mark or a
    newline (the zoo has the single tokens "." and newline). The boost stays within ±1e30. An end
    token ends the answer, so there is nothing to boost after it.
    """

    name = "gen_length"
    stage = Stage.SOFT
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        boost: float = Field(ge=-1000.0, le=1000.0, description="Added to the logits of the end tokens at 10 tokens.")
        power: float = Field(default=2.0, ge=0.0, le=10.0, description="Exponent of the number of generated tokens.")
        complete_sentences: bool = Field(default=False, description="Boost only where a sentence has just ended.")

    def __init__(self, args: Args, context: Context) -> None:
        self._args = args
        self._end_ids = _end_ids(context)
        self._sentence_ends: frozenset[int] | None = None
        if args.complete_sentences:
            self._sentence_ends = sentence_ends(context.vocabulary)

    @classmethod
    def build(cls, args: Args, context: Context) -> list[Processor]:
        """A variant that reads the position only, if the text does not matter."""
        return [(cls if args.complete_sentences else _GenLengthByCount)(args, context)]

    def edit(self) -> Edit | None:
        value = self._boost()
        if value == 0 or not len(self._end_ids):
            return None
        if self._sentence_ends is not None and not (self.num_generated and self.last_token in self._sentence_ends):
            return None
        return Bias(self._end_ids, torch.full(self._end_ids.shape, value, dtype=torch.float32))

    def _boost(self) -> float:
        value = self._args.boost * math.pow(self.num_generated / 10, self._args.power)
        return max(-LARGEST, min(value, LARGEST))


class _GenLengthByCount(GenLength):
    reads = Reads.NOTHING


class ExponentialDecayLength(ShapingProcessor):
    """Raises the end tokens' logits exponentially once the answer exceeds a start length.

    Source: ``ExponentialDecayLengthPenalty`` of transformers: z_e + |z_e| * (factor^(n - start)
    - 1) for every end token e, where n > start is the number of generated tokens. A logit of
    exactly 0 stays, a masked one stays masked. The growth factor^(n - start) stops at 1e30.
    """

    name = "exponential_decay_length"
    stage = Stage.SOFT
    reads = Reads.NOTHING

    class Args(ProcessorArgs):
        start: Count = Field(description="Generated tokens after which the end tokens' logits begin to grow.")
        factor: float = Field(ge=1.0, le=100.0, description="Growth per token; 1 changes nothing.")

    def __init__(self, args: Args, context: Context) -> None:
        self._start, self._factor = args.start, args.factor
        self._end_ids = _end_ids(context)

    def shape(self, logits: torch.Tensor) -> None:
        self.shape_rows([self], logits.unsqueeze(0))

    @classmethod
    def shape_rows(cls, processors: Sequence[Self], logits: torch.Tensor) -> None:
        active = [(row, p) for row, p in enumerate(processors) if p.num_generated > p._start and len(p._end_ids)]
        if not active:
            return
        counts = torch.tensor([len(p._end_ids) for _, p in active])
        rows = torch.tensor([row for row, _ in active]).repeat_interleave(counts).to(logits.device)
        ids = torch.cat([p._end_ids for _, p in active]).to(logits.device)
        gains = torch.tensor([p._growth() - 1 for _, p in active], dtype=torch.float32)
        z = logits[rows, ids]
        grown = (z + z.abs() * gains.repeat_interleave(counts).to(logits.device)).clamp(max=3e38)
        logits[rows, ids] = torch.where(z.isfinite(), grown, z)

    def _growth(self) -> float:
        excess = self.num_generated - self._start
        if excess * math.log(self._factor) >= math.log(LARGEST):
            return LARGEST
        return float(self._factor**excess)


def sentence_ends(vocabulary: Vocabulary) -> frozenset[int]:
    """Ids whose text ends a sentence, computed once per vocabulary.

    Raises:
        ArgumentError: there is no tokenizer.
    """
    try:
        return vocabulary.derived("sentence ends", lambda: _find_sentence_ends(vocabulary))
    except ValueError as error:
        raise ArgumentError("complete_sentences", str(error)) from error


def _find_sentence_ends(vocabulary: Vocabulary) -> frozenset[int]:
    texts = (token.decode("utf-8", "replace") for token in vocabulary.token_bytes)
    return frozenset(i for i, text in enumerate(texts) if text.rstrip(_CLOSERS).endswith(_STOPS))


def _end_ids(context: Context) -> torch.Tensor:
    return torch.tensor(sorted(context.end_token_ids), dtype=torch.int64)
