"""`ChainReceiver`: makes rows of the chains that requests carry, in vLLM's process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from adapters.catalog import precompute
from adapters.chain import ProcessorChain, ProcessorFailed
from adapters.interrupts import is_interrupt
from adapters.vllm.model import ModelFacts
from adapters.vllm.reports import REPORTS
from adapters.vllm.requests import Params
from adapters.vllm.rows import NUM_BUILDERS, Row, with_row
from adapters.vocabulary import vocabulary_at
from worker.engines.vllm.params import SHIPPED, Shipped


class ChainReceiver:
    """Makes rows of the chains that requests carry.

    Args:
        facts: Facts about the served model.

    Attributes:
        never_ids: Ids of a row that are no token.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._threads = ThreadPoolExecutor(NUM_BUILDERS, thread_name_prefix="chain-receiver")
        self.never_ids: Sequence[int] = ()
        if facts.tokenizer is not None:
            vocabulary = vocabulary_at(facts.tokenizer, facts.vocab_size, tuple(sorted(facts.eos_token_ids)))
            precompute(vocabulary)
            self.never_ids = vocabulary.never_ids

    def new_row(self, params: Params, *, is_resumed: bool = False) -> Row | None:
        """The row of a request that begins; None if it has no chain.

        A chain that has begun goes on with a request that is resumed: where the scheduler is in
        another process, the parameters come anew, and no row is kept with them.
        """
        shipped = (params.extra_args or {}).get(SHIPPED)
        if shipped is None:
            return None
        found = Shipped(*shipped)
        begun = REPORTS.begun(found.report) if is_resumed else None
        row = Row(self._threads.submit(_chain_of, found, begun), found.end_id, found.report)
        row.applied = begun is not None
        return with_row(params, row)


def _chain_of(shipped: Shipped, begun: ProcessorChain | None) -> ProcessorChain:
    """The chain that goes on, or that a request carries.

    Raises:
        ProcessorFailed: it cannot be loaded.
    """
    if begun is not None:
        return begun
    try:
        chain: ProcessorChain = pickle.loads(shipped.chain)
    except BaseException as error:  # of any class: third parties' processors, which may exit
        if is_interrupt(error):
            raise
        problem = f"cannot be loaded in vLLM's process ({type(error).__name__})"
        raise ProcessorFailed(shipped.suspects, "raised", problem) from error
    return chain
