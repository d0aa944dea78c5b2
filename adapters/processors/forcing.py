"""Forcing: a whole answer, its beginning, or its end, as functions of the history."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from adapters.contract import (
    Allow,
    ArgumentError,
    Context,
    Edit,
    Force,
    Processor,
    ProcessorArgs,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
)
from adapters.processors.arguments import Phrase, Text, check_no_end, check_tokens, encode
from adapters.processors.characters import MOST_MISSING, split_characters
from adapters.vocabulary import byte_index


class ForcedSequence(SteeringProcessor):
    """The answer is a given sequence, then the end token.

    Source: Dynamo's ``ForcedTokenSequenceSpec``, by position instead of by calls: generated token i
    is the i-th of the sequence, and the one after the last is an end token, the model's own with
    the lowest id. An end token at the end of ``token_ids`` is that end token. A sequence of exactly
    ``max_tokens`` tokens is complete without one.
    """

    name = "forced_sequence"
    stage = Stage.FORCE
    reads = Reads.NOTHING

    class Args(Phrase):
        pass

    def __init__(self, args: Args, context: Context) -> None:
        argument, ids = _phrase(args, context)
        if ids[-1] not in context.end_token_ids:
            ids = [*ids, end_token(context, argument)]
        check_no_end(context, argument, ids[:-1])
        _check_room(context, argument, len(ids) - 1)
        self._forces = [Force(token_id) for token_id in ids]

    def edit(self) -> Edit | None:
        return self._forces[min(self.num_generated, len(self._forces) - 1)]

    def foresee(self, limit: int) -> Sequence[int]:
        return [force.token_id for force in self._forces[self.num_generated :][:limit]]


class ForcedPrefix(SteeringProcessor):
    """The answer begins with a given sequence.

    Source: transformers' ``forced_bos_token_id``, for any number of tokens: generated token i is
    the i-th of the sequence; the rest is not constrained. With ``heal`` the model chooses how the
    sequence ends (token healing, as in guidance): at each of its tokens, any token is allowed too
    that begins with all of the text that is left, so that a word which continues the sequence is
    tokenized as elsewhere.
    """

    name = "forced_prefix"
    stage = Stage.FORCE
    reads = Reads.NOTHING

    class Args(Phrase):
        heal: bool = Field(default=False, description="The text may end within a token that goes on with it.")

    def __init__(self, args: Args, context: Context) -> None:
        self._argument, self._ids = _phrase(args, context)
        check_no_end(context, self._argument, self._ids)
        _check_room(context, self._argument, len(self._ids))
        self._edits: list[Edit] = [Force(token_id) for token_id in self._ids]

    @classmethod
    def build(cls, args: Args, context: Context) -> list[Processor]:
        return [_HealedPrefix(args, context) if args.heal else cls(args, context)]

    def edit(self) -> Edit | None:
        i = self.num_generated
        return self._edits[i] if i < len(self._edits) else None

    def foresee(self, limit: int) -> Sequence[int]:
        ahead = self._edits[self.num_generated :][:limit]
        return [edit.token_id for edit in ahead if isinstance(edit, Force)]


class _HealedPrefix(ForcedPrefix):
    """A prefix whose end is the model's choice: a token that continues it may end it early."""

    reads = Reads.GENERATED

    def __init__(self, args: ForcedPrefix.Args, context: Context) -> None:
        super().__init__(args, context)
        try:
            index = byte_index(context.vocabulary)
        except ValueError as error:
            raise ArgumentError("heal", str(error)) from error
        left = b""
        for i in reversed(range(len(self._ids))):
            text = index[self._ids[i]]
            left = text + left
            if not text or len(left) > index.longest:
                break
            found = {other for other in index.containing(left) if index[other].startswith(left)}
            found = (found - context.end_token_ids) | {self._ids[i]}
            if len(found) > 1:
                self._edits[i] = Allow.of(found, context.vocabulary.size)
        self.reset()

    def reset(self) -> None:
        self._length = 0
        self._left_at: int | None = None  # index of the token that continued the text

    def advance(self, token_id: int, index: int) -> None:
        if self._left_at is None and index < len(self._ids) and token_id != self._ids[index]:
            self._left_at = index
        self._length = index + 1

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._length -= len(token_ids)
        if self._left_at is not None and self._left_at >= self._length:
            self._left_at = None
        return True

    def edit(self) -> Edit | None:
        return super().edit() if self._left_at is None else None


