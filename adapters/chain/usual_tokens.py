"""Forced texts, written as the tokenizer writes them unless another processor forbids it."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.chain.failures import Failures
from adapters.chain.members import Member
from adapters.chain.plan import RowPlan
from adapters.contract.companion import CompanionProcessor


def can_prefer(members: Sequence[Member]) -> bool:
    """Whether a chain of ``members`` has usual tokens, and knows before the logits what it leaves.

    A mask keeps all its tokens beside a processor of a third party that maps a row, or one that
    reads a second row of logits: what they leave is not known.
    """
    is_known = not any(member.edit is None and (member.is_third_party or _is_companion(member)) for member in members)
    return is_known and any(member.usual_token is not None for member in members)


def forces_foreseen(members: Sequence[Member], masks_alone: bool) -> bool:
    """Whether a chain of ``members`` mostly forces the tokens that it foresees, so that nobody
    needs their logits; `ProcessorChain.masks_alone` is its own.
    """
    return (masks_alone and can_prefer(members)) or not any(one.foresees and one.usual_token for one in members)


def sure_member(members: Sequence[Member]) -> Member | None:
    """The only one of ``members`` with usual tokens, whose `Member.sure_token` may take the place
    of its mask; None if there are several, or third parties', whose edits are asked for once.
    """
    found = [member for member in members if member.usual_token is not None]
    return found[0] if len(found) == 1 and not any(member.is_third_party for member in members) else None


def _is_companion(member: Member) -> bool:
    return isinstance(member.processor, CompanionProcessor)


def prefer_usual_tokens(plan: RowPlan, members: Sequence[Member], failures: Failures) -> None:
    """Force the usual token of the first of some members of which ``plan`` permits it.

    Args:
        plan: Plan of all members, which leaves a token.
        members: The members that act at this position.
        failures: Recorder of the chain's failures.

    Raises:
        ProcessorFailed: a processor raised.
    """
    for member in members:
        if member.usual_token is None:
            continue
        try:
            token_id = member.usual_token()
        except BaseException as error:  # the processor boundary: code of other libraries
            raise failures.raised(member, error) from error
        if token_id is not None and plan.permits(token_id):
            plan.force_instead(member, token_id)
            return
