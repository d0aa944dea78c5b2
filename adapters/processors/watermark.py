"""A watermark that does not change the distribution of the text, and its detector."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field

from adapters.contract import ArgumentError, Context, ProcessorArgs, Reads, ShapingProcessor, Stage, uniforms_at

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
DEFAULT_CONTEXT, MAX_CONTEXT = 4, 64


class KeyedShaping(ShapingProcessor):
    """Shapes a row by an operator's key and the last tokens of the history, each context once.

    Args:
        key_id: Name of the key.
        num_tokens: Length of a context, tokens.
        context: Context of the request.
    """

    stage = Stage.SAMPLING
    reads = Reads.PROMPT_AND_GENERATED

    def __init__(self, key_id: str, num_tokens: int, context: Context) -> None:
        key = context.watermark_keys.get(key_id)
        if key is None:
            raise ArgumentError("key_id", f"the operator has no watermark key {key_id!r}")
        try:
            self.key = checked_key(key)
        except ValueError as error:
            raise ArgumentError("key_id", f"{key_id!r}: {error}") from error
        self.context = num_tokens
        self._contexts: list[tuple[int, ...]] = [()]  # before generated token 0, 1, ...
        self._first_use: dict[tuple[int, ...], int] = {}

    @property
    def is_repeated(self) -> bool:
        """Whether the context at `position` occurred at an earlier position of the answer."""
        return self._contexts[-1] in self._first_use

    def reset(self) -> None:
        self._contexts = [tuple(self.prompt[-self.context :])]
        self._first_use = {}

    def advance(self, token_id: int, index: int) -> None:
        context = self._contexts[-1]
        self._first_use.setdefault(context, index)
        self._contexts.append((*context, token_id)[-self.context :])

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        for _ in token_ids:
            self._contexts.pop()
            if self._first_use.get(self._contexts[-1]) == len(self._contexts) - 1:
                del self._first_use[self._contexts[-1]]
        return True


class Watermark(KeyedShaping):
    """Watermarks the text with an operator's key, so that holders of the key can detect it.

    Source: S. Aaronson, "My AI Safety Lecture for UT Effective Altruism" (2022), in its Gumbel
    form: the token is argmax of ln p(t) - ln(-ln u(t)), where u(t) in (0, 1) is a keyed hash
    (BLAKE2b, then `adapters.contract.random_numbers`) of the last ``context`` tokens of prompt +
    generated, and of t. All other tokens are masked, so that the sampler returns it. Over random
    keys the token is distributed as p, the row after temperature and truncation.

    A context that occurred at an earlier position of the answer is not used again: there the row is
    left alone and the request's own seed decides, since repeated noise would make loops. Elsewhere
    the seed has no effect: the same key and row give the same token, in every choice. A row with
    one token left, such as a greedy one, carries no mark.
    """

    name = "watermark"

    class Args(ProcessorArgs):
        key_id: str = Field(min_length=1, max_length=128, description="Name of one of the operator's keys.")
        context: int = Field(
            default=DEFAULT_CONTEXT, ge=1, le=MAX_CONTEXT, description="Tokens that the noise of a token depends on."
        )

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args.key_id, args.context, context)

    def shape(self, logits: torch.Tensor) -> None:
        if self.is_repeated:
            return
        token_ids = torch.nonzero(logits != -torch.inf).squeeze(1)
        scores = logits[token_ids].double().cpu()
        if len(scores) < 2 or bool(scores.isnan().any()):
            return
        scores -= uniforms_at(noise_key(self.key, self._contexts[-1]), token_ids).log_().neg_().log_()
        chosen = token_ids[scores.argmax()]
        kept = logits[chosen].clone()
        logits.fill_(-torch.inf)
        logits[chosen] = kept


def checked_key(key: bytes) -> bytes:
    """``key`` if it has a usable length.

    Raises:
        ValueError: it has fewer than 16 or more than 64 bytes.
    """
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a watermark key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, this one has {len(key)}")
    return key


def read_key(path: Path) -> bytes:
    """The key in a file of hexadecimal digits, as ``openssl rand -hex 32`` prints them.

    Raises:
        ValueError: it is not hexadecimal, or of the wrong length; the message does not show it.
        OSError: the file cannot be read.
    """
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError:
        raise ValueError(f"{path} does not hold a key in hexadecimal digits") from None
    return checked_key(key)


def noise_key(key: bytes, context: Sequence[int]) -> int:
    """64-bit noise key: BLAKE2b, keyed by ``key``, of the context's ids as little-endian uint64."""
    data = struct.pack(f"<{len(context)}Q", *context)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")


@dataclass(frozen=True, slots=True)
class WatermarkScore:
    """The detector's result.

    Attributes:
        p_value: Chance that text made without the key scores at least as high. 1.0 if nothing could
            be scored.
        num_scored: Tokens scored: those with a full context that did not occur before.
    """

    p_value: float
    num_scored: int


def detect(token_ids: Sequence[int], key: bytes, vocab_size: int, context: int = DEFAULT_CONTEXT) -> WatermarkScore:
    """Test whether a text carries the watermark of ``key``.

    The statistic is the sum of -ln(1 - u) over the scored tokens, which without the watermark has a
    Gamma(n, 1) distribution. A part of a text suffices; editing loses the tokens whose context was
    edited.

    Args:
        token_ids: The text, encoded as the model encodes; without the prompt, if it is known.
        key: The operator's key.
        vocab_size: Width of the model's vocabulary.
        context: The processor's ``context``.

    Raises:
        ValueError: an id is outside the vocabulary, or the key or context is out of bounds.
    """
    checked_key(key)
    if not 1 <= context <= MAX_CONTEXT:
        raise ValueError(f"context must be between 1 and {MAX_CONTEXT}, got {context}")
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token ids must be between 0 and {vocab_size - 1}, got {token_id}")
    scores = [
        -math.log1p(-float(uniforms_at(noise_key(key, before), torch.tensor([token_id]))))
        for before, token_id in first_contexts(token_ids, context)
    ]
    if not scores:
        return WatermarkScore(1.0, 0)
    count, total = torch.tensor([len(scores), math.fsum(scores)], dtype=torch.float64)
    return WatermarkScore(float(torch.special.gammaincc(count, total)), len(scores))


def first_contexts(token_ids: Sequence[int], length: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each distinct context of ``length`` tokens, and the token after its first occurrence."""
    seen: set[tuple[int, ...]] = set()
    for i in range(length, len(token_ids)):
        before = tuple(token_ids[i - length : i])
        if before not in seen:
            seen.add(before)
            yield before, token_ids[i]
