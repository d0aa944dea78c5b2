"""`Processors`: the class that vLLM loads, for both of its interfaces."""

from __future__ import annotations

from http import HTTPStatus
from secrets import randbits
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.exceptions import GracefulHTTPError
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as BatchProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from adapters.vllm.admission import check
from adapters.vllm.grammars import NotCompiled
from adapters.vllm.indexed import Indexed
from adapters.vllm.metrics import error_counter
from adapters.vllm.model import model_of
from adapters.vllm.rows import Builder, MakesRows, RowEditor
from adapters.vllm.slots import Slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


class Processors(BatchProcessor, SlotProcessor):
    """The project's logits processors in vLLM, one chain per request.

    A request selects them in ``extra_args["logits_processors"]`` (``vllm_xargs`` of the server), in
    the format of `adapters.catalog.parse_selection`; the operator by `adapters.vllm.model.POLICY`.

    Args:
        vllm_config: vLLM's configuration.
        second: The device (V1), or the state of all requests (V2).
        is_pin_memory: An argument of V1, not used.

    Raises:
        OSError, ValueError: the tokenizer, a third-party processor or the policy cannot be used.
    """

    def __init__(self, vllm_config: VllmConfig, second: Any, is_pin_memory: bool = False) -> None:
        builder = self._make_builder(vllm_config)
        self._editor = RowEditor(builder.never_ids)
        self._indexed = Indexed(builder, self._editor)
        self._slots = None if isinstance(second, torch.device) else Slots(second, builder, self._editor)

    def _make_builder(self, vllm_config: VllmConfig) -> MakesRows:
        """Maker of the rows of requests; the worker's own class has another."""
        model = model_of(vllm_config)
        model.warm_up()
        return Builder(model, error_counter(vllm_config), _shared_seed(vllm_config))

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that cannot be kept; in vLLM's frontend.

        Raises:
            ValueError: the message has the JSON path and what was expected.
            GracefulHTTPError: a grammar is not compiled yet; a 503.
        """
        try:
            check(sampling_params)
        except NotCompiled as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from None

    # V1: rows of the persistent batch

    def is_argmax_invariant(self) -> bool:
        """False: greedy requests have processors too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take the requests that joined, left or moved in the batch; one may leave and join."""
        if batch_update is not None:
            self._indexed.leave([*batch_update.removed, *(index for index, *_ in batch_update.added)])
        process_dict_updates(self._indexed.requests, batch_update, self._indexed.new)

    # V2: slots

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Begin a request in a slot; whether it has processors."""
        assert self._slots is not None
        return self._slots.add(req_idx, sampling_params)

    # both

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Apply the chains to ``logits`` (float32 ``[rows, V]``), in place."""
        if ctx is not None and self._slots is not None:
            self._slots.apply(logits, ctx)
        else:
            self._indexed.apply(logits)
        return logits


def _shared_seed(vllm_config: VllmConfig) -> int | None:
    """A number that the ranks of tensor parallelism share, each of which samples for itself; None
    where there is one rank. All of them call this at a time.
    """
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    shared: int = get_tp_group().broadcast_object(randbits(128))
    return shared
