"""Prompt-guided answers: a phrase at a trigger, one of several choices, citations of the prompt."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator

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
from adapters.processors.arguments import PositiveCount, Text, check_no_end, encode
from adapters.processors.characters import MOST_MISSING, split_characters
from adapters.vocabulary import ByteIndex, byte_index
from adapters.vocabulary.text_match import TextMatcher

_ShortText = Annotated[str, Field(min_length=1, max_length=256)]
_Boost = Annotated[float, Field(ge=-100, le=100)]


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
    version = 1
    stage = Stage.FORCE
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        text: Annotated[Text, Field(description="The phrase.")]
        trigger: Annotated[_ShortText | None, Field(description="Text after which the phrase is written.")] = None
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


class _Trie:
    """Trie of choices as id sequences. A node is a number, 0 is the root.

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
        """The child by ``token_id``, `ASIDE` if there is none."""
        return self.ASIDE if node == self.ASIDE else self.children[node].get(token_id, self.ASIDE)

    def deciding(self, sequence: Sequence[int]) -> tuple[int, int | None]:
        """Node and token at which a choice becomes unique; token None: at the answer's end."""
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
    """Shared state of both stages of `MultipleChoice`: the trie, and the node of the answer."""

    def __init__(self, args: _ChoiceArgs, context: Context) -> None:
        if not context.end_token_ids:
            raise ArgumentError("choices", "expected a request with an end token, this one has none")
        self.ends = sorted(context.end_token_ids)
        self.sequences = [encode(context, "choices", choice) for choice in args.choices]
        for sequence in self.sequences:
            check_no_end(context, "choices", sequence)
        if len(set(map(tuple, self.sequences))) < len(self.sequences):
            raise ArgumentError("choices", "expected choices that differ")
        self.trie = _Trie(self.sequences)
        self.restart()

    def restart(self) -> None:
        self.path = [0]

    def advance(self, token_id: int) -> None:
        # Only the end token follows the end of the answer.
        node = self.path[-1]
        if node != _Trie.ASIDE and self.trie.is_choice[node] and token_id in self.ends:
            self.path.append(node)
        else:
            self.path.append(self.trie.step(node, token_id))


class MultipleChoice(SteeringProcessor):
    """Restricts the answer to one of the choices, each boosted by its words in the prompt.

    Source: MultipleChoice of NVIDIA's logits-processor-zoo, for choices of any number of tokens.
    Each choice is written exactly as given, without a leading space, in one sequence of tokens; the
    answer follows one of these sequences and then ends with any end token of the request. Where one
    choice is a prefix of another, the model decides between ending and continuing.

    With ``boost`` w, each choice c is searched in the prompt's text as a label: at the beginning of
    a line, possibly after "(" or "[", followed by one or more of ``. : ) ]``; the last occurrence
    counts. Let t be the first token of the text after the label ("hair" in "A. hair dryer"). Where
    c becomes distinct from all other choices, the logit of its token is changed at the soft stage:
    ``z_c <- z_c + w * z_t``, both from the same row. Choices that are not found, or whose ``z_t``
    is not finite, are not changed.
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

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        del self._choices.path[-len(token_ids) :]
        return True

    def edit(self) -> Edit | None:
        node = self._choices.path[-1]
        if node == _Trie.ASIDE:
            raise Unsatisfiable("the answer is none of the choices")
        if node not in self._edits:
            self._edits[node] = self._edit_at(node)
        return self._edits[node]

    def foresee(self, limit: int) -> Sequence[int]:
        trie, node, found = self._choices.trie, self._choices.path[-1], list[int]()
        while node != _Trie.ASIDE and len(found) < limit and not trie.is_choice[node] and len(trie.children[node]) == 1:
            ((token_id, node),) = trie.children[node].items()
            found.append(token_id)
        return found

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
        # By node: the tokens whose logits are changed, each with its token of the prompt.
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

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
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
    """The bytes of a prompt, and the end offset of each of its tokens."""

    def __init__(self, prompt: Sequence[int], pieces: ByteIndex) -> None:
        # a special token begins a line, because it separates the turns of a conversation
        parts = [pieces[token_id] or b"\n" for token_id in prompt]
        self.text, self.ends = b"".join(parts), list(accumulate(map(len, parts)))


def _first_words(labels: Sequence[bytes], prompt: Sequence[int], known: _PromptText) -> list[int | None]:
    """For each label, the first token of the text after it; None if not in the prompt."""
    begins = _after_labels({label for label in labels if label}, known.text)
    return [prompt[bisect_right(known.ends, begins[label])] if label in begins else None for label in labels]


def _after_labels(labels: set[bytes], text: bytes) -> dict[bytes, int]:
    """Offset of the text after each label, in the last line that begins with it.

    Each line is checked once per distinct label length, so that time is bounded by the size of the
    text, however many labels there are.
    """
    lengths = sorted({len(label) for label in labels})
    first_bytes = b"".join(sorted({re.escape(label[:1]) for label in labels}))
    begins: dict[bytes, int] = {}
    for head in re.finditer(_HEAD % first_bytes, text, re.MULTILINE) if labels else ():
        line_end = text.find(b"\n", head.end())
        line_end = len(text) if line_end < 0 else line_end
        for begin in range(
            head.start(1), head.end() + 1
        ):  # from the bracket, which may belong to the label, and from after it
            for length in lengths:
                if begin + length >= line_end:
                    break
                label = text[begin : begin + length]
                if label in labels and (after := _CLOSING.match(text, begin + length)):
                    begins[label] = after.end()
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

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        return True  # only the newest token is read

    def edit(self) -> Edit | None:
        follows = self.num_generated and self._conditional
        follower_indices = self._prompt_tokens.followers(self._tokens[-1]) if follows else None
        if self._boost == 0:
            if follower_indices is None:
                return None
            return Bias(self._base.token_ids[follower_indices], torch.full((len(follower_indices),), self._conditional))
        if follower_indices is None:
            return self._base
        values = self._base.values.clone()
        values[follower_indices] += self._conditional
        return Bias(self._base.token_ids, values)


class _Cited:
    """The distinct tokens of a prompt and their successors. Immutable.

    Attributes:
        token_ids: int64 ``[n]``, rising: the prompt's, below ``num_tokens``, and the end tokens.
    """

    def __init__(self, prompt: Sequence[int], num_tokens: int, ends: Iterable[int]) -> None:
        tokens = np.array(prompt, dtype=np.int64)
        ids = np.union1d(tokens[tokens < num_tokens], np.array(sorted(ends), dtype=np.int64))
        self.token_ids = torch.from_numpy(ids)
        is_known = tokens[1:] < num_tokens
        before, after = tokens[:-1][is_known], tokens[1:][is_known]
        order = np.lexsort((after, before))
        before, after = before[order], after[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (before[1:] != before[:-1]) | (after[1:] != after[:-1])
        self._before = before[is_first]
        self._follower_indices = torch.from_numpy(np.searchsorted(ids, after[is_first]))

    def followers(self, token_id: int) -> torch.Tensor | None:
        """Indices into `token_ids` (int64 ``[m]``, rising) of the token's followers, or None."""
        low, high = np.searchsorted(self._before, [token_id, token_id + 1]).tolist()
        return self._follower_indices[low:high] if low < high else None
