"""`Processors`: the class that vLLM loads, for both of its interfaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as BatchProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from adapters.chain import ProcessorFailed
from adapters.vllm.admission import check
from adapters.vllm.model import ModelFacts, served_model
from adapters.vllm.rows import Builder, Row, RowEditor, end, follow, rows_of
from adapters.vllm.slots import Slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


@dataclass(slots=True)
class _Listed:
    """A row of V1's batch, and the lists in which vLLM keeps its tokens."""

    row: Row
    prompt: list[int]
    output: list[int]

    def token_at(self, position: int) -> int:
        """The token at a position of the answer."""
        return self.output[position - len(self.prompt)]


class Processors(BatchProcessor, SlotProcessor):
    """The project's logits processors in vLLM, one chain per request.

    A request selects them in ``extra_args["logits_processors"]`` (``vllm_xargs`` of the server), in
    the format of `adapters.catalog.parse_selection`; the operator by `adapters.vllm.model.POLICY`.

    Args:
        vllm_config: vLLM's configuration.
        second: The device (V1), or the state of all requests (V2).
        is_pin_memory: Of V1; not used.

    Raises:
        OSError, ValueError: the tokenizer, a third-party processor or the policy cannot be used.
    """

    def __init__(self, vllm_config: VllmConfig, second: Any, is_pin_memory: bool = False) -> None:
        self._builder = self._make_builder(vllm_config)
        self._editor = RowEditor(self._builder.never_ids)
        self._listed: dict[int, _Listed] = {}
        self._slots = None if isinstance(second, torch.device) else Slots(second, self._builder, self._editor)

    def _make_builder(self, vllm_config: VllmConfig) -> Builder:
        """What makes the rows of requests; a worker that has built the chains has another."""
        model = served_model(ModelFacts.of(vllm_config))
        model.warm_up()
        return Builder(model)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that cannot be kept; in vLLM's frontend.

        Raises:
            ValueError: the message has the JSON path and what was expected.
        """
        check(sampling_params)

    # V1: rows of the persistent batch

    def is_argmax_invariant(self) -> bool:
        """False: greedy requests have processors too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take the requests that joined, left or moved in the batch."""
        process_dict_updates(self._listed, batch_update, self._new)

    def _new(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Listed | None:
        def is_same(row: Row) -> bool:
            return row.output is output or (row.output == output and row not in standing)

        standing = [listed.row for listed in self._listed.values()]
        row = next(filter(is_same, rows_of(params)), None) or self._builder.new_row(params)
        if row is None:
            return None
        row.output = output
        return _Listed(row, prompt or [], output)

    def _apply_listed(self, logits: torch.Tensor) -> None:
        standing = []
        for index, listed in self._listed.items():
            row = listed.row
            if not row.has_failed:
                try:
                    chain = row.chain_after(listed.prompt)
                    follow(chain, len(listed.prompt) + len(listed.output), listed.token_at)
                    standing.append((index, row, chain))
                except ProcessorFailed as error:
                    row.fail(error)
            if row.has_failed:
                end(logits, index, row)
        if standing:
            self._editor.apply(logits, standing)

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
        elif self._listed:
            self._apply_listed(logits)
        return logits
