"""Drafts from a request's own chain: what it is about to force, or leaves as the only text."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.chain import ProcessorChain


class ChainProposer:
    """Implements `Proposer` with `ProcessorChain.foresee`; no model, no look-up.

    Args:
        chain: Of the request, at the end of the history that `propose` is given.
    """

    name = "chain"

    def __init__(self, chain: ProcessorChain) -> None:
        self._chain = chain

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        """See `Proposer.propose`."""
        return self._chain.foresee(limit)
