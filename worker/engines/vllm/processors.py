"""`WorkerProcessors`: the class that the worker's vLLM loads, in the engine's process.

The worker has built and started the chain of a request, and the request carries it, pickled: the
class unpickles it. Only the worker names this class, and it alone writes ``extra_args`` there;
``adapters.vllm:Processors``, for stock servers, never unpickles anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from adapters.catalog import precompute
from adapters.chain import ProcessorChain
from adapters.vllm.model import ModelFacts
from adapters.vllm.processors import Processors
from adapters.vllm.requests import Params
from adapters.vllm.rows import NUM_BUILDERS, MakesRows, Row, with_row
from adapters.vocabulary import vocabulary_at
from worker.engines.vllm.params import SHIPPED, Shipped

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


class WorkerProcessors(Processors):
    """The project's logits processors in the worker's own vLLM; see `Processors`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept everything: the worker admits requests before the engine has them."""

    def _make_builder(self, vllm_config: VllmConfig) -> MakesRows:
        return ChainReceiver(ModelFacts.of(vllm_config))


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
            self.never_ids = [*sorted(vocabulary.gap_ids), *range(vocabulary.num_tokens, vocabulary.size)]

    def new_row(self, params: Params) -> Row | None:
        """The row of a request that begins; None if it has no chain."""
        shipped = (params.extra_args or {}).get(SHIPPED)
        if shipped is None:
            return None
        found = Shipped(*shipped)
        return with_row(params, Row(self._threads.submit(_chain_of, found), found.end_id, found.report))


def _chain_of(shipped: Shipped) -> tuple[ProcessorChain, bool]:
    chain: ProcessorChain = pickle.loads(shipped.chain)
    return chain, shipped.draws
