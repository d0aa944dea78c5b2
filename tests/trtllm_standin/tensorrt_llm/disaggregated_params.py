"""`DisaggregatedParams`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Dict, List, Optional

from tensorrt_llm.standin_switches import SWITCHES


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


class _Rules:
    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in ("context_only", "generation_only", "context_and_generation"):
                raise ValueError(f"Unknown request type: {self.request_type}")


@dataclass(slots=True, kw_only=True)
class _NewDisaggregatedParams(_Rules):
    request_type: Optional[str] = None
    first_gen_tokens: Optional[List[int]] = None
    first_gen_log_probs: Optional[List] = None
    first_gen_logits: Optional[List] = None
    ctx_request_id: Optional[int] = None
    opaque_state: Optional[bytes] = None
    draft_tokens: Optional[List[int]] = None
    disagg_request_id: Optional[int] = None
    ctx_dp_rank: Optional[int] = None
    ctx_info_endpoint: Optional[str] = None
    schedule_style: Optional[DisaggScheduleStyle] = None
    ctx_usage: Optional[Dict[str, Any]] = None
    conversation_id: Optional[str] = None
    multimodal_embedding_handles: Optional[List[Dict[str, Any]]] = None
    multimodal_hashes: Optional[List[List[int]]] = None
    mrope_position_ids_handle: Optional[Dict[str, Any]] = None
    mrope_position_deltas_handle: Optional[Dict[str, Any]] = None


NOT_IN_OLD = ("ctx_usage", "conversation_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransceiverLifecycleAdvertisement:
    """A state that is no JSON, as a worker sees it."""

    protocol_version: int
    capabilities: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Lifecycle:
    """Ids of a hand-off, in a branch of 2026."""

    logical_request_id: Optional[int] = None
    prefill_artifact_id: Optional[str] = None
    artifact_version: Optional[int] = None
    handoff_attempt_uuid: Optional[str] = None
    consumer_grant_id: Optional[str] = None
    transfer_session_id: Optional[str] = None
    generation_endpoint_name: Optional[str] = None
    generation_endpoint_rank: Optional[int] = None
    generation_endpoint_incarnation: Optional[str] = None
    context_control_endpoint: Optional[str] = None
    context_transceiver_lifecycle: Optional[TransceiverLifecycleAdvertisement] = None
    _lifecycle_identity_locked: bool = field(default=False, init=False, repr=False, compare=False)


IDENTITY = tuple(f.name for f in fields(_Lifecycle) if f.init)
TOGETHER = IDENTITY[:6]


class _LifecycleRules(_Rules):
    """Ids are given together, and do not change once they are locked."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        super().__post_init__()
        missing = [name for name in TOGETHER if getattr(self, name) is None]
        if 0 < len(missing) < len(TOGETHER):
            raise ValueError(f"lifecycle identity fields must be provided together; missing: {', '.join(missing)}")

    def __setattr__(self: Any, name: str, value: Any) -> None:
        locked = name in IDENTITY and getattr(self, "_lifecycle_identity_locked", False)
        if locked and value != getattr(self, name):
            raise AttributeError(f"{name} is part of an immutable lifecycle identity")
        object.__setattr__(self, name, value)


def _shown(cls: Any) -> list[Any]:
    return [
        (f.name, f.type, field(default=f.default, init=f.init, repr=f.repr, compare=f.compare)) for f in fields(cls)
    ]


_kept = [each for each in _shown(_NewDisaggregatedParams) if not (SWITCHES.is_old and each[0] in NOT_IN_OLD)]
if SWITCHES.lifecycle:
    at = [name for name, _, _ in _kept].index("ctx_dp_rank")
    _more = _shown(_Lifecycle)
    _kept = [*_kept[:at], *_more[:-1], *_kept[at:], _more[-1]]
DisaggregatedParams: Any = dataclasses.make_dataclass(
    "DisaggregatedParams",
    _kept,
    bases=(_LifecycleRules if SWITCHES.lifecycle else _Rules,),
    slots=True,
    kw_only=True,
)
DisaggregatedParams.__module__ = __name__
