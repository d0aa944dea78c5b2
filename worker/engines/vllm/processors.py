"""`WorkerProcessors`: the class that the worker's vLLM loads, in the engine's process.

The worker has built and started the chain of a request, and the request carries it, pickled: the
class unpickles it. Only the worker names this class, and it alone writes ``extra_args`` there;
``adapters.vllm:Processors``, for stock servers, never unpickles anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adapters.vllm.model import ModelFacts
from adapters.vllm.processors import Processors
from adapters.vllm.reports import REPORTS
from adapters.vllm.rows import MakesRows
from worker.engines.vllm.chain_receiver import ChainReceiver
from worker.parent_watch import end_with_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext


class WorkerProcessors(Processors):
    """The project's logits processors in the worker's own vLLM; see `Processors`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept everything: the worker admits requests before the engine has them."""

    def _make_builder(self, vllm_config: VllmConfig) -> MakesRows:
        end_with_worker()
        REPORTS.keep_all()
        return ChainReceiver(ModelFacts.of(vllm_config))

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Begin a request in a slot; True: `apply` sees every row."""
        super().add_request(req_idx, sampling_params)
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Apply the chains; ids that are no token are ruled out in rows without one, too."""
        self._editor.mask_never(logits)
        return super().apply(logits, ctx)
