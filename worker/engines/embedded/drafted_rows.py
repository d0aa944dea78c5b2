"""Rows of logits of a step with drafts, by their number among the step's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.devices import upload_ids
from worker.engines.embedded.plan import Model, Plan


class DraftedRows:
    """The rows of a step's logits, those among them that were left out.

    Args:
        model: Model that has computed the step.
        plan: Plan of the step.
        logits: Result of `Model.forward` for it, less the rows that `plan` lost since.

    Attributes:
        late: Rows that were left out, and then computed: their numbers when the step was computed.
    """

    def __init__(self, model: Model, plan: Plan, logits: torch.Tensor) -> None:
        self.late: set[int] = set()
        self._model, self._unread, self._logits, self._places = model, plan.unread, logits, plan.places()

    def take(self, rows: Sequence[int]) -> torch.Tensor:
        """Some rows, ``[n, V]``, to be taken once: they may be a view of the logits."""
        places = [self._places[row] for row in rows if row in self._places]
        if len(places) < len(rows):
            return self._take_late(rows, places)
        first = places[0]
        if places == [*range(first, first + len(places))]:
            return self._logits[first : first + len(places)]
        return self._logits[upload_ids(places, self._logits.device)]

    def _take_late(self, rows: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        late = {index: self._unread[row] for index, row in enumerate(rows) if row not in self._places}
        self.late.update(late.values())
        copied = self._logits.new_empty(len(rows), self._logits.shape[1])
        copied[[index for index in range(len(rows)) if index not in late]] = self._logits[places]
        copied[[*late]] = self._model.late_logits([*late.values()])
        return copied
