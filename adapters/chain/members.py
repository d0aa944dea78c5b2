"""Members of a chain: processors with their scopes and records, in the order in which they act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from adapters.chain.receipts import ProcessorRecord
from adapters.chain.thread_state import kept_thread_state
from adapters.contract import (
    Allow,
    BacktrackingProcessor,
    Ban,
    Edit,
    Force,
    MalformedEdit,
    Processor,
    Scope,
    Stage,
    SteeringProcessor,
    check_edit,
    state_methods,
    tells_how_long,
)
from adapters.vocabulary import Vocabulary

_AS_IT_IS = nullcontext()


@dataclass(slots=True, eq=False)
class Member:
    """One processor in its chain, with its scope and its record for the receipt.

    Attributes:
        edit: Method of a steering processor, None for a shaping one.
        is_third_party: True if it runs code from outside this package: its edits are checked, and
            its time is bounded.
        foresees: True if it may know tokens in advance (`Processor.foresee`).
        follows: True if it may have state that follows the history (`Processor.catch_up`).
        stage: Stage of the processor.
        turn: Stage at which it is applied: `stage`, unless the request gives an order.
        lasts: `SteeringProcessor.same_until`, if its class has one. Not with a scope: tokens
            outside of it, and tags, change what the processor sees at a position.
        usual_token, sure_token: Methods of a `SteeringProcessor`, if its class is a built-in that
            has a `usual_token`.
        same_until: Position before which its `act` stays the same.
        act: Action of its newest edit, None if it has none or is shaping.
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
    usual_token: Callable[[], int | None] | None = field(default=None, init=False)
    sure_token: Callable[[], int | None] | None = field(default=None, init=False)
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
            has_usual = type(self.processor).usual_token is not SteeringProcessor.usual_token
            if has_usual and not self.is_third_party:
                self.usual_token, self.sure_token = self.processor.usual_token, self.processor.sure_token

    @property
    def name(self) -> str:
        return self.record.name

    def kept(self) -> AbstractContextManager[None]:
        """A block in which its processor's code runs: a third party's changes nothing for the code
        behind it (`kept_thread_state`).
        """
        return kept_thread_state() if self.is_third_party else _AS_IT_IS

    def step(self, is_sure: bool = False) -> Edit | Member | None:
        """The processor's edit now; a shaping processor returns its member.

        Args:
            is_sure: Force the token that the processor is sure of, if there is one.
        """
        if self.follows:
            self.processor.catch_up()
        if is_sure and self.sure_token is not None and (token_id := self.sure_token()) is not None:
            return Force(token_id)
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
        """The action of ``edit``, which becomes the newest one.

        A built-in often returns the edit of the step before again, whose masked entries are not
        counted again; a third-party processor may have changed it in place.

        Args:
            edit: Result of `step`.
            num_tokens: Number of ids that are counted, from 0 on.
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


Act = tuple[ProcessorRecord, Stage, Edit | Member, str, int]
"""Action of a member on a row: its record and stage, its edit (the member if it is shaping), the
receipt's word for it, and the number of vocabulary entries masked.

A plain tuple, as most edits differ from token to token. Only that of a shaping member refers to the
member, which keeps its newest act.
"""


def member_of(processor: Processor, scope: Scope, vocabulary: Vocabulary) -> Member:
    """A member with an empty record; edits of third-party processors are checked.

    Those of built-ins are checked in tests.
    """
    record = ProcessorRecord(processor.name, processor.version)
    if isinstance(processor, BacktrackingProcessor):
        record.rollbacks = 0
    member = Member(processor, scope, record)
    if member.edit is not None and member.is_third_party:
        soft = processor.stage <= Stage.SOFT
        member.edit = partial(_checked_edit, member.edit, soft, vocabulary.size, vocabulary.num_tokens)
    return member


def in_order(members: Sequence[Member], order: Sequence[str]) -> list[Member]:
    """``members`` as they act: by stage, ties as given; those of the late stages by ``order``.

    Args:
        members: Members in the order of the request.
        order: Names of processors of the stages temperature and truncation, which then act as one
            stage. Those of these stages that are not named act after them.
    """
    late = (Stage.TEMPERATURE, Stage.TRUNCATION)
    if not order:
        return sorted(members, key=lambda member: member.turn)
    places = {name: place for place, name in enumerate(order)}
    for member in members:
        member.turn = Stage.TEMPERATURE if member.stage in late else member.stage

    def key(member: Member) -> tuple[int, int]:
        behind = len(places) + member.stage
        return member.turn, places.get(member.name, behind) if member.stage in late else 0

    return sorted(members, key=key)


def _checked_edit(make: Callable[[], Edit | None], soft: bool, vocab_size: int, num_tokens: int) -> Edit | None:
    edit = make()
    return None if edit is None else check_edit(edit, soft=soft, vocab_size=vocab_size, num_tokens=num_tokens)


def _num_masked(edit: Edit | Member, num_tokens: int) -> int:
    return edit.num_masked(num_tokens) if isinstance(edit, Ban | Allow) else 0
