"""State of one request that runs in vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from adapters.chain import Mode, ProcessorChain, Receipt
from worker.engines import FinishReason, TokenDelta
from worker.engines.delta_stream import DeltaStream
from worker.engines.weights import UpdatesWeights, WeightVersion
from worker.errors import ServingError


@dataclass(slots=True, eq=False)
class RunningRequest(DeltaStream):
    """One request and its stream.

    Attributes:
        request_id: The worker's id.
        task: Task that reads the engine's outputs; when it is cancelled, vLLM frees the request.
        report: Name of its failure and receipt in the engine's process, None without a chain.
        chain: The worker's copy of the chain, whose receipt counts for one that the engine never
            began; None without one.
        receipt: The whole answer's receipt, None until vLLM has ended it.
        pulls: vLLM's parameters of the KV transfer that the engine waits for, None if it waits for
            none.
        num_added: Tokens that the prompt has in vLLM beyond those of the request: of its pictures.
        num_named: Tokens so far whose weights are named.
        weights: Version of the newest of them; None where weights do not change.
        mode: Mode for its receipts, which says where the prompt was computed; None on an aggregated
            worker.
    """

    request_id: str
    task: asyncio.Task[None] | None = None
    report: str | None = None
    chain: ProcessorChain | None = None
    receipt: Receipt | None = None
    pulls: dict[str, Any] | None = None
    mode: Mode | None = None
    num_added: int = 0
    num_named: int = 0
    weights: WeightVersion | None = None

    def name_weights(self, delta: TokenDelta, weights: UpdatesWeights | None, num_before: int) -> None:
        """Name the version of the tokens of a delta, if it is another than that of those before.

        Args:
            delta: The next delta.
            weights: The engine's weights now; None where they do not change.
            num_before: Tokens of the answer that another worker has generated.
        """
        if weights is not None and delta.token_ids and weights.weight_version != self.weights:
            self.weights = weights.weight_version
            delta.weights.append((num_before + self.num_named, self.weights))
        self.num_named += len(delta.token_ids)

    def note_receipt(self, delta: TokenDelta, found: Receipt | None) -> None:
        """Give the last delta its receipt, which says where the prompt was computed, unless the
        request was migrated.

        Args:
            delta: The delta.
            found: The receipt of the engine's process, None if the chain never began there.
        """
        assert self.chain is not None
        self.receipt = delta.receipt = found or self.chain.receipt
        if self.mode is not None and delta.receipt.mode != "migrated":
            delta.receipt.mode = self.mode
        if self.chain.wants_receipt:
            delta.engine_data = {"logits_processors": delta.receipt.as_json()}

    def abort(self, reason: FinishReason = "cancelled") -> None:
        """End the stream for this reason, and free the request in vLLM."""
        self.put(TokenDelta(finish_reason=reason))
        self._free()

    def leave(self) -> None:
        """Send nothing more, and free the request in vLLM."""
        self.close()
        self._free()

    def end(self, failure: ServingError) -> None:
        """End the stream with an exception, and free the request in vLLM."""
        self.fail(failure)
        self._free()

    def _free(self) -> None:
        if self.task is not None:
            self.task.cancel()
