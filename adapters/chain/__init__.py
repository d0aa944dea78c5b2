"""Chains: the ordered processors of one choice of one request, over one token history.

`chain` is the chain; `plan` its edits of one row at one step; `batch` merges the plans of all rows
and applies them to logits in a handful of batched operations; `receipts` records what each
processor did.
"""

from adapters.chain.batch import (
    PROBLEMS,
    Planned,
    apply_chain,
    apply_edits,
    apply_late,
    apply_plan,
    plan_rows,
    replay,
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
    "apply_chain",
    "apply_edits",
    "apply_late",
    "apply_plan",
    "plan_rows",
    "replay",
    "row_problem",
]
