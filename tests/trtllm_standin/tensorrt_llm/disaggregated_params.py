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
_kept = [
    (f.name, f.type, field(default=f.default))
    for f in fields(_NewDisaggregatedParams)
    if not (SWITCHES.is_old and f.name in NOT_IN_OLD)
]
DisaggregatedParams: Any = dataclasses.make_dataclass(
    "DisaggregatedParams", _kept, bases=(_Rules,), slots=True, kw_only=True
)
DisaggregatedParams.__module__ = __name__
