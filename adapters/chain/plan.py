"""The edits that a chain makes to one row at one step, and whether they leave a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from adapters.chain.receipts import ProcessorRecord
from adapters.contract import (
    Allow,
    Ban,
    Edit,
    Processor,
    Scope,
    Stage,
    SteeringProcessor,
    bitmask_of,
    count_allowed,
    is_allowed,
)


class ProcessorFailed(Exception):
    """A processor of this chain failed: its request ends with an error, batch-mates are unaffected.

    Args:
        processor: Name of the processor.
        reason: ``raised``, ``nan``, ``infinite``, ``empty``, ``unsatisfiable`` or ``budget``.
        message: One sentence for the caller.
    """

    def __init__(self, processor: str, reason: str, message: str) -> None:
        super().__init__(f"logits processor {processor}: {message}")
        self.processor = processor
        self.reason = reason
        self.message = message

    def without_frames(self) -> ProcessorFailed:
        """This failure, to be kept: without the stack frames of it and of its causes.

        Those hold the request, its chain and its grammars, which would outlive it.
        """
        error: BaseException | None = self
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
        return self


@dataclass(slots=True)
class RowPlan:
    """All edits of one row at one step, in the order law's order.

    Attributes:
        soft: Bias, scale and shaping steps up to the soft stage, in order: ``(stage, edit or
            member)``.
        bans: Sparse hard masks.
        allows: Packed hard masks, to be AND-ed.
        force: The forced token, if any; no other edit then matters for the token.
        forced_by: The member that forces it.
        late: Shaping steps of the stage of hard masks and of those after it.
        num_banned: Tokens in `bans`.
        fewest_allowed: Tokens in the strictest of `allows`, padding left out.
    """

    soft: list[tuple[Stage, Edit | Member]] = field(default_factory=list)
    bans: list[Ban] = field(default_factory=list)
    allows: list[torch.Tensor] = field(default_factory=list)
    force: int | None = None
    forced_by: Member | None = None
    late: list[Member] = field(default_factory=list)
    num_banned: int = 0
    fewest_allowed: int = 2**63

    @property
    def is_empty(self) -> bool:
        """True if the row is left as it is."""
        return self.force is None and not (self.soft or self.bans or self.allows or self.late)

    def masks_permit(self, token_id: int) -> bool:
        """Whether no hard mask forbids the token."""
        if any(bool((ban.token_ids == token_id).any()) for ban in self.bans):
            return False
        return all(is_allowed(bitmask, token_id) for bitmask in self.allows)

    def permits(self, token_id: int) -> bool:
        """Whether masks and forcing allow the token."""
        return self.force == token_id if self.force is not None else self.masks_permit(token_id)

    def leaves_a_token(self) -> bool:
        """Whether a token survives all masks and bans.

        Most plans have more bits set than bans, which decides it without intersecting.
        """
        if len(self.allows) == 1 and self.fewest_allowed > self.num_banned:
            return True
        width = min(len(bitmask) for bitmask in self.allows)
        allowed = self.allows[0][:width].clone()
        for bitmask in self.allows[1:]:
            allowed &= bitmask[:width]
        if self.num_banned:
            banned = torch.cat([ban.token_ids for ban in self.bans]).tolist()
            allowed &= ~bitmask_of((token_id for token_id in banned if token_id < 32 * width), 32 * width)
        return bool(allowed.any())


@dataclass(slots=True, eq=False)
class Member:
    """One processor in its chain, with its scope and its record for the receipt.

    Attributes:
        edit: The method of a steering processor, None for a shaping one.
        is_third_party: It runs code from outside this package: its edits are checked, and its time
            is bounded.
        foresees: It may know tokens in advance (`Processor.foresee`).
        follows: It may have state that follows the history (`Processor.catch_up`).
        stage: The processor's.
        turn: The stage with which it is applied: `stage`, unless the request gives an order.
    """

    processor: Processor
    scope: Scope
    record: ProcessorRecord
    edit: Callable[[], Edit | None] | None = None
    stage: Stage = field(init=False)
    turn: Stage = field(init=False)
    is_third_party: bool = field(init=False)
    foresees: bool = field(init=False)
    follows: bool = field(init=False)
    _counted: Allow | None = field(default=None, init=False)
    _num_allowed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        kind = type(self.processor)
        self.stage = self.turn = self.processor.stage
        self.is_third_party = kind.wraps_third_party or not kind.__module__.startswith("adapters.")
        self.foresees = kind.foresee is not Processor.foresee and not self.is_third_party
        self.follows = self.is_third_party or any(
            getattr(kind, name) is not getattr(Processor, name) for name in ("reset", "advance", "catch_up")
        )
        if isinstance(self.processor, SteeringProcessor):
            self.edit = self.processor.edit  # looked up once: isinstance is slow for abstract classes

    @property
    def name(self) -> str:
        return self.processor.name

    def step(self) -> Edit | Member | None:
        """The processor's edit now; a shaping processor returns its member."""
        if self.follows:
            self.processor.catch_up()
        return self.edit() if self.edit is not None else self

    def num_allowed(self, edit: Allow, num_tokens: int) -> int:
        """Tokens below ``num_tokens`` that the processor's ``edit`` allows.

        A built-in often returns the edit of the step before again, which is not counted again. One
        of a third party may have changed it in place.
        """
        if self._counted is not edit or self.is_third_party:
            self._counted, self._num_allowed = edit, count_allowed(edit.bitmask, num_tokens)
        return self._num_allowed


NOTHING = RowPlan()
"""The plan of a step without edits; shared and immutable."""
