"""`ServedRequest`: one request from its arrival to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from adapters.catalog import Selection
from adapters.chain import Receipt
from adapters.vocabulary import byte_index
from worker.disaggregation.serving import DisaggregatedServing
from worker.engines import EngineRequest, FinishReason, KeepsReceipts, ReadKv, TokenDelta
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded
from worker.lifecycle.drain import InFlightRequest, InFlightRequests
from worker.migration.boundary_record import RequestRecord, UnrecordedRequest
from worker.migration.records import BoundaryRecords
from worker.processors.builder import ServedChainBuilder
from worker.request_log import RequestEntry
from worker.requests.prompt_scores import token_text
from worker.requests.receipts import RequestReceipt
from worker.requests.refusals import empty_chunk
from worker.requests.request import GenerationRequest
from worker.requests.response import STOP_STRING, STOP_TOKEN, ResponseBuilder
from worker.requests.rollout import add_match
from worker.requests.token_weights import TokenWeights
from worker.server.interruptible import Interruptible, call_in
from worker.server.reports import RequestReports
from worker.text.deltas import TokenBytes
from worker.text.safe_chunks import SafeChunks
from worker.text.stop_text import StopText

SENT_S = 0.01
"""Time for the runtime to come back for more behind the last chunk of an answer."""


class ServedRequest:
    """One request; owns its log entry, its boundary record and its slot among those in flight.

    It is `admit`-ted, recorded and begun; each delta of the engine becomes a chunk; then it ends in
    one of three ways: `end`, `drop` if the runtime drops the stream, `fail` with an error.

    Args:
        request_id: Id that the runtime gave it.
        in_flight: Requests in flight, among which it takes a slot.
        disaggregation: Role of the worker in disaggregated serving.
        reports: Reports of requests to operators.

    Attributes:
        entry: Log entry.
        record: Boundary record, None before `admit`.
        preparing: Work before the engine has the request.
        is_complete: Whether the answer has ended at a stop string, which the engine does not see.
    """

    def __init__(
        self,
        request_id: str,
        in_flight: InFlightRequests,
        disaggregation: DisaggregatedServing,
        reports: RequestReports,
    ) -> None:
        self.entry = RequestEntry(request_id=request_id, model=reports.model)
        self.record: RequestRecord | None = None
        self.preparing = Interruptible()
        self.is_complete = False
        self._in_flight = in_flight
        self._disaggregation = disaggregation
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._slot: InFlightRequest | None = None
        self._selection = Selection()
        self._builder: ResponseBuilder | None = None
        self._chains: ServedChainBuilder | None = None
        self._receipt: Receipt | None = None  # of processors that are not counted yet
        self._sampled_from = TokenWeights()  # tokens that are withheld among them
        self._num_tokens = 0  # of prompt and answer, those that are withheld among them
        self._stop_text: StopText | None = None
        self._safe_chunks: SafeChunks[TokenDelta] | None = None

    def admit(self, request: GenerationRequest) -> None:
        """Take a slot: in flight while its grammars compile, but without KV.

        Raises:
            Draining, InvalidRequest: it is not admitted; see `InFlightRequests.admit`.
        """
        self.entry.is_probe, self.entry.num_prompt_tokens = request.is_probe, len(request.prompt_token_ids)
        self.entry.model = request.lora_name or self.entry.model
        self._slot = self._in_flight.admit(self.entry.request_id, 0)
        self.record = UnrecordedRequest(request)

    async def read_record(self, boundaries: BoundaryRecords | None) -> GenerationRequest:
        """The request as its first worker received it, from its boundary record, if it has one.

        Raises:
            BoundaryStoreUnavailable, InvalidRequest: see `BoundaryRecords.begin`.
        """
        assert self.record is not None
        request = self.record.request
        if boundaries is not None and not request.is_probe:
            self.record = await self.preparing.run(boundaries.begin(self.entry.request_id, request))
        self.entry.num_prompt_tokens = len(self.record.request.prompt_token_ids)
        return self.record.request

    def begin(
        self,
        engine_request: EngineRequest,
        selection: Selection,
        receipt: RequestReceipt | None,
        chains: ServedChainBuilder,
        *,
        is_migratable: bool,
    ) -> None:
        """Count the KV of a request that the engine is about to decode.

        Args:
            engine_request: The engine's request.
            selection: Processors of the request.
            receipt: Receipt of the request, None if it wants none.
            chains: Chains of the model, whose vocabulary without a tokenizer has no texts.
            is_migratable: Chunks end where text does, so that another worker can go on after any.

        Raises:
            Overloaded: it is a local prefill too many.
        """
        assert self._slot is not None
        assert self.record is not None
        request, params = self.record.request, engine_request.params
        self.entry.seed, self.entry.params = params.seed, params
        hidden = engine_request.hidden_end_ids
        vocabulary, reasoning = chains.vocabulary, chains.reasoning_tokens(request.prompt_token_ids)
        binds_all = engine_request.chain is not None and engine_request.chain.observes_logits
        self._sampled_from = TokenWeights(binds_all=binds_all)
        weights = TokenWeights(binds_all=binds_all)
        prediction = engine_request.hints.prediction
        builder = ResponseBuilder(request, hidden, receipt, token_text(vocabulary), weights, reasoning, prediction)
        if isinstance(engine_request.kv, ReadKv):
            builder.num_cached_tokens = min(engine_request.kv.num_cached_tokens, builder.num_prompt_tokens)
        self.entry.builder = builder
        self._disaggregation.check_local_prefills(engine_request.kv)
        self._num_tokens = len(request.token_ids)
        self._in_flight.grow(self._slot, len(request.token_ids))
        self._disaggregation.admit(self._slot, engine_request.kv)
        self._selection, self._builder, self._chains = selection, builder, chains
        if vocabulary.tokenizer is not None:
            stops_here = not self._disaggregation.only_prefills
            self._stop_text, self._safe_chunks = text_filters(
                request, hidden, byte_index(vocabulary), stops_here=stops_here, is_migratable=is_migratable
            )

    async def aborted(self, finish_reason: FinishReason) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of a request that was aborted before the engine had it."""
        assert self.record is not None
        self._builder = ResponseBuilder(self.record.request, frozenset())
        yield TokenDelta(finish_reason=finish_reason)

    async def take(
        self, delta: TokenDelta, chains: ServedChainBuilder, receipts: KeepsReceipts | None = None
    ) -> list[TokenDelta]:
        """Take a delta of the engine, whose processors ``chains`` count, and whose receipt comes
        from ``receipts`` if the answer ends at a stop string.

        Returns:
            The parts to send now, with tokens that were held back before it, and a failure by
            itself.

        Raises:
            BoundaryStoreUnavailable: the request's record could not be written.
        """
        assert self.record is not None
        if delta.weights:
            self._sampled_from.take(delta.weights)
            self.record.sampled_from(self._sampled_from.digest)
        await self.record.wait_written()
        if self._stop_text is not None:
            self._stop_text.end(delta)
            self.is_complete = self._stop_text.found
        if delta.is_empty:
            return [delta]
        assert self._slot is not None
        self._num_tokens += len(delta.token_ids)
        if self.is_complete and delta.receipt is None and receipts is not None:
            await receipts.add_receipt(self.entry.request_id, delta, self._num_tokens - 1)
        self._receipt = delta.receipt or self._receipt
        if delta.finish_reason is not None:
            delta.receipt, self._receipt = self._receipt, None  # a deadline's last delta has none
            chains.count(delta)
        self.entry.queue_times = delta.queue_times or self.entry.queue_times
        self.entry.failure = delta.failure
        self._disaggregation.release(self._slot)
        self._in_flight.grow(self._slot, len(delta.token_ids))
        safe = delta if self._safe_chunks is None else self._safe_chunks.take(delta)
        return [] if safe is None else safe.parts()

    def chunk(self, delta: TokenDelta, *, shows_empty: bool) -> dict[str, Any] | None:
        """The chunk for one of those, None if it has nothing for the client yet.

        ``shows_empty`` makes chunks of empty deltas too.

        Raises:
            RequestFailed: the engine says that the request failed.
        """
        self.entry.finish_reason = delta.finish_reason
        if delta.is_empty:
            return {"token_ids": [], "index": delta.index} if shows_empty else None
        chunk = self._filled(delta)
        if chunk is not None and delta.finish_reason == "stop":
            self._add_stop_match(chunk, delta)
        if delta.finish_reason is not None:  # the runtime may drop the stream without coming back
            self._loop.call_later(SENT_S, self._settle_record)
        return chunk

    def _add_stop_match(self, chunk: dict[str, Any], delta: TokenDelta) -> None:
        """Add to the last chunk what ended the answer: a stop string or a token."""
        string = None if self._stop_text is None else self._stop_text.stopped_by
        if string is not None:
            chunk[STOP_STRING] = string
            add_match(chunk, string)
        elif delta.stop_reason is not None:
            chunk[STOP_TOKEN] = delta.stop_reason
            add_match(chunk, delta.stop_reason)

    def _filled(self, delta: TokenDelta) -> dict[str, Any] | None:
        assert self._builder is not None
        chunk = self._builder.chunk(delta)
        if chunk["token_ids"]:
            self._reports.tokens_sent(self.entry, len(chunk["token_ids"]))
        if delta.kv is not None:
            assert self.record is not None
            tokens = self.record.request.token_ids
            chunk["disaggregated_params"] = self._disaggregation.transfer_params(
                tokens, self._selection, delta, self.record.request.beside_model or None
            )
        if delta.finish_reason is not None:
            self._reports.metrics.count_outcome(delta.finish_reason)
        elif not chunk["token_ids"] and "engine_data" not in chunk:
            return None
        return chunk

    def checked(self) -> dict[str, Any]:
        """The only chunk of a request for which nothing is computed: no tokens and times count."""
        self._builder = None
        self.entry.finish_reason = "stop"
        self._reports.metrics.count_outcome("stop")
        return empty_chunk()

    def end(self) -> None:
        """The stream has ended without an error."""
        self._leave()
        self._settle_record()

    def drop(self) -> None:
        """The runtime drops the stream, in whichever thread the garbage collector runs."""
        if self.entry.finish_reason is None:
            self.entry.finish_reason = "cancelled"
            call_in(self._loop, self._reports.metrics.count_outcome, "cancelled")
        call_in(self._loop, self.end)

    async def fail(self, error: Exception) -> None:
        """The request ends with an error, before the engine had it or after."""
        if isinstance(error, InvalidRequest | Overloaded) and self.entry.first_token_s is None:
            # refused, by the engine perhaps: nothing was computed
            self._builder = self.entry.builder = self.entry.params = None
        self._leave()
        self._reports.failed(self.entry, error)
        if self.record is None:
            return
        if isinstance(error, Draining):
            await self.record.release()
        elif isinstance(error, EngineBroken):
            self.record.drop()
        else:
            self.record.settle()

    def _leave(self) -> None:
        """Release the slot, and count the tokens of a request that the engine had. Idempotent."""
        if self._slot is None:
            return
        self._in_flight.release(self._slot)
        self._disaggregation.release(self._slot)
        builder, self._builder = self._builder, None
        if builder is not None:
            self._reports.left_engine(self.entry, builder, answers=not self._disaggregation.only_prefills)
        receipt, self._receipt = self._receipt, None
        if receipt is not None and self._chains is not None:  # it has no last delta
            self._chains.metrics.count(receipt, None)

    def _settle_record(self) -> None:
        if self.record is None:
            return
        if self.entry.finish_reason == "cancelled":
            self.record.expire()
        else:
            self.record.settle()


def text_filters(
    request: GenerationRequest,
    hidden: frozenset[int],
    token_bytes: TokenBytes,
    *,
    stops_here: bool,
    is_migratable: bool,
) -> tuple[StopText | None, SafeChunks[TokenDelta] | None]:
    """Filters of an answer: its end at a stop string, and chunks that end where text does."""
    stops = [stop for stop in request.stop_strings if stop]
    stop_text = None
    if stops and stops_here:
        num_ignored = request.params.min_tokens or 0
        stop_text = StopText(token_bytes, stops, num_ignored, request.generated_token_ids, hidden)
    safe_chunks: SafeChunks[TokenDelta] | None = SafeChunks(token_bytes, stops) if is_migratable else None
    return stop_text, safe_chunks
