"""Chains: the ordered processors of one choice of one request, over one token history.

`chain` is the chain; `plan` its edits of one row at one step; `backtracking` which of its tokens
may still be sampled again; `scoped` what processors with a scope are shown; `batch` merges the
plans of all rows and applies them to logits in a handful of batched operations; `receipts` records
what each processor did.
"""

from adapters.chain.batch import (
    PROBLEMS,
    Planned,
    Sample,
    apply_chain,
    apply_edits,
    apply_late,
    apply_plan,
    plan_rows,
    replay,
    replay_token,
    row_problem,
)
from adapters.chain.chain import Mode, ProcessorChain
from adapters.chain.plan import ProcessorFailed, RowPlan
from adapters.chain.receipts import ProcessorRecord, Receipt

__all__ = [
    "PROBLEMS",
    "Mode",
    "Planned",
    "ProcessorChain",
    "ProcessorFailed",
    "ProcessorRecord",
    "Receipt",
    "RowPlan",
    "Sample",
    "apply_chain",
    "apply_edits",
    "apply_late",
    "apply_plan",
    "plan_rows",
    "replay",
    "replay_token",
    "row_problem",
]
