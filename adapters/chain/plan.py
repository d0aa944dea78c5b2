"""The edits that a chain makes to one row at one step, and whether they leave a token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from adapters.chain.members import Act, Member
from adapters.contract import Allow, Ban, Force, Stage, Unsatisfiable, bitmask_of, is_allowed


@dataclass(slots=True)
class RowPlan:
    """All edits of one row at one step, in the order law's order.

    Attributes:
        acts: Actions of the members, in order.
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
    def bans(self) -> list[Ban]:
        """Sparse hard masks."""
        return [edit for _, _, edit, _, _ in self.acts if isinstance(edit, Ban)]

    @property
    def allows(self) -> list[torch.Tensor]:
        """Packed hard masks, to be AND-ed."""
        return [edit.bitmask for _, _, edit, _, _ in self.acts if isinstance(edit, Allow)]

    @property
    def masks(self) -> bool:
        """Whether there is a hard mask, sparse or packed."""
        return any(kind == "masked" for _, _, _, kind, _ in self.acts)

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

    @classmethod
    def of(cls, member: Member, act: Act) -> RowPlan:
        """The plan of one act of ``member`` alone."""
        plan = cls([act], act[4])
        plan.force_by(member, act)
        return plan

    def mask(self, acts: Iterable[Act]) -> None:
        """Add masks that no member's own edit makes."""
        for act in acts:
            self.acts.append(act)
            self.num_masked += act[4]

    def force_instead(self, member: Member, token_id: int) -> None:
        """Force a token in the place of the mask of ``member``, of which it is one."""
        for index, (record, stage, edit, _, masked) in enumerate(self.acts):
            if record is member.record and isinstance(edit, Allow):
                self.acts[index] = act = record, stage, Force(token_id), "forced", 0
                self.num_masked -= masked
                self.force_by(member, act)
                return

    def force_by(self, member: Member, act: Act) -> None:
        """Note the token that an act of ``member`` forces, if it forces one.

        Raises:
            Unsatisfiable: another member forces another token.
        """
        edit = act[2]
        if not isinstance(edit, Force):
            return
        if self.forced_by is not None and self.force != edit.token_id:
            raise Unsatisfiable(f"forces token {edit.token_id} where {self.forced_by.name} forces {self.force}")
        self.forced_by, self.force = member, edit.token_id


@dataclass(slots=True)
class PlannedEdits:
    """The edits that a chain has planned last, until the token at that position is known.

    Attributes:
        acts: Actions of the members, in order; empty once the token is known, or after a failure.
    """

    acts: list[Act] = field(default_factory=list)

    def names(self, kinds: Collection[str], before: Member | None = None) -> list[str]:
        """Names of the processors with an edit of one of ``kinds``, of those ``before`` a member.

        In the order law's order; but masks precede all shaping at their stage.
        """
        is_late, is_before, found = before is not None and before.stage >= Stage.MASK, True, list[str]()
        for record, _, _, kind, _ in self.acts:
            is_before = is_before and (before is None or record is not before.record)
            if (is_before or (is_late and kind == "masked")) and kind in kinds:
                found.append(record.name)
        return list(dict.fromkeys(found))

    def by_index(self, members: Sequence[Member]) -> list[tuple[int, str, int]]:
        """Member index, kind and number of masked entries of each edit."""
        indices = {id(member.record): index for index, member in enumerate(members)}
        return [(indices[id(record)], kind, masked) for record, _, _, kind, masked in self.acts]
