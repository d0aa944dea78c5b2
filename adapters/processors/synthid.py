"""SynthID-Text: a watermark by a tournament among the tokens, and its detector."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from pydantic import Field

from adapters.contract import Context, ProcessorArgs
from adapters.processors.watermark import (
    DEFAULT_CONTEXT,
    MAX_CONTEXT,
    KeyedShaping,
    WatermarkScore,
    checked_key,
    first_contexts,
)

DEFAULT_DEPTH, MAX_DEPTH = 30, 64
TABLE_SIZE, TABLE_SEED = 2**16, 0

_Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

_MULTIPLIER = np.uint64(6364136223846793005)


class SynthId(KeyedShaping):
    """Watermarks the text with an operator's key by SynthID-Text's tournament, two tokens a round.

    Source: Dathathri et al., "Scalable watermarking for identifying large language model outputs",
    Nature 634 (2024), with the hash and the table of transformers'
    ``SynthIDTextWatermarkLogitsProcessor``. In each of ``depth`` rounds p(t) becomes
    p(t) * (1 + g(t) - sum of g * p), where g in {0, 1} is a keyed hash of the last ``context``
    tokens of prompt + generated, of t and of the round. The rounds' keys are derived from the
    operator's (BLAKE2b). Over random keys the token is distributed as p, the row after temperature
    and truncation; the request's own seed then decides.

    A context that occurred at an earlier position of the answer is not used again: there the row is
    left alone. A row with one token left, such as a greedy one, carries no mark. The work grows
    with the tokens that truncation leaves, times ``depth``.
    """

    name = "synthid"

    class Args(ProcessorArgs):
        key_id: str = Field(min_length=1, max_length=128, description="Name of one of the operator's keys.")
        context: int = Field(
            default=DEFAULT_CONTEXT, ge=1, le=MAX_CONTEXT, description="Tokens before it that a token's g depends on."
        )
        depth: int = Field(default=DEFAULT_DEPTH, ge=1, le=MAX_DEPTH, description="Rounds of the tournament.")

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.key_id, args.context, context)
        self.keys = round_keys(self.key, args.depth)

    def shape(self, logits: torch.Tensor) -> None:
        if self.is_repeated:
            return
        context = self._contexts[-1]
        token_ids = torch.nonzero(logits != -torch.inf).squeeze(1)
        scores = logits[token_ids].double().cpu()
        if len(scores) < 2 or bool(scores.isnan().any()):
            return
        padded = (*[0] * (self.context - len(context)), *context)
        values = torch.from_numpy(g_values(self.keys, padded, token_ids.cpu().numpy()))
        chances = tournament(torch.softmax(scores, -1), values)
        logits[token_ids] = chances.log_().to(logits.dtype).to(logits.device)


def round_keys(key: bytes, depth: int) -> _Words:
    """Keys of the rounds, uint64 ``[depth]`` below 2**63, from the operator's key."""
    digests = (hashlib.blake2b(b"synthid %d" % i, digest_size=8, key=key).digest() for i in range(depth))
    return np.array([int.from_bytes(digest, "little") >> 1 for digest in digests], dtype=np.uint64)


def tournament(chances: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The distribution of a tournament's winner.

    Args:
        chances: Probabilities of the tokens, float64 ``[n]``.
        values: g of each round and token, 0 or 1, ``[depth, n]``.
    """
    for g in values.to(chances.dtype):
        chances = chances * (1.0 + g - (g * chances).sum()).clamp_(min=0.0)  # rounding goes below
    return chances


def g_values(keys: _Words, context: Sequence[int], token_ids: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """g of each round and token: int64 ``[depth, n]`` of 0 and 1.

    The hash is a linear congruential generator modulo 2**64, over the context, the token and the
    round's key; its remainder by the table's size, as a signed number, is looked up.
    """
    state = np.ones(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for token_id in context:
            state = _hashed(state, np.uint64(token_id))
        state = _hashed(state, token_ids.astype(np.uint64))
        state = _hashed(state[None, :], keys[:, None])
    return _table()[state.astype(np.int64) % TABLE_SIZE]


def _hashed(state: _Words, words: Any) -> _Words:
    hashed: _Words = (state + words) * _MULTIPLIER + np.uint64(1)
    return hashed


@lru_cache(maxsize=1)
def _table() -> np.ndarray[Any, np.dtype[np.int64]]:
    generator = torch.Generator().manual_seed(TABLE_SEED)
    return torch.randint(0, 2, (TABLE_SIZE,), generator=generator).numpy()


def detect_synthid(
    token_ids: Sequence[int],
    key: bytes,
    vocab_size: int,
    context: int = DEFAULT_CONTEXT,
    depth: int = DEFAULT_DEPTH,
) -> WatermarkScore:
    """Test whether a text carries the SynthID watermark of ``key``.

    The statistic is the number of ones among the g values of the scored tokens, which without the
    watermark has a binomial distribution. A part of a text will do.

    Args:
        token_ids: The text, encoded as the model encodes; without the prompt, if it is known.
        key: The operator's key.
        vocab_size: Width of the model's vocabulary.
        context: Context length of the processor that wrote the text.
        depth: Depth of that processor.

    Raises:
        ValueError: an id is outside the vocabulary, or the key, context or depth is out of bounds.
    """
    if not 1 <= context <= MAX_CONTEXT or not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"context and depth must be 1 to {MAX_CONTEXT} and 1 to {MAX_DEPTH}, got {context}, {depth}")
    keys = round_keys(checked_key(key), depth)
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token ids must be between 0 and {vocab_size - 1}, got {token_id}")
    scored = list(first_contexts(token_ids, context))
    if not scored:
        return WatermarkScore(1.0, 0)
    ones = sum(int(g_values(keys, before, np.array([token_id])).sum()) for before, token_id in scored)
    return WatermarkScore(_binomial_tail(ones, len(scored) * depth, float(_table().mean())), len(scored))


def _binomial_tail(successes: int, trials: int, chance: float) -> float:
    """Probability of at least ``successes``."""
    counts = torch.arange(successes, trials + 1, dtype=torch.float64)
    logs = (
        math.lgamma(trials + 1)
        - torch.lgamma(counts + 1)
        - torch.lgamma(trials - counts + 1)
        + counts * math.log(chance)
        + (trials - counts) * math.log1p(-chance)
    )
    return min(1.0, float(logs.logsumexp(0).exp()))
