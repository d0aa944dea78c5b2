"""One of several choices, each boosted by its words in the prompt."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

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
from adapters.processors.arguments import Boost, ShortText, check_no_end, encode
from adapters.vocabulary import ByteIndex, byte_index


class _Trie:
    """Trie of choices as id sequences. A node is a number, 0 is the root.

    Args:
        sequences: Choices, distinct.
    """

    ASIDE = -1
    """Node of an answer that has left the trie."""

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
    choices: Annotated[list[ShortText], Field(min_length=1, max_length=256, description="The answers to choose from.")]
    boost: Annotated[Boost, Field(description="Weight of the logit of each choice's first word in the prompt.")] = 0.0


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
    """First token of the text after each label; None for a label that is not in the prompt."""
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
        # from the bracket, which may belong to the label, and from after it
        for begin in range(head.start(1), head.end() + 1):
            for length in lengths:
                if begin + length >= line_end:
                    break
                label = text[begin : begin + length]
                if label in labels and (after := _CLOSING.match(text, begin + length)):
                    begins[label] = after.end()
    return begins


_HEAD = rb"^[ \t]*([(\[]?)(?=[%b])"
_CLOSING = re.compile(rb"[.:)\]]+[ \t]*(?=\S)")
