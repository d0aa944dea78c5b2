"""Reasons that a row cannot be sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapters.chain import PROBLEMS, Planned, ProcessorChain, RowPlan
from worker.engines.embedded.plan import Edits, Request

_UNSATISFIABLE = "unsatisfiable: the request's controls leave no token that may be sampled"
NOT_FINITE = "the row of logits holds NaN or +inf"


def unfit(highest: list[float], planned: Iterable[Planned], known: dict[int, str]) -> dict[int, str]:
    """Reasons that rows not in `known` cannot be sampled; reported to their chains too.

    Args:
        highest: The highest logit of each row, divided by its temperature; NaN if it holds NaN.
        planned: The rows that have a chain.
        known: Rows already known to have failed, or whose logits nobody needs.
    """
    if all(map(math.isfinite, highest)):
        return {}
    chains = {row: chain for row, chain, _ in planned}
    errors: dict[int, str] = {}
    for row, value in enumerate(highest):
        if math.isfinite(value) or row in known:
            continue
        if value == -math.inf and row in chains:
            errors[row] = str(chains[row].failures.no_token_left())
        elif row in chains and any(member.is_third_party for member in chains[row].members):
            reason = "nan" if math.isnan(value) else "infinite"
            errors[row] = str(chains[row].failures.unusable(reason, PROBLEMS[reason]))
        else:
            errors[row] = _UNSATISFIABLE if value == -math.inf else NOT_FINITE
    return errors


@dataclass(frozen=True, slots=True)
class Forced:
    """A row whose token is forced by a processor.

    Attributes:
        row: Index of the row.
        token_id: The token.
    """

    row: int
    token_id: int
    chain: ProcessorChain
    plan: RowPlan

    def refuse(self, why: str) -> str:
        """Record and return the failure of forcing a token that cannot be sampled."""
        name = self.plan.forced_by.name if self.plan.forced_by is not None else "model"
        message = f"forces token {self.token_id}, which {why}, at position {self.chain.position}"
        return str(self.chain.fail(name, "unsatisfiable", message))


def forced_rows(planned: Iterable[Planned]) -> list[Forced]:
    """The rows with a forced token."""
    return [Forced(row, plan.force, chain, plan) for row, chain, plan in planned if plan.force is not None]


def known_and_wanted(requests: Sequence[Request], edits: Edits) -> tuple[list[int], list[int]]:
    """The rows of a step whose logits nobody looks at, and the others.

    Their tokens are forced, or their chains have failed; and nobody wants their log probabilities.
    """
    known = edits.failures.keys() | {row for row, _, plan in edits.planned if plan.force is not None}
    known = {row for row in known if requests[row].params.logprobs is None and requests[row].tap is None}
    return sorted(known), [row for row in range(len(requests)) if row not in known]


def all_forced(planned: Sequence[Planned], count: int) -> bool:
    """Whether processors force the tokens of all ``count`` rows: no logits are looked at."""
    return len(planned) == count and all(plan.force is not None for _, _, plan in planned)
