"""Drafts from a request's own chain: what it is about to force, or leaves as the only text."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.chain import ProcessorChain, forces_foreseen
from worker.engines.embedded.speculation.proposer import Draft


class ChainProposer:
    """Implements `Proposer` with `ProcessorChain.foresee`; no model, no look-up.

    Args:
        chain: Chain of the request, at the end of the history that `propose` is given.

    Attributes:
        is_forced: Whether the chain mostly forces what it foresees.
    """

    name = "chain"
    is_model = False

    def __init__(self, chain: ProcessorChain) -> None:
        self._chain = chain
        self.is_forced = forces_foreseen(chain.members, chain.masks_alone)

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        return Draft(self._chain.foresee(limit))
