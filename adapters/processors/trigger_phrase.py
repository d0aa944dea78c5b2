"""A phrase that is written at a trigger, or after a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from adapters.contract import Context, Edit, Force, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.processors.arguments import PositiveCount, ShortText, Text, check_no_end, encode
from adapters.processors.characters import MOST_MISSING, split_characters
from adapters.vocabulary.text_match import TextMatcher


class _Phase(NamedTuple):
    """State of the answer.

    Attributes:
        written: Tokens of the phrase at the end of the answer while it is due or being written,
            else -1.
        matched: Bytes of the trigger at the end of the answer.
        waited: Tokens since the beginning or the last phrase.
        times: Number of phrases begun.
    """

    written: int
    matched: int
    waited: int
    times: int


class TriggerPhrase(SteeringProcessor):
    """Writes a phrase whenever a trigger has been generated, or after a number of tokens.

    Source: TriggerPhrase of NVIDIA's logits-processor-zoo, with time measured in tokens. With
    ``trigger`` the phrase is forced after the token in which the trigger text is completed, however
    the answer splits it. With ``after_tokens`` it is forced once that many tokens were generated
    since the beginning or since the last phrase. Both look at the generated tokens only; the phrase
    itself neither triggers nor counts. An answer that ends earlier has no phrase. A trigger that
    names a special token matches that token.

    The phrase never cuts a character: with fewer than four of ``after_tokens`` left, tokens after
    which a character would lack more bytes than tokens are left are masked. If the token that
    completes a trigger begins another character, the phrase waits for its end, and until then every
    token must reduce the number of missing bytes.
    """

    name = "trigger_phrase"
    stage = Stage.FORCE
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        text: Annotated[Text, Field(description="The phrase.")]
        trigger: Annotated[ShortText | None, Field(description="Text after which the phrase is written.")] = None
        after_tokens: Annotated[
            PositiveCount | None, Field(description="Tokens after which the phrase is written.")
        ] = None
        times: Annotated[int, Field(ge=1, le=4096, description="Most phrases in the answer.")] = 1

        @model_validator(mode="after")
        def _exactly_one(self) -> Self:
            if (self.trigger is None) == (self.after_tokens is None):
                raise ValueError("give either trigger or after_tokens")
            return self

    def __init__(self, args: Args, context: Context) -> None:
        self._phrase = encode(context, "text", args.text)
        check_no_end(context, "text", self._phrase)
        self._forces = [Force(token_id) for token_id in self._phrase]
        self._after, self._times = args.after_tokens, args.times
        self._trigger: TextMatcher | None = None
        if args.trigger is not None:
            trigger = encode(context, "trigger", args.trigger)
            self._trigger = TextMatcher.of_tokens(context.vocabulary, trigger)
        self._characters = split_characters(context.vocabulary)
        self.reset()

    def reset(self) -> None:
        self._phase = _Phase(-1, 0, 0, 0)
        self._earlier: list[_Phase] = []

    def advance(self, token_id: int, index: int) -> None:
        self._earlier.append(self._phase)
        if self._phase.written != 0 or not self._open(self._prompt_length + index):  # else it is still waiting
            self._phase = self._next(self._phase, token_id)

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._phase = self._earlier[-len(token_ids)]
        del self._earlier[-len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        phase = self._phase
        if phase.written == 0 and (beginning := self._open(len(self._tokens))):
            return self._characters.room(beginning, 0)
        if phase.written >= 0:
            return self._forces[phase.written]
        if self._after is None or phase.times == self._times or self._after - phase.waited > MOST_MISSING:
            return None
        return self._characters.room(self._open(len(self._tokens)), self._after - phase.waited)

    def foresee(self, limit: int) -> Sequence[int]:
        written = self._phase.written
        if written < 0 or (written == 0 and self._open(len(self._tokens))):
            return ()
        return self._phrase[written:][:limit]

    def _open(self, end: int) -> bytes:
        """The incomplete character at the end of the generated tokens before position ``end``."""
        return self._characters.open_after(self._tokens, self._prompt_length, end)

    def _next(self, phase: _Phase, token_id: int) -> _Phase:
        if phase.written >= 0 and token_id == self._phrase[phase.written]:
            written = phase.written + 1
            return phase._replace(written=written if written < len(self._phrase) else -1)
        if phase.times == self._times:
            return phase._replace(written=-1)
        matched, waited = 0, phase.waited + 1
        if self._trigger is not None:
            matched, before = self._trigger.step(phase.matched, token_id)
            triggered = before >= 0
        else:
            triggered = waited == self._after
        if triggered:
            return _Phase(0, 0, 0, phase.times + 1)
        return _Phase(-1, matched, waited, phase.times)
