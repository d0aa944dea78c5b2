"""Views of scoped processors: each is shown the generated tokens inside its scope only."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from adapters.contract import Processor, Scope, ThinkingTracker
from adapters.interrupts import is_interrupt

NUM_KEPT_TAGS = 8
"""Completed tags into which a processor whose state is made of logits can be rewound."""


@dataclass(slots=True)
class _TagCopy:
    """A processor right before the tokens of a tag that was completed were rewound.

    Attributes:
        index: Index of the generated token that completed the tag.
        processor: A copy; None if it is not kept.
    """

    index: int
    processor: Processor | None


@dataclass(slots=True)
class ScopedView:
    """The generated tokens that one processor is shown.

    Attributes:
        counts: Number of tokens that it had before each generated one.
        tag_copies: Copies for tags of several tokens, if its state is made of logits: nothing else
            restores what their logits were.
    """

    processor: Processor
    scope: Scope
    counts: list[int] = field(default_factory=list)
    tag_copies: list[_TagCopy] = field(default_factory=list)

    def append(self, token_id: int, inside: bool | None, tracker: ThinkingTracker) -> None:
        """Take the next token; ``inside`` is the result of `ThinkingTracker.accept` for it."""
        processor = self.processor
        self.counts.append(processor.num_generated)
        if inside is None and tracker.thinking == (self.scope == "answer"):
            num_shown = tracker.tag_length - 1
            if num_shown and processor.observes_logits:
                self._keep_copy()
            processor.rewind_lazily(processor.position - processor.num_outside - num_shown)
        elif inside is not None and inside == (self.scope == "thinking"):
            processor.append(token_id)

    def _keep_copy(self) -> None:
        derived = self.processor._derived
        try:
            kept = copy.deepcopy(self.processor, {id(derived): derived})
        except BaseException as error:  # the processor boundary: it is lost if it is ever rewound to here
            if is_interrupt(error):
                raise
            kept = None
        self.tag_copies.append(_TagCopy(len(self.counts) - 1, kept))
        for old in self.tag_copies[-NUM_KEPT_TAGS - 1 : -NUM_KEPT_TAGS]:
            old.processor = None

    def rewind(self, generated: Sequence[int], index: int, prompt_length: int) -> None:
        """Show what was shown before the token at ``index`` of ``generated``.

        Where a tag was completed since then, its tokens had been rewound; they are shown again.
        """
        since = self.counts[index:]
        if not since:
            return
        del self.counts[index:]
        earlier: Processor | None = None
        while self.tag_copies and self.tag_copies[-1].index >= index:
            earlier = self.tag_copies.pop().processor
        processor = self.processor
        kept = min(*since, processor.num_generated)
        if kept < since[0] and processor.observes_logits:
            kept = since[0]
            if earlier is None:
                processor.lose("the state inside a tag that was completed long ago is not kept any more")
                return
            _become(processor, earlier)
        processor.rewind_lazily(prompt_length + kept)
        for token_id in generated[index - (since[0] - kept) : index]:
            processor.append(token_id)


def _become(processor: Processor, earlier: Processor) -> None:
    """Give a processor the state of a copy of it, those attributes too that are in slots."""
    processor.__dict__ = vars(earlier)
    for kind in type(processor).__mro__:
        for slot in filter(inspect.ismemberdescriptor, vars(kind).values()):
            with contextlib.suppress(AttributeError):  # not set
                slot.__set__(processor, slot.__get__(earlier))