class ForceLastPhrase(SteeringProcessor):
    """The answer ends with a given phrase, always and exactly, right before its end token.

    Source: the idea of ``ForceLastPhraseLogitsProcessor`` in NVIDIA's logits-processor-zoo, as a
    function of the generated tokens alone. Until the phrase begins, its first token replaces the
    end of the answer: where an end token would be sampled the first token is sampled instead, and
    it is sampled nowhere else. So the phrase begins at its first token's first occurrence in the
    answer, the rest and then an end token are forced, and a replayed history begins it at the same
    position. Two consequences: the unconstrained part of an answer never holds the first token of
    the phrase (prefer phrases that begin with a rare token), and no other control may force that
    token earlier.

    Formula: after the hard masks the first token's logit becomes the logsumexp of the end tokens'
    logits, which become -inf. If only the sum of several end tokens exceeds the best other token,
    it stays just below that token, so that a greedy answer ends where it would have ended. Where a
    mask forbids the first token the answer cannot end. With ``max_tokens`` the phrase is forced as
    soon as only the phrase and the end token fit.

    The phrase never cuts a character: inside one, its first token and the end tokens are masked,
    and with fewer than four tokens left before the phrase is forced, so are tokens after which a
    character would lack more bytes than tokens are left.
    """

    name = "force_last_phrase"
    stage = Stage.FORCE
    reads = Reads.GENERATED
    scopes = ("all", "answer")
    counts_down = True

    class Args(ProcessorArgs):
        text: Text = Field(description="The last words of the answer, exactly.")

    def __init__(self, args: Args, context: Context) -> None:
        ids = encode(context, "text", args.text)
        check_tokens(context, "text", ids)
        check_no_end(context, "text", ids)
        _check_room(context, "text", len(ids) + 1)
        self._forces = [Force(token_id) for token_id in (*ids, end_token(context, "text"))]
        self._max_tokens = context.max_tokens
        self._characters = split_characters(context.vocabulary)
        self._length = 0
        self._began: int | None = None

    @classmethod
    def build(cls, args: Args, context: Context) -> list[Processor]:
        """Two parts: one forces by history, one replaces the end tokens by the first token."""
        return [cls(args, context), _PhraseInsteadOfEnd(args, context)]

    def reset(self) -> None:
        self._length, self._began = 0, None

    def advance(self, token_id: int, index: int) -> None:
        if self._began is None and token_id == self._forces[0].token_id:
            self._began = index
        self._length = index + 1

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._length -= len(token_ids)
        if self._began is not None and self._began >= self._length:
            self._began = None
        return True

    def edit(self) -> Edit | None:
        if self._began is not None:
            return self._forces[min(self.num_generated - self._began, len(self._forces) - 1)]
        if self._max_tokens is None:
            return None
        room = self._max_tokens - self.num_generated - self.num_outside
        if room < len(self._forces):
            raise Unsatisfiable(f"the last phrase and the end take {len(self._forces)} tokens, {room} are left")
        left = room - len(self._forces)
        if left == 0:
            return self._forces[0]
        if left > MOST_MISSING:
            return None
        return self._characters.room(self._characters.open_after(self._tokens, self._prompt_length), left)

    def foresee(self, limit: int) -> Sequence[int]:
        if self._began is None:
            return ()
        return [force.token_id for force in self._forces[self.num_generated - self._began :][:limit]]


class _PhraseInsteadOfEnd(ShapingProcessor):
    """Until the phrase begins, its first token replaces the end tokens; later rows are forced."""

    name = ForceLastPhrase.name
    stage = Stage.FORCE
    reads = Reads.GENERATED
    scopes = ForceLastPhrase.scopes
    Args = ForceLastPhrase.Args

    def __init__(self, args: ForceLastPhrase.Args, context: Context) -> None:
        self._first = encode(context, "text", args.text)[0]
        self._ends = torch.tensor(sorted(context.end_token_ids), dtype=torch.int64)
        self._characters = split_characters(context.vocabulary)

    def shape(self, logits: torch.Tensor) -> None:
        index = self._ends.to(logits.device)
        ends, first = logits[index], logits[self._first].clone()
        logits[index] = -torch.inf
        logits[self._first] = -torch.inf
        if self._characters.open_after(self._tokens, self._prompt_length):
            return
        mass, best = ends.logsumexp(0), logits.amax()
        below = torch.nextafter(best, torch.full_like(best, -torch.inf))
        mass = torch.where(ends.amax() >= best, mass, torch.minimum(mass, below))
        logits[self._first] = torch.where(first.isfinite(), mass, first)


def end_token(context: Context, argument: str) -> int:
    """The token that ends a forced answer, `Context.end_token_id`.

    Raises:
        ArgumentError: the request has none; the error names ``argument``.
    """
    if context.end_token_id is None:
        raise ArgumentError(argument, "the answer must end after it, and the request has no end token")
    return context.end_token_id


def _phrase(args: Phrase, context: Context) -> tuple[str, list[int]]:
    """Name of the given argument, and its ids."""
    argument = "text" if args.token_ids is None else "token_ids"
    ids = args.ids(context)
    check_tokens(context, argument, ids)
    return argument, ids


def _check_room(context: Context, argument: str, num_tokens: int) -> None:
    if context.max_tokens is not None and num_tokens > context.max_tokens:
        raise ArgumentError(argument, f"takes {num_tokens} tokens, the answer at most {context.max_tokens}")
