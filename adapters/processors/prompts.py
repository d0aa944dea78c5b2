"""Prompted answers: a phrase at a trigger, one of several choices, citations of the prompt."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from typing_extensions import Self

from adapters.contract import (
    Allow,
    ArgumentError,
    Bias,
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
from adapters.processors.arguments import PositiveCount, Text, encode
from adapters.processors.characters import MOST_MISSING, split_characters
from adapters.vocabulary import ByteIndex, byte_index
from adapters.vocabulary.text_match import TextMatcher

_ShortText = Annotated[str, Field(min_length=1, max_length=256)]
_Boost = Annotated[float, Field(ge=-100, le=100)]


class _Phase(NamedTuple):
    """Where the answer stands.

    Attributes:
        written: Tokens of the phrase that the answer ends with, while it is due or being written;
            otherwise -1.
        matched: Bytes of the trigger that the answer ends with.
        waited: Tokens since the beginning or the last phrase.
        times: Phrases begun.
    """

    written: int
    matched: int
    waited: int
    times: int


class TriggerPhrase(SteeringProcessor):
    """Writes a phrase whenever a trigger has been generated, or after a number of tokens.

    Source: TriggerPhrase of NVIDIA's logits-processor-zoo, with its time counted in tokens. With
    ``trigger`` the phrase is forced behind the token in which the trigger text is completed,
    however the answer splits it. With ``after_tokens`` it is forced once that many tokens were
    generated since the beginning or since the last phrase. Both look at the generated tokens only;
    the phrase itself neither triggers nor counts. An answer that ends earlier has no phrase. A
    trigger that names a special token is that token.

    The phrase never cuts a character: with fewer than four of ``after_tokens`` left, the tokens
    behind which more bytes of a character are missing than tokens are left are masked. Where the
    token that completes a trigger begins another character, the phrase waits for its end, and
    meanwhile every token must leave fewer bytes missing.
    """

    name = "trigger_phrase"
    version = 1
    stage = Stage.FORCE
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        text: Annotated[Text, Field(description="The phrase.")]
        trigger: Annotated[_ShortText | None, Field(description="Text behind which the phrase comes.")] = None
        after_tokens: Annotated[PositiveCount | None, Field(description="Tokens after which the phrase comes.")] = None
        times: Annotated[int, Field(ge=1, le=4096, description="Most phrases of the answer.")] = 1

        @model_validator(mode="after")
        def _exactly_one(self) -> Self:
            if (self.trigger is None) == (self.after_tokens is None):
                raise ValueError("give either trigger or after_tokens")
            return self

    def __init__(self, args: Args, context: Context) -> None:
        self._phrase = encode(context, "text", args.text)
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
        if self._phase.written != 0 or not self._open(self._prompt_length + index):  # else it still waits
            self._phase = self._next(self._phase, token_id)

    def retract(self, token_ids: Sequence[int]) -> bool:
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

    def _open(self, end: int) -> bytes:
        """The beginning of a character with which the generated tokens before position ``end``
        end.
        """
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


class _Trie:
    """Choices as sequences of ids, sharing their beginnings. Node 0 is the root; a node is a
    number.

    Args:
        sequences: Distinct.
    """

    ASIDE = -1
    """Not in the trie."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.children: list[dict[int, int]] = [{}]
        self.is_choice = [False]
        self._passing = [0]
        for sequence in sequences:
            node = 0
            for token_id in sequence:
                node = self.children[node].setdefault(token_id, len(self.children))
                if node == len(self.children):
                    self.children.append({})
                    self.is_choice.append(False)
                    self._passing.append(0)
                self._passing[node] += 1
            self.is_choice[node] = True

    def step(self, node: int, token_id: int) -> int:
        """The node behind ``token_id``, `ASIDE` if there is none."""
        return self.ASIDE if node == self.ASIDE else self.children[node].get(token_id, self.ASIDE)

    def deciding(self, sequence: Sequence[int]) -> tuple[int, int | None]:
        """Where a choice parts from all others: the node, and the token; None where that is the
        end of the answer.
        """
        node = 0
        for token_id in sequence:
            child = self.children[node][token_id]
            if self._passing[child] == 1:
                return node, token_id
            node = child
        return node, None


class _ChoiceArgs(ProcessorArgs):
    choices: Annotated[list[_ShortText], Field(min_length=1, max_length=256, description="The answers to choose from.")]
    boost: Annotated[_Boost, Field(description="Weight of the logit of each choice's first word in the prompt.")] = 0.0


