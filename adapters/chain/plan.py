"""What a chain asks of one row at one step, who asks, and whether it can be satisfied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from adapters.chain.receipts import ProcessorRecord
from adapters.contract import Ban, Edit, Processor, Scope, Stage, SteeringProcessor, bitmask_of, is_allowed


class ProcessorFailed(Exception):
    """A processor of this chain failed; the request ends with an error, its batch-mates are not
    touched.

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


@dataclass(slots=True)
class RowPlan:
    """Everything that a chain asks of one row at one step, in the order law's order.

    Attributes:
        soft: Bias, scale and shaping steps up to the soft stage, in order: ``(stage, edit or
            member)``.
        bans: Sparse hard masks.
        allows: Packed hard masks, to be AND-ed.
        force: The token, when one is forced. Nothing else of the plan then matters for the token.
        forced_by: Who forces it.
        late: Shaping steps of the stage of hard masks and of those after it.
        fewest_allowed: Tokens in the strictest of `allows`, padding left out.
    """

    soft: list[tuple[Stage, Edit | Member]] = field(default_factory=list)
    bans: list[Ban] = field(default_factory=list)
    allows: list[torch.Tensor] = field(default_factory=list)
    force: int | None = None
    forced_by: Member | None = None
    late: list[Member] = field(default_factory=list)
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
        """Whether the token can be chosen, as far as masks and forcing say."""
        return self.force == token_id if self.force is not None else self.masks_permit(token_id)

    def leaves_a_token(self) -> bool:
        """Whether any bit survives all masks and bans; most plans have more bits set than there
        are bans.
        """
        num_banned = sum(len(ban.token_ids) for ban in self.bans)
        if len(self.allows) == 1 and self.fewest_allowed > num_banned:
            return True
        width = min(len(bitmask) for bitmask in self.allows)
        allowed = self.allows[0][:width].clone()
        for bitmask in self.allows[1:]:
            allowed &= bitmask[:width]
        if num_banned:
            banned = torch.cat([ban.token_ids for ban in self.bans]).tolist()
            allowed &= ~bitmask_of((token_id for token_id in banned if token_id < 32 * width), 32 * width)
        return bool(allowed.any())


@dataclass(slots=True, eq=False)
class Member:
    """One processor in its chain, with its scope and its record for the receipt.

    Attributes:
        edit: What a steering processor is asked for, None for a shaping one.
        is_third_party: It runs code that is not this package's: its edits are checked, and its time
            is bounded.
        turn: The stage at whose turn it acts: its own, unless the request gives an order.
    """

    processor: Processor
    scope: Scope
    record: ProcessorRecord
    edit: Callable[[], Edit | None] | None = None
    turn: Stage = field(init=False)
    is_third_party: bool = field(init=False)

    def __post_init__(self) -> None:
        kind = type(self.processor)
        self.turn = self.processor.stage
        self.is_third_party = kind.wraps_foreign or not kind.__module__.startswith("adapters.")
        if isinstance(self.processor, SteeringProcessor):
            self.edit = self.processor.edit  # found once: an abstract class answers isinstance slowly

    @property
    def name(self) -> str:
        return self.processor.name

    def step(self) -> Edit | Member | None:
        """What the processor asks for now; a shaping one always asks for itself."""
        self.processor.catch_up()
        return self.edit() if self.edit is not None else self


NOTHING = RowPlan()
"""The plan of a step at which nobody asks for anything; shared, and never changed."""
