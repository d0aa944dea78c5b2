"""Scoped processors of a chain: each is shown the generated tokens inside its scope only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from adapters.contract import Processor, Scope, ThinkingTracker

NUM_KEPT_TAGS = 8
"""Completed tags into which a processor whose state is made of logits can be rewound."""


@dataclass(slots=True)
class _Aside:
    """A processor right before it gave back the tokens of a tag that was completed.

    Attributes:
        index: Of the generated token that completed the tag.
        processor: A copy; None if it is not kept.
    """

    index: int
    processor: Processor | None


@dataclass(slots=True)
class _View:
    """What one processor is shown.

    Attributes:
        counts: Tokens that it had before each generated one.
        asides: Of tags of several tokens, if its state is made of logits: nothing else brings back
            what their logits were.
    """

    processor: Processor
    scope: Scope
    counts: list[int] = field(default_factory=list)
    asides: list[_Aside] = field(default_factory=list)

    def append(self, token_id: int, inside: bool | None, tracker: ThinkingTracker) -> None:
        """Take the next token; ``inside`` is what `ThinkingTracker.accept` has said of it."""
        processor = self.processor
        self.counts.append(processor.num_generated)
        if inside is None and tracker.thinking == (self.scope == "answer"):
            given_back = tracker.tag_length - 1
            if given_back and processor.observes_logits:
                self._set_aside()
            processor.rewind_lazily(processor.position - processor.num_outside - given_back)
        elif inside is not None and inside == (self.scope == "thinking"):
            processor.append(token_id)

    def _set_aside(self) -> None:
        derived = self.processor._derived
        try:
            kept = copy.deepcopy(self.processor, {id(derived): derived})
        except Exception:  # the processor boundary: it is lost if it is ever rewound to here
            kept = None
        self.asides.append(_Aside(len(self.counts) - 1, kept))
        for old in self.asides[-NUM_KEPT_TAGS - 1 : -NUM_KEPT_TAGS]:
            old.processor = None

    def rewind(self, tokens: Sequence[int], position: int, prompt_length: int) -> None:
        """Show what was shown before the token at ``position`` of ``tokens``, the whole history.

        Where a tag was completed since then, its tokens had been given back; they are shown again.
        """
        num_generated = position - prompt_length
        since = self.counts[num_generated:]
        if not since:
            return
        del self.counts[num_generated:]
        earlier: Processor | None = None
        while self.asides and self.asides[-1].index >= num_generated:
            earlier = self.asides.pop().processor
        processor = self.processor
        kept = min(*since, processor.num_generated)
        if kept < since[0] and processor.observes_logits:
            kept = since[0]
            if earlier is None:
                processor.lose("the state inside a tag that was completed long ago is not kept any more")
                return
            processor.__dict__ = vars(earlier)
        processor.rewind_lazily(prompt_length + kept)
        for token_id in tokens[position - (since[0] - kept) : position]:
            processor.append(token_id)


class ScopedProcessors:
    """The scoped processors of one chain.

    Args:
        processors: Each with its scope, which is not ``all``.
        tracker: Of the chain.
    """

    def __init__(self, processors: Sequence[tuple[Processor, Scope]], tracker: ThinkingTracker) -> None:
        self._views = [_View(processor, scope) for processor, scope in processors]
        self._tracker = tracker

    def reset(self, prompt: Sequence[int]) -> None:
        """Begin after ``prompt``."""
        self._tracker.reset(prompt)
        self._views = [_View(view.processor, view.scope) for view in self._views]

    def append(self, token_id: int, num_generated: int) -> None:
        """Take the next token, the last of ``num_generated``."""
        inside = self._tracker.accept(token_id)
        for view in self._views:
            view.append(token_id, inside, self._tracker)
        self._count_outside(num_generated)

    def rewind(self, tokens: Sequence[int], position: int, prompt_length: int) -> None:
        """Forget what comes from ``position`` of ``tokens``, the whole history, on."""
        for view in self._views:
            view.rewind(tokens, position, prompt_length)
        self._tracker.rewind(position - prompt_length)
        self._count_outside(position - prompt_length)

    def _count_outside(self, num_generated: int) -> None:
        for view in self._views:
            view.processor.num_outside = num_generated - view.processor.num_generated
