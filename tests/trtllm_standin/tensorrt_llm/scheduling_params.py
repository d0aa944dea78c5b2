"""Placement of a request among the ranks of attention data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple  # the contract's own spelling

AgentHierarchy = List[Tuple[str, int]]


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: Optional[int] = None
    attention_dp_relax: bool = True
    agent_hierarchy: Optional[AgentHierarchy] = None
