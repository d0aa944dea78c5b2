"""Chains: the ordered processors of one choice of one request, over one token history.

`chain` is the chain, of `members`; `history` the tokens that it stands on, `thinking_scope` the
section that its `scoped` processors are shown, `backtracking` which tokens may be sampled again;
`plan` its edits of one row at one step; `failures` and `receipts` record what each processor did,
and `thread_state` keeps what a third party's may not change.
`batch` merges the plans of all rows and applies them to logits in a handful of batched operations.
"""

from adapters.chain.batch import (
    PROBLEMS,
    Planned,
    Sample,
    apply_chain,
    apply_edits,
    apply_late,
    apply_plan,
    edit_elements_alone,
    plan_rows,
    replay,
    replay_token,
    row_problem,
)
from adapters.chain.chain import Mode, ProcessorChain
from adapters.chain.failures import ProcessorFailed
from adapters.chain.plan import RowPlan
from adapters.chain.receipts import ProcessorRecord, Receipt
from adapters.chain.thread_state import kept_thread_state
from adapters.chain.usual_tokens import forces_foreseen

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
    "edit_elements_alone",
    "forces_foreseen",
    "kept_thread_state",
    "plan_rows",
    "replay",
    "replay_token",
    "row_problem",
]