class _Choices:
    """What both stages of the multiple choice know: the trie, and the node of the answer."""

    def __init__(self, args: _ChoiceArgs, context: Context) -> None:
        if not context.end_token_ids:
            raise ArgumentError("choices", "expected a request with an end token, this one has none")
        self.ends = sorted(context.end_token_ids)
        self.sequences = [encode(context, "choices", choice) for choice in args.choices]
        if len(set(map(tuple, self.sequences))) < len(self.sequences):
            raise ArgumentError("choices", "expected choices that differ")
        self.trie = _Trie(self.sequences)
        self.restart()

    def restart(self) -> None:
        self.path = [0]

    def advance(self, token_id: int) -> None:
        # Behind the end of the answer nothing but the end follows.
        node = self.path[-1]
        if node != _Trie.ASIDE and self.trie.is_choice[node] and token_id in self.ends:
            self.path.append(node)
        else:
            self.path.append(self.trie.step(node, token_id))


class MultipleChoice(SteeringProcessor):
    """The answer is one of the choices, then it ends; each choice may be boosted by its words in
    the prompt.

    Source: MultipleChoice of NVIDIA's logits-processor-zoo, for choices of any number of tokens.
    Each choice is written exactly as it stands, without a space before it, in one sequence of
    tokens; the answer follows one of these sequences to its end, where an end token comes. Any end
    token of the request may; where one choice begins another the model decides between the end and
    more.

    With ``boost`` w, a choice c is looked up in the prompt's text as a label: at the beginning of a
    line, possibly behind "(" or "[", with one or more of ``. : ) ]`` behind it; the last such place
    counts. Let t be the token in which the text behind the label begins ("hair" in "A. hair
    dryer"). Where c parts from all other choices, the logit of its token is changed at the soft
    stage: ``z_c <- z_c + w * z_t``, all from the same row. A choice that is not found is not
    changed, nor one whose ``z_t`` is not finite.
    """

    name = "multiple_choice"
    version = 1
    once = True
    stage = Stage.MASK
    reads = Reads.GENERATED

    class Args(_ChoiceArgs):
        pass

    def __init__(self, args: Args, context: Context) -> None:
        self._choices = _Choices(args, context)
        self._width = context.vocabulary.size
        self._edits: dict[int, Edit] = {}

    @classmethod
    def build(cls, args: Args, context: Context) -> list[Processor]:
        mask = cls(args, context)
        return [mask] if args.boost == 0 else [ChoiceBoost(args, context), mask]

    def reset(self) -> None:
        self._choices.restart()

    def advance(self, token_id: int, index: int) -> None:
        self._choices.advance(token_id)

    def retract(self, token_ids: Sequence[int]) -> bool:
        del self._choices.path[-len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        node = self._choices.path[-1]
        if node == _Trie.ASIDE:
            raise Unsatisfiable("the answer is none of the choices")
        if node not in self._edits:
            self._edits[node] = self._edit_at(node)
        return self._edits[node]

    def _edit_at(self, node: int) -> Edit:
        trie = self._choices.trie
        allowed = {*trie.children[node], *(self._choices.ends if trie.is_choice[node] else ())}
        return Force(*allowed) if len(allowed) == 1 else Allow.of(allowed, self._width)


class ChoiceBoost(ShapingProcessor):
    """The boost of `MultipleChoice`, at the soft stage."""

    name = "multiple_choice"
    version = 1
    stage = Stage.SOFT
    reads = Reads.PROMPT_AND_GENERATED
    Args = _ChoiceArgs

    def __init__(self, args: _ChoiceArgs, context: Context) -> None:
        self._choices = _Choices(args, context)
        self._boost = args.boost
        self._labels = [choice.strip().encode() for choice in args.choices]
        self._bytes = byte_index(context.vocabulary)
        # By node: the tokens whose logits are changed, and for each the token of the prompt.
        self._boosts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reset(self) -> None:
        self._choices.restart()
        prompt = self.prompt
        known = self.from_prompt((ChoiceBoost,), lambda: _PromptText(prompt, self._bytes))
        words = _first_words(self._labels, prompt, known)
        targets: dict[int, list[tuple[int, int]]] = {}
        for sequence, word in zip(self._choices.sequences, words, strict=True):
            if word is None:
                continue
            node, token_id = self._choices.trie.deciding(sequence)
            for target in self._choices.ends if token_id is None else [token_id]:
                targets.setdefault(node, []).append((target, word))
        self._boosts = {node: (torch.tensor(pairs)[:, 0], torch.tensor(pairs)[:, 1]) for node, pairs in targets.items()}

    def advance(self, token_id: int, index: int) -> None:
        self._choices.advance(token_id)

    def retract(self, token_ids: Sequence[int]) -> bool:
        del self._choices.path[-len(token_ids) :]
        return True

    def shape(self, logits: torch.Tensor) -> None:
        boost = self._boosts.get(self._choices.path[-1])
        if boost is None:
            return
        targets, words = (ids.to(logits.device, non_blocking=True) for ids in boost)
        z = logits[words]
        logits[targets] += torch.where(torch.isfinite(z), self._boost * z, 0.0)


class _PromptText:
    """The bytes of a prompt, and where each of its tokens ends in them."""

    def __init__(self, prompt: Sequence[int], pieces: ByteIndex) -> None:
        # A special token begins a line: it stands between the turns of a conversation.
        parts = [pieces[token_id] or b"\n" for token_id in prompt]
        self.text, self.ends = b"".join(parts), list(accumulate(map(len, parts)))


def _first_words(labels: Sequence[bytes], prompt: Sequence[int], known: _PromptText) -> list[int | None]:
    """For each label the token in which the text behind it begins, None if the prompt does not
    have it.
    """
    begins = _behind_labels({label for label in labels if label}, known.text)
    return [prompt[bisect_right(known.ends, begins[label])] if label in begins else None for label in labels]


def _behind_labels(labels: set[bytes], text: bytes) -> dict[bytes, int]:
    """Where the text behind each label begins, in the last line that begins with it.

    A line is looked at once for each length that labels have and the line still holds, so that the
    time is bounded by the size of the text, however many labels there are.
    """
    lengths = sorted({len(label) for label in labels})
    first_bytes = b"".join(sorted({re.escape(label[:1]) for label in labels}))
    begins: dict[bytes, int] = {}
    for head in re.finditer(_HEAD % first_bytes, text, re.MULTILINE) if labels else ():
        line_end = text.find(b"\n", head.end())
        line_end = len(text) if line_end < 0 else line_end
        for begin in range(head.start(1), head.end() + 1):  # with the bracket, which may be the label's, and behind it
            for length in lengths:
                if begin + length >= line_end:
                    break
                label = text[begin : begin + length]
                if label in labels and (behind := _CLOSING.match(text, begin + length)):
                    begins[label] = behind.end()
    return begins


_HEAD = rb"^[ \t]*([(\[]?)(?=[%b])"
_CLOSING = re.compile(rb"[.:)\]]+[ \t]*(?=\S)")


class CiteFromPrompt(SteeringProcessor):
    """Boosts the tokens of the prompt, and those that follow the newest token there.

    Source: CiteFromPrompt of NVIDIA's logits-processor-zoo. ``z_t <- z_t + boost`` for every
    distinct token t of the prompt and for the request's end tokens; ``z_t <- z_t +
    conditional_boost`` for every distinct t that follows the newest generated token somewhere in
    the prompt. Before the first generated token only ``boost`` applies.
    """

    name = "cite_from_prompt"
    version = 1
    stage = Stage.SOFT
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        boost: Annotated[_Boost, Field(description="Added to the logit of every token of the prompt.")] = 1.0
        conditional_boost: Annotated[
            _Boost, Field(description="Added to the logit of what follows the newest token in the prompt.")
        ] = 0.0

    def __init__(self, args: Args, context: Context) -> None:
        self._boost, self._conditional = args.boost, args.conditional_boost
        self._ends, self._num_tokens = context.end_token_ids, context.vocabulary.num_tokens
        self.reset()

    def reset(self) -> None:
        key = (CiteFromPrompt, self._num_tokens, self._ends)
        self._prompt_tokens = self.from_prompt(key, lambda: _Cited(self.prompt, self._num_tokens, self._ends))
        ids = self._prompt_tokens.token_ids
        self._base = Bias(ids, torch.full(ids.shape, self._boost, dtype=torch.float32))

    def retract(self, token_ids: Sequence[int]) -> bool:
        return True  # nothing but the newest token is looked at

    def edit(self) -> Edit | None:
        follows = self.num_generated and self._conditional
        places = self._prompt_tokens.followers(self._tokens[-1]) if follows else None
        if self._boost == 0:
            if places is None:
                return None
            return Bias(self._base.token_ids[places], torch.full((len(places),), self._conditional))
        if places is None:
            return self._base
        values = self._base.values.clone()
        values[places] += self._conditional
        return Bias(self._base.token_ids, values)


class _Cited:
    """The distinct tokens of a prompt, and which of them follow which. Never changes.

    Attributes:
        token_ids: int64 ``[n]``, rising: the prompt's, below ``num_tokens``, and the end tokens.
    """

    def __init__(self, prompt: Sequence[int], num_tokens: int, ends: Iterable[int]) -> None:
        tokens = np.array(prompt, dtype=np.int64)
        ids = np.union1d(tokens[tokens < num_tokens], np.array(sorted(ends), dtype=np.int64))
        self.token_ids = torch.from_numpy(ids)
        is_known = tokens[1:] < num_tokens
        before, behind = tokens[:-1][is_known], tokens[1:][is_known]
        order = np.lexsort((behind, before))
        before, behind = before[order], behind[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (before[1:] != before[:-1]) | (behind[1:] != behind[:-1])
        self._before = before[is_first]
        self._places = torch.from_numpy(np.searchsorted(ids, behind[is_first]))

    def followers(self, token_id: int) -> torch.Tensor | None:
        """Places in `token_ids` (int64 ``[m]``, rising) of what follows ``token_id`` in the
        prompt; None if nothing.
        """
        low, high = np.searchsorted(self._before, [token_id, token_id + 1]).tolist()
        return self._places[low:high] if low < high else None
