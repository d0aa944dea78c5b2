"""Backtracking: which tokens of an answer may still be sampled again, and which were ruled out.

One answer has one border, "what was sent", and the processors of its chain share it. Each says what
is open at the end of the history; here that is put together, over all of them and over what a
rewind opens again. ``docs/backtracking.md`` proves that nothing before `Backtracking.held_from` is
ever sampled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adapters.chain.failures import Failures
from adapters.chain.members import Act, Member
from adapters.contract import BacktrackingProcessor, Ban, MalformedEdit, Stage


class Backtracking:
    """The backtracking processors of a chain, over the history that they share.

    Processors count generated tokens, from 0; positions are absolute.

    Args:
        members: Members with a `BacktrackingProcessor`, at least one.
        tokens: The history, at the end of its prompt; its owner extends and shortens it.
        prompt_length: Number of tokens of the prompt.
        failures: Recorder of a member's failures.

    Raises:
        ProcessorFailed: a processor raised, or answered with what is no index.
    """

    def __init__(self, members: Sequence[Member], tokens: list[int], prompt_length: int, failures: Failures) -> None:
        self._tokens, self._prompt_length, self._failures = tokens, prompt_length, failures
        self._asked = [(one, one.processor) for one in members if isinstance(one.processor, BacktrackingProcessor)]
        self._held: list[int | None] = []  # after 0, 1, ... generated tokens
        self._bans: list[dict[int, set[int]]] = [{} for _ in self._asked]  # of each one, ids by position
        self.note()

    def note(self) -> None:
        """Take what is open at the end of the history, which has begun or got one more token.

        A rewind to p leaves the tokens before p, after which more may be open than is now: so what
        was held there is held as well.

        Raises:
            ProcessorFailed: a processor raised, or answered with what is no index.
        """
        newest = len(self._tokens) - 1
        for (member, _), bans in zip(self._asked, self._bans, strict=True):
            member.record.add_rollbacks(newest, len(bans.get(newest, ())))
        opened = min(self._ask("held_from").values(), default=None)
        earlier = None if opened is None else self._held[opened - self._prompt_length]
        self._held.append(opened if earlier is None else earlier)

    def rewind(self, position: int) -> None:
        """Drop what belongs to the tokens from ``position`` on.

        Bans at ``position`` itself stay: they were made after the very tokens that are left.
        """
        del self._held[position - self._prompt_length + 1 :]
        for bans in self._bans:  # in order of position, but for those of this very rewind
            kept = bans.pop(position, None)
            while bans and (last := next(reversed(bans))) > position:
                del bans[last]
            if kept is not None:
                bans[position] = kept

    @property
    def held_from(self) -> int | None:
        """Position of the first token that may still be sampled again, None if none may."""
        return self._held[-1]

    @property
    def num_ruled_out(self) -> int:
        """Number of tokens that were ruled out for the next position."""
        return len(set[int]().union(*(bans.get(len(self._tokens), ()) for bans in self._bans)))

    def rule_out_first(self, sent: int, *, ends: bool) -> int | None:
        """Rule out the first token that a processor rewinds to; its position, None if none does.

        Args:
            sent: Position before which all tokens were sent.
            ends: Whether the answer ends here.

        Raises:
            ProcessorFailed: a processor raised, answered with what is no index, or rewinds to a
                token that was sent, since its `held_from` did not tell.
        """
        wanted = self._ask("rewinds_to_at_end" if ends else "rewinds_to")
        if not wanted:
            return None
        first = min(wanted.values())
        for each, position in wanted.items():
            member = self._asked[each][0]
            if position < sent:
                index = position - self._prompt_length
                problem = f"takes back generated token {index}, which was sent since held_from did not hold it,"
                raise self._failures.raised(member, MalformedEdit(problem))
            if position == first:
                self._bans[each].setdefault(position, set()).add(self._tokens[position])
        return first

    def rule_out(self, token_id: int) -> bool:
        """Rule out a token at the end of the history that an earlier run sampled there and rewound.

        Returns:
            False if no processor can have done so: none holds the token.

        Raises:
            ProcessorFailed: a processor raised, or answered with what is no index.
        """
        position = len(self._tokens)
        self._tokens.append(token_id)
        try:
            held, wanted = self._ask("held_from"), self._ask("rewinds_to_at_end")
        finally:
            for _, processor in self._asked:
                processor.rewind_lazily(position)
            del self._tokens[position:]
        able = held.keys() | {each for each, at in wanted.items() if at == position}
        for each in able:
            self._bans[each].setdefault(position, set()).add(token_id)
        return bool(able)

    def forget_ruled_out(self) -> None:
        """Drop all bans."""
        for bans in self._bans:
            bans.clear()

    def copy_ruled_out(self, other: Backtracking) -> None:
        """Take over what the same processors of another chain of this history have ruled out."""
        self._bans = [{position: set(ids) for position, ids in bans.items()} for bans in other._bans]

    def acts(self, member: Member | None = None) -> Iterator[Act]:
        """Masks of what was ruled out for the next token, by all processors or by ``member``."""
        position = len(self._tokens)
        for (one, _), bans in zip(self._asked, self._bans, strict=True):
            if position in bans and member in (None, one):
                yield one.record, Stage.MASK, Ban.of(bans[position]), "masked", len(bans[position])

    def _ask(self, name: str) -> dict[int, int]:
        """Positions that the processors give by this name, by their place; without None."""
        found: dict[int, int] = {}
        for place, (member, processor) in enumerate(self._asked):
            try:
                processor.catch_up()
                index = getattr(processor, name)
                if index is not None:
                    found[place] = self._prompt_length + _checked(name, index, processor.num_generated)
            except BaseException as error:  # the processor boundary: third-party code
                raise self._failures.raised(member, error) from error
        return found


def _checked(name: str, index: object, num_generated: int) -> int:
    if type(index) is not int or not 0 <= index < num_generated:
        raise MalformedEdit(f"{name} is {index!r}, expected None or an index below {num_generated}, int,")
    return index
