"""Speculative decoding: proposers, draft lengths, verification and rollback.

A decode row carries drafted tokens behind its newest one, and the forward pass computes the logits
of all of them. Then every position is sampled from the target as in plain decoding, in order: with
the chain at that position, its edits, and the position's own counter-based random number. The row
continues with the next position while the sampled token is the drafted one. So the tokens are those
of plain decoding, whatever was drafted; a proposer decides how fast they come.

`proposer` is the protocol; `chain_proposer`, `ngram`, `suffix` and `draft_model` implement it.
`speculator` chooses among them and how much they draft, with `draft_length`; `config` is
``--speculative-config``; `verification` has the decisions as plain functions.
"""

from worker.engines.embedded.speculation.config import SpeculativeConfig
from worker.engines.embedded.speculation.draft_model import DraftModelProposer, load_draft_model, with_pages
from worker.engines.embedded.speculation.proposer import Proposer
from worker.engines.embedded.speculation.speculator import Speculator
from worker.engines.embedded.speculation.verification import agreeing_rows

__all__ = [
    "DraftModelProposer",
    "Proposer",
    "SpeculativeConfig",
    "Speculator",
    "agreeing_rows",
    "load_draft_model",
    "with_pages",
]
