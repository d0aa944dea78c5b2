"""The edits that a chain makes to one row at one step, and whether they leave a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from adapters.chain.receipts import ProcessorRecord
from adapters.contract import (
    Allow,
    Ban,
    Edit,
    MalformedEdit,
    Processor,
    Scope,
    Stage,
    SteeringProcessor,
    bitmask_of,
    count_allowed,
    is_allowed,
    state_methods,
    tells_how_long,
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
        acts: What each member does, in order.
        num_masked: Vocabulary entries masked; those that several members mask count several times.
        force: The forced token, if any; no other edit then matters for the token.
        forced_by: The member that forces it.
    """

    acts: list[Act]
    num_masked: int = 0
    force: int | None = None
    forced_by: Member | None = None

    @property
    def is_empty(self) -> bool:
        """True if the row is left as it is."""
        return not self.acts

    @property
    def soft(self) -> list[tuple[Stage, Edit | Member]]:
        """Bias, scale and shaping steps up to the soft stage: ``(stage, edit or member)``."""
        return [
            (stage, edit)
            for _, stage, edit, kind, _ in self.acts
            if stage <= Stage.SOFT and kind in ("biased", "shaped")
        ]

    @property
    def bans(self) -> list[Ban]:
        """Sparse hard masks."""
        return [edit for _, _, edit, _, _ in self.acts if isinstance(edit, Ban)]

    @property
    def allows(self) -> list[torch.Tensor]:
        """Packed hard masks, to be AND-ed."""
        return [edit.bitmask for _, _, edit, _, _ in self.acts if isinstance(edit, Allow)]

    @property
    def late(self) -> list[Member]:
        """Shaping steps of the stage of hard masks and of those after it."""
        return [edit for _, stage, edit, _, _ in self.acts if isinstance(edit, Member) and stage > Stage.SOFT]

    def masks_permit(self, token_id: int) -> bool:
        """Whether no hard mask forbids the token."""
        if any(bool((ban.token_ids == token_id).any()) for ban in self.bans):
            return False
        return all(is_allowed(bitmask, token_id) for bitmask in self.allows)

    def permits(self, token_id: int) -> bool:
        """Whether masks and forcing allow the token."""
        return self.force == token_id if self.force is not None else self.masks_permit(token_id)

    def leaves_a_token(self) -> bool:
        """Whether a token survives all masks and bans; true if there are no `allows`."""
        allows, bans = self.allows, self.bans
        if not allows:
            return True
        width = min(len(bitmask) for bitmask in allows)
        allowed = allows[0][:width].clone()
        for bitmask in allows[1:]:
            allowed &= bitmask[:width]
        if bans:
            banned = torch.cat([ban.token_ids for ban in bans]).tolist()
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
        lasts: `SteeringProcessor.same_until`, if its class has one. Not with a scope: tokens
            outside of it, and tags, change what the processor sees at a position.
        same_until: The position before which its `act` stays the same.
        act: What its newest edit does, None if it has none or is shaping.
    """

    kind: ClassVar[str] = "shaped"

    processor: Processor
    scope: Scope
    record: ProcessorRecord
    edit: Callable[[], Edit | None] | None = None
    same_until: int = field(default=0, init=False)
    act: Act | None = field(default=None, init=False)
    follows: bool = field(init=False)
    lasts: Callable[[], int] | None = field(default=None, init=False)
    is_third_party: bool = field(init=False)
    foresees: bool = field(init=False)
    stage: Stage = field(init=False)
    turn: Stage = field(init=False)

    def __post_init__(self) -> None:
        kind = type(self.processor)
        self.stage = self.turn = self.processor.stage
        self.is_third_party = kind.wraps_third_party or not kind.__module__.startswith("adapters.")
        self.foresees = kind.foresee is not Processor.foresee and not self.is_third_party
        self.follows = self.is_third_party or bool(state_methods(kind))
        if isinstance(self.processor, SteeringProcessor):
            self.edit = self.processor.edit  # looked up once: isinstance is slow for abstract classes
            if self.scope == "all" and tells_how_long(type(self.processor)):
                self.lasts = self.processor.same_until

    @property
    def name(self) -> str:
        return self.processor.name

    def step(self) -> Edit | Member | None:
        """The processor's edit now; a shaping processor returns its member."""
        if self.follows:
            self.processor.catch_up()
        if self.edit is None:
            return self
        edit = self.edit()
        if self.lasts is not None:
            until = self.lasts()
            if type(until) is not int:
                raise MalformedEdit(f"returned {type(until).__name__} from same_until, expected a position, int")
            self.same_until = until
        return edit

    def act_of(self, edit: Edit | Member | None, num_tokens: int) -> Act | None:
        """What ``edit`` does, which becomes the newest one.

        A built-in often returns the edit of the step before again, of which the masked entries are
        not counted again. One of a third party may have changed it in place.

        Args:
            edit: As returned by `step`.
            num_tokens: Ids from it on are not counted.
        """
        act = self.act
        if edit is None:
            act = None
        elif act is None or act[2] is not edit or self.is_third_party:
            kind = edit.kind
            num_masked = _num_masked(edit, num_tokens) if kind == "masked" else 0
            act = self.record, self.stage, edit, kind, num_masked
        self.act = None if edit is self else act
        return act


def _num_masked(edit: Edit | Member, num_tokens: int) -> int:
    if isinstance(edit, Ban):
        return edit.token_ids.numel()
    return num_tokens - count_allowed(edit.bitmask, num_tokens) if isinstance(edit, Allow) else 0


Act = tuple[ProcessorRecord, Stage, Edit | Member, str, int]
"""What a member does to a row: its record and stage, its edit (the member if it is shaping), what a
receipt calls it, and vocabulary entries masked.

A plain tuple, as most edits differ from token to token. Only of shaping has it the member itself,
which holds its newest act.
"""
