"""The asynchronous engine: requests go to the step thread, outputs come back as streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import count

import torch

from worker.engines import (
    BATCH_SIZES,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    KvEventSink,
    KvPart,
    LocalPrefill,
    ReadKv,
    TokenDelta,
)
from worker.engines.embedded.admission import admit
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.host import limit_threads
from worker.engines.embedded.kv_cache import choose_kv_blocks
from worker.engines.embedded.model import HfModel, check_first_pass, load_model
from worker.engines.embedded.model.numerics import shown_threads
from worker.engines.embedded.plan import Model, Output, Request
from worker.engines.embedded.serving.step_thread import MIN_AHEAD, RUN_AHEAD, Abort, Listen, StepThread, Stop, Submit
from worker.engines.embedded.serving.stream import Stream
from worker.engines.embedded.speculation import SpeculativeConfig
from worker.engines.embedded.step import Stepper, make_stepper
from worker.engines.embedded.transfer import (
    KvConnector,
    KvHandle,
    fingerprint_beside,
    handle_from_json,
    note_mode,
    open_connector,
)
from worker.engines.refusals import check_queue
from worker.errors import Draining, EngineBroken, InvalidRequest, ServingError, StartupError
from worker.sampling import SamplingParams


def load(config: EmbeddedConfig, model: Model | None = None) -> tuple[Stepper, EngineInfo]:
    """The stepper of an engine, and what the engine tells of itself.

    Args:
        config: Settings, checked here.
        model: A model to use instead of the checkpoint in ``config.model_path``.

    Raises:
        StartupError: with one clear line.
    """
    config.check()
    SpeculativeConfig.parse(config.speculative_config)  # before the model, which takes long to load
    identity = None
    if config.role != "aggregated":
        identity = fingerprint_beside(config.model_path, config.packed_copy)
    model = model or load_model(config)
    context_length = config.context_length or model.context_length
    if context_length > model.context_length:
        raise StartupError(
            f"--context-length {context_length} is above the model's own limit of {model.context_length} tokens"
        )
    num_kv_blocks = choose_kv_blocks(config, model, context_length)
    stepper = make_stepper(config, model, num_kv_blocks)  # with the KV store numerics are chosen
    if isinstance(model, HfModel):
        check_first_pass(model, config.model_path)
    info = EngineInfo(
        name="embedded",
        version=torch.__version__,
        context_length=context_length,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        kv_block_size=config.kv_block_size,
        total_kv_blocks=num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        numerics=model.numerics,
        computed_by=_computed_by(model),
        made_by=model.made_by if isinstance(model, HfModel) else model.numerics,
        kv_dtype=model.kv_store.dtype_name if isinstance(model, HfModel) else "",
    )
    if identity is not None:
        if not isinstance(model, HfModel):
            raise StartupError(f"--disaggregation-mode {config.role}: {type(model).__name__} has no KV to transfer")
        stepper.connector = open_connector(model.kv_store, stepper.scheduler, config, identity.result(), model.made_by)
    return stepper, info


def _computed_by(model: Model) -> str:
    if not isinstance(model, HfModel):
        return f"{model.device.type}, {model.numerics}"
    dtype = str(model.dtype).removeprefix("torch.")
    threads = shown_threads(torch.get_num_threads())
    says_threads = model.device.type != "cpu" or threads in model.made_by
    device = model.device.type + (f" ({model.kernels})" if model.kernels != "torch" else "")
    return f"{device}, {dtype}, {model.made_by}" + ("" if says_threads else f", {threads}")


class EmbeddedEngine:
    """Implements `worker.engines.ServingEngine` in torch.

    Args:
        config: Settings.
        model: A model to use instead of the checkpoint in ``config.model_path``.
    """

    def __init__(self, config: EmbeddedConfig, model: Model | None = None) -> None:
        self.config = config
        self._injected_model = model
        self._model: Model | None = None
        self._info: EngineInfo | None = None
        self._thread: StepThread | None = None
        self._connector: KvConnector | None = None
        self._stepper: Stepper | None = None  # the step thread's; only counts of it are read here
        self._streams: dict[str, Stream] = {}
        self._behind: set[Stream] = set()  # those whose consumers are behind
        self._numbers = count()
        self._refusal: ServingError | None = None

    def __repr__(self) -> str:
        state = "not started" if self._info is None else repr(self._refusal) if self._refusal else "serving"
        return f"EmbeddedEngine({state}, {len(self._streams)} unfinished)"

    async def start(self) -> EngineInfo:
        """Load the model and start the step thread.

        Raises:
            StartupError: with one clear line.
        """
        if self._info is not None:
            raise StartupError("the embedded engine was started twice")
        stepper, info = await asyncio.to_thread(self._load)
        loop = asyncio.get_running_loop()
        self._thread = StepThread(stepper, self._deliver, self._break, loop, self.config.step_timeout_s)
        self._stepper = stepper
        self._model = stepper.model
        self._connector = stepper.connector
        self._info = info
        self._thread.start()
        return info

    def _load(self) -> tuple[Stepper, EngineInfo]:
        # before the model: which numerics are exact depends on it
        limit_threads(self.config.model_path, self.config.local_workers)
        return load(self.config, self._injected_model)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Decode one request; see `worker.engines.ServingEngine.generate`."""
        stream = self._admit(request)
        try:
            while True:
                delta = await stream.take()
                self._catch_up(stream)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._catch_up(stream)
            if self._streams.get(request.id) is stream:
                self.abort(request.id)

    def abort(self, request_id: str) -> None:
        """Free the request's slot and KV before the next step; its stream ends as ``cancelled``."""
        if request_id in self._streams and self._thread is not None:
            self._thread.tell(Abort(request_id))

    def num_unfinished(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._streams)

    def num_leased(self) -> int:
        """Prompts whose KV is leased to decode workers."""
        return 0 if self._connector is None else self._connector.num_leased

    def report_blocks(self, sink: KvEventSink) -> None:
        """Tell `sink` of the blocks in the cache, and from now on of what becomes of them."""
        assert self._thread is not None
        self._thread.tell(Listen(sink))

    def load(self) -> EngineLoad:
        """Its queues and batches now; see `worker.engines.Measured`."""
        stepper = self._stepper
        if stepper is None:
            return EngineLoad(0, 0, 0, 0, [0] * (len(BATCH_SIZES) + 1), 0)
        queues = stepper.scheduler
        return EngineLoad(
            num_waiting=len(queues.waiting),
            num_running=len(queues.prefilling) + len(queues.decoding),
            num_used_blocks=queues.num_used_blocks,
            num_preemptions=queues.num_preemptions,
            steps_by_batch_size=tuple(stepper.steps_by_batch_size),
            num_rows=stepper.num_rows,
        )

    def transfers(self) -> dict[str, float]:
        """KV transfers so far by outcome, and seconds that reads took."""
        if self._connector is None:
            return {}
        connector = self._connector
        return {**connector.counts, "seconds": connector.seconds}

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        for stream in self._streams.values():
            stream.keep_alive()

    def speculation(self) -> dict[str, tuple[int, int]]:
        """Drafted tokens so far by proposer: those computed, and those of them accepted."""
        counts = {} if self._stepper is None else self._stepper.speculator.counts.copy()
        return {name: (one.proposed, one.accepted) for name, one in counts.items()}

    def migrate_all(self) -> int:
        """End every unfinished request with `Draining`, and refuse new ones; returns how many."""
        return self._end_all(Draining("the worker is shutting down"))

    async def stop(self) -> None:
        """Stop the step thread and drop the model. Idempotent."""
        self._end_all(Draining("the engine was stopped"))
        thread, self._thread, self._model, self._stepper = self._thread, None, None, None
        if thread is not None:
            thread.tell(Stop())
            await asyncio.to_thread(thread.join)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _admit(self, asked: EngineRequest) -> Stream:
        if self._refusal is not None:
            raise self._refusal
        if self._thread is None or self._model is None or self._info is None:
            raise EngineBroken("the engine has not been started")
        if asked.id in self._streams:
            raise InvalidRequest("request_id", f"{asked.id!r} is in use by an unfinished request")
        request = admit(asked, next(self._numbers), self._model, self._info.context_length)
        handle = self._part(request, asked.kv)
        is_first = request.client is not None and all(one.client != request.client for one in self._streams.values())
        check_queue(len(self._streams), self.config.max_num_seqs, self.config.max_queue, is_first=is_first)
        stream = self._streams[request.id] = Stream(request)
        self._thread.tell(Submit(request, handle))
        return stream

    def _part(self, request: Request, kv: KvPart | None) -> KvHandle | None:
        """Turn `request` into this worker's part of it; returns the handle of its KV, if any."""
        if kv is None or isinstance(kv, LocalPrefill):
            if self.config.role == "decode":
                note_mode(request, "local prefill")
            return None
        assert self._connector is not None, f"an {self.config.role} engine transfers no KV"
        if isinstance(kv, ReadKv):
            return handle_from_json(kv.handle, self._connector.layout, len(request.tokens))
        request.keeps_kv = True
        request.params, request.chain, request.tap, request.end_ids = SamplingParams(), None, None, frozenset()
        request.prompt_length = len(request.tokens)  # the answer so far of a migrated request, too
        request.limit = request.prompt_length + 1
        return None

    def _deliver(self, outputs: list[Output]) -> None:
        limit = max(MIN_AHEAD, RUN_AHEAD // max(1, len(self._streams)))
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # ended by migrate_all or stop
            stream.push(output)
            if stream.finished:
                del self._streams[output.request_id]
                self._behind.discard(stream)
            elif stream.num_pending >= limit:
                self._behind.add(stream)
        self._pace()

    def _catch_up(self, stream: Stream) -> None:
        if stream in self._behind:
            self._behind.remove(stream)
            self._pace()

    def _pace(self) -> None:
        """Pause decoding while most consumers are behind; a few slow ones do not slow the rest."""
        if self._thread is not None:
            self._thread.hold(2 * len(self._behind) > len(self._streams))

    def _break(self, cause: str) -> None:
        self._end_all(EngineBroken(cause))

    def _end_all(self, failure: ServingError) -> int:
        """Fail every stream and refuse new requests, for the first reason ever given."""
        self._refusal = self._refusal or failure
        streams, self._streams = self._streams, {}
        self._behind.clear()
        for stream in streams.values():
            stream.fail(failure)
            if self._thread is not None:
                self._thread.tell(Abort(stream.request_id))
        return len(streams)
