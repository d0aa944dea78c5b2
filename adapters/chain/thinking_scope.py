"""The thinking section of one choice, and the processors limited to it or to the answer."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.chain.members import Act, Member
from adapters.chain.scoped import ScopedView
from adapters.contract import (
    Allow,
    Ban,
    Context,
    Edit,
    Force,
    Stage,
    ThinkingTracker,
    Unsatisfiable,
    bitmask_of,
    is_allowed,
)


class ThinkingScope:
    """The thinking section of one choice, and the scoped members of its chain.

    Args:
        members: Members whose scope is not ``all``.
        context: Context of the request.

    Attributes:
        binding: The first member that constrains the answer, None if none does.

    Raises:
        ValueError: the model has no thinking tags.
    """

    def __init__(self, members: Sequence[Member], context: Context) -> None:
        self._tracker = ThinkingTracker.of(context.vocabulary, context.think_start, context.think_end)
        self._views = [ScopedView(member.processor, member.scope) for member in members]
        self._prompt_length = 0
        self._vocab_size = context.vocabulary.size
        self.binding = next((member for member in members if _binds_the_answer(member)), None)
        self._end_ban = Ban.of(context.end_token_ids - {*context.think_end})

    @property
    def is_thinking(self) -> bool:
        """True while the next token is inside a thinking section."""
        return self._tracker.thinking

    def start(self, prompt: Sequence[int]) -> None:
        """Begin after ``prompt``."""
        self._prompt_length = len(prompt)
        self._tracker.reset(prompt)
        self._views = [ScopedView(view.processor, view.scope) for view in self._views]

    def append(self, token_id: int) -> None:
        """Take the next generated token."""
        inside = self._tracker.accept(token_id)
        for view in self._views:
            view.append(token_id, inside, self._tracker)
        self._count_outside()

    def rewind(self, num_generated: int) -> None:
        """Rewind to the first ``num_generated`` tokens."""
        for view in self._views:
            view.rewind(self._tracker.tokens, num_generated, self._prompt_length)
        self._tracker.rewind(num_generated)
        self._count_outside()

    def _count_outside(self) -> None:
        num_generated = len(self._tracker.tokens)
        for view in self._views:
            view.processor.num_outside = num_generated - view.processor.num_generated

    def active(self, members: Sequence[Member]) -> list[Member]:
        """The members whose scope the next token is in."""
        section = "thinking" if self._tracker.thinking else "answer"
        return [member for member in members if member.scope in ("all", section)]

    def decisive(self, members: Sequence[Member]) -> list[Member]:
        """The active members beside whose edit no opening tag is allowed."""
        may_open = self._tracker.opening_id is not None
        return [member for member in self.active(members) if member.scope == "all" or not may_open]

    def step(self, member: Member) -> Edit | Member | None:
        """A member's edit; with the opening tag allowed where the model may open a section."""
        opening_id, generated = self._tracker.opening_id, self._tracker.tokens
        if opening_id is None or member.scope != "answer":
            return member.step()
        if not generated:
            return _beside(member.step(), opening_id, self._vocab_size)
        if not _binds_the_answer(member):
            return member.step()
        try:
            if _lets_begin(member, self._prompt_length, generated):
                return _beside(member.step(), opening_id, self._vocab_size)
        except Unsatisfiable:  # the history is the beginning of the tag, and of no answer
            pass
        return Allow.of({opening_id}, self._vocab_size)

    def end_bans(self) -> list[Act]:
        """The mask of end tokens inside thinking, where a member constrains the answer, or none.

        An end token there would end the request without an answer.
        """
        num_masked = len(self._end_ban.token_ids)
        if self.binding is None or not num_masked or not self._tracker.thinking:
            return []
        return [(self.binding.record, self.binding.stage, self._end_ban, "masked", num_masked)]


def _beside(edit: Edit | Member | None, opening_id: int, vocab_size: int) -> Edit | Member | None:
    """``edit``, with ``opening_id``, which continues the opening thinking tag, still allowed.

    For a forced token, the model chooses between it and the tag.
    """
    if isinstance(edit, Allow) and not is_allowed(edit.bitmask, opening_id):
        return Allow(edit.bitmask | bitmask_of([opening_id], vocab_size)[: len(edit.bitmask)])
    if isinstance(edit, Ban):
        return Ban(edit.token_ids[edit.token_ids != opening_id])
    if isinstance(edit, Force):
        return Allow.of({edit.token_id, opening_id}, vocab_size)
    return edit


def _lets_begin(member: Member, prompt_length: int, generated: Sequence[int]) -> bool:
    """Whether ``member``, which has seen ``generated``, would let an answer begin with it.

    Raises:
        Unsatisfiable: it would not.
    """
    processor = member.processor
    processor.rewind_lazily(prompt_length)
    try:
        for token_id in generated:
            if not _permits(member.step(), token_id):
                return False
            processor.append(token_id)
    finally:
        processor.rewind_lazily(prompt_length)
        for token_id in generated:
            processor.append(token_id)
    return True


def _permits(edit: Edit | Member | None, token_id: int) -> bool:
    if isinstance(edit, Allow):
        return is_allowed(edit.bitmask, token_id)
    if isinstance(edit, Ban):
        return not bool((edit.token_ids == token_id).any())
    return not isinstance(edit, Force) or edit.token_id == token_id


def _binds_the_answer(member: Member) -> bool:
    """Whether the member constrains the answer: it masks or forces outside the thinking section."""
    return member.scope == "answer" and member.stage in (Stage.MASK, Stage.FORCE)
