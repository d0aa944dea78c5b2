"""Backtracking: which tokens of an answer may still be sampled again, and which were ruled out.

One answer has one border, "what was sent", and the processors of its chain share it. Each says what
is open at the end of the history; here that is put together, over all of them and over what going
back opens again. ``docs/backtracking.md`` proves that nothing before `Backtracking.held_from` is
ever sampled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from adapters.chain.plan import Act, Member, ProcessorFailed
from adapters.contract import BacktrackingProcessor, Ban, MalformedEdit, Stage

Fail = Callable[[Member, Exception], ProcessorFailed]
"""Records that a member raised, as `ProcessorChain.fail_from`; returns the failure to raise."""


class Backtracking:
    """The backtracking processors of a chain, over the history that they share.

    Indices are those of generated tokens, from 0.

    Args:
        members: Those of the chain that may have tokens sampled again, at least one.
        fail: What a member raised goes through it.
    """

    def __init__(self, members: Sequence[Member], fail: Fail) -> None:
        self._fail = fail
        self._asked = [(one, one.processor) for one in members if isinstance(one.processor, BacktrackingProcessor)]
        self._held: list[int | None] = []  # after 0, 1, ... generated tokens
        self._bans: list[dict[int, set[int]]] = [{} for _ in self._asked]  # of each one, ids by index

    def reset(self) -> None:
        """Forget everything: a history begins."""
        self._held = []
        self._bans = [{} for _ in self._asked]

    def note(self) -> None:
        """Take what is open at the end of the history, which has begun or got one more token.

        Going back to p leaves p tokens, after which more may be open than is now: so what was held
        there is held as well.

        Raises:
            ProcessorFailed: a processor raised, or answered with what is no index.
        """
        opened = min(self._ask("held_from").values(), default=None)
        earlier = None if opened is None else self._held[opened]
        self._held.append(opened if earlier is None else earlier)

    def rewind(self, index: int) -> None:
        """Forget what belongs to the generated tokens from ``index`` on.

        What was ruled out at ``index`` itself was so after the very tokens that are left.
        """
        del self._held[index + 1 :]
        for bans in self._bans:
            for later in [each for each in bans if each > index]:
                del bans[later]

    @property
    def held_from(self) -> int | None:
        """The first token that may still be sampled again, None if none may."""
        return self._held[-1]

    def rule_out_first(self, history: Sequence[int], prompt_length: int, sent: int, *, ends: bool) -> int | None:
        """Rule out the first token that a processor takes back; its index, None if there is none.

        Args:
            history: Prompt and generated tokens.
            prompt_length: Tokens of the prompt.
            sent: Generated tokens that were sent.
            ends: Whether the answer ends here.

        Raises:
            ProcessorFailed: a processor raised, answered with what is no index, or takes back a
                token that was sent, since its `held_from` did not tell.
        """
        wanted = self._ask("rewinds_to_at_end" if ends else "rewinds_to")
        if not wanted:
            return None
        first = min(wanted.values())
        for each, index in wanted.items():
            member = self._asked[each][0]
            if index < sent:
                problem = f"takes back generated token {index}, which was sent since held_from did not hold it,"
                raise self._fail(member, MalformedEdit(problem))
            if index == first:
                self._bans[each].setdefault(index, set()).add(history[prompt_length + index])
                member.record.rollbacks = (member.record.rollbacks or 0) + 1
        return first

    def rule_out(self, token_id: int, index: int) -> bool:
        """Note that ``token_id``, now the newest one, was sampled at ``index`` and taken back.

        Returns:
            False if no processor could have done so: none holds the token.

        Raises:
            ProcessorFailed: as `note`.
        """
        held, taken = self._ask("held_from"), self._ask("rewinds_to_at_end")
        able = {each for each, at in held.items() if at <= index} | {each for each, at in taken.items() if at == index}
        for each in able:
            self._bans[each].setdefault(index, set()).add(token_id)
        return bool(able)

    def copy_ruled_out(self, other: Backtracking) -> None:
        """Take over what the same processors of another chain of this history have ruled out."""
        self._bans = [{index: set(ids) for index, ids in bans.items()} for bans in other._bans]

    def acts(self, index: int, member: Member | None = None) -> Iterator[Act]:
        """Masks of what was ruled out at ``index``, by all processors or by ``member``."""
        for (one, _), bans in zip(self._asked, self._bans, strict=True):
            if index in bans and member in (None, one):
                yield one.record, Stage.MASK, Ban.of(bans[index]), "masked", len(bans[index])

    def _ask(self, name: str) -> dict[int, int]:
        """The processors' indices of this name, by their place; without None."""
        found: dict[int, int] = {}
        for place, (member, processor) in enumerate(self._asked):
            try:
                processor.catch_up()
                index = getattr(processor, name)
                if index is not None:
                    found[place] = _checked(name, index, processor.num_generated)
            except Exception as error:  # the processor boundary: third-party code
                raise self._fail(member, error) from error
        return found


def _checked(name: str, index: object, num_generated: int) -> int:
    if type(index) is not int or not 0 <= index < num_generated:
        raise MalformedEdit(f"{name} is {index!r}, expected None or an index below {num_generated}, int,")
    return index
