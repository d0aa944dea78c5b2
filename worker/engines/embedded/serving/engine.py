"""The asynchronous engine: requests go to the step thread, outputs come back as streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch

from worker.engines import (
    BATCH_SIZES,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    KvEventSink,
    KvPart,
    LoadSink,
    LocalPrefill,
    ReadKv,
    TokenDelta,
)
from worker.engines.daemon_threads import in_daemon_thread
from worker.engines.embedded.adapters import LoadedAdapters
from worker.engines.embedded.admission import admit
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.host import limit_threads
from worker.engines.embedded.kv_cache import choose_kv_blocks
from worker.engines.embedded.model import HfModel, check_first_pass, load_model
from worker.engines.embedded.model.numerics import shown_threads
from worker.engines.embedded.plan import Model, Request
from worker.engines.embedded.sampling import LogitsCollector
from worker.engines.embedded.serving.step_thread import Call, Count, Listen, Measure, StepThread, Stop, Submit
from worker.engines.embedded.serving.stream import Stream
from worker.engines.embedded.serving.streams import Streams
from worker.engines.embedded.serving.weights import WeightControl
from worker.engines.embedded.speculation import SpeculativeConfig, load_draft_model
from worker.engines.embedded.step import Stepper, make_stepper
from worker.engines.embedded.transfer import (
    KvConnector,
    KvHandle,
    fingerprint_beside,
    handle_from_json,
    note_mode,
    open_connector,
)
from worker.engines.forward_pass import ForwardPassSink
from worker.engines.lora_adapters import FLAG, AdapterRefused
from worker.engines.refusals import check_queue
from worker.engines.weights import NotSupported, UpdatesWeights, WeightVersion
from worker.errors import Draining, EngineBroken, InvalidRequest, ServingError, StartupError
from worker.models.sealed_tensors import SealedTensors
from worker.sampling import SamplingParams


def load(
    config: EmbeddedConfig, model: Model | None = None, ahead: SealedTensors | None = None
) -> tuple[Stepper, EngineInfo]:
    """The stepper of an engine, and the engine's description.

    Args:
        config: Settings, checked here.
        model: A model to use instead of the checkpoint in ``config.model_path``.
        ahead: See `load_model`.

    Raises:
        StartupError: with one clear line.
    """
    config.check()
    draft_path = SpeculativeConfig.parse(config.speculative_config).model  # before the model, which takes long to load
    draft_identity = None if draft_path is None else fingerprint_beside(draft_path, config.packed_copy)
    identity = None
    if config.role != "aggregated" or config.weight_updates:
        identity = fingerprint_beside(config.model_path, config.packed_copy)
    model = model or load_model(config, ahead)
    context_length = config.context_length or model.context_length
    if context_length > model.context_length:
        raise StartupError(
            f"--context-length {context_length} is above the model's own limit of {model.context_length} tokens"
        )
    draft = load_draft_model(config, model)
    num_kv_blocks = choose_kv_blocks(config, model, context_length, draft)
    stepper = make_stepper(config, model, num_kv_blocks, draft)  # with the KV store numerics are chosen
    if isinstance(model, HfModel):
        check_first_pass(model, config.model_path)
    stepper.adapters = _adapters(config, model)
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
        adapters={} if stepper.adapters is None else stepper.adapters.digests,
        draft_model="" if draft_identity is None else _identity_of_draft(stepper, draft_identity),
    )
    if config.weight_updates:
        assert identity is not None
        stepper.weights = WeightVersion(digest=_digest(identity))
    if identity is not None and config.role != "aggregated":
        if not isinstance(model, HfModel):
            raise StartupError(f"--disaggregation-mode {config.role}: {type(model).__name__} has no KV to transfer")
        stepper.connector = open_connector(
            model.kv_store, stepper.scheduler.transfers, config, identity.result(), model.made_by
        )
    return stepper, info


def _identity_of_draft(stepper: Stepper, digest: Future[str]) -> str:
    """`EngineInfo.draft_model`."""
    assert stepper.draft_model is not None
    model = stepper.draft_model.model
    return f"{_digest(digest)}, {model.made_by if isinstance(model, HfModel) else model.numerics}"


def _adapters(config: EmbeddedConfig, model: Model) -> LoadedAdapters | None:
    """The adapters of ``--lora-modules``, None where the model has no kernels for any."""
    try:
        if not isinstance(model, HfModel):
            raise NotSupported(f"{type(model).__name__} has no LoRA adapters")
        adapters = LoadedAdapters(model.adapter_loader(config.lora_dtype))
    except NotSupported as error:
        if config.lora_modules:
            raise StartupError(f"{FLAG}: {error}") from None
        return None
    for name, directory in config.lora_modules:
        try:
            adapters.load(name, Path(directory))
        except AdapterRefused as error:
            raise StartupError(f"{FLAG}: {name}: {error.problem}") from None
    return adapters


def _digest(identity: Future[str]) -> str:
    try:
        return identity.result()
    except StartupError:  # files that only the engine can read
        return ""


def _computed_by(model: Model) -> str:
    if not isinstance(model, HfModel):
        return f"{model.device.type}, {model.numerics}"
    dtype = str(model.dtype).removeprefix("torch.")
    threads = shown_threads(torch.get_num_threads())
    says_threads = model.device.type != "cpu" or threads in model.made_by
    device = model.device.type + (f" ({model.kernels})" if model.kernels != "torch" else "")
    return f"{device}, {dtype}, {model.made_by}" + ("" if says_threads else f", {threads}")


def load_for_serving(
    config: EmbeddedConfig, model: Model | None = None, ahead: SealedTensors | None = None
) -> tuple[Stepper, EngineInfo]:
    """`load` with as many threads as the container allows, which exact numerics depend on."""
    limit_threads(config.model_path, config.local_workers)
    return load(config, model, ahead)


Load = Callable[[EmbeddedConfig, Model | None], tuple[Stepper, EngineInfo]]


class EmbeddedEngine:
    """Implements `worker.engines.ServingEngine` in torch.

    Args:
        config: Settings.
        model: A model to use instead of the checkpoint in ``config.model_path``.
        load: Loads the model, in a thread.

    Attributes:
        weights: Changes the weights; None before `start`, and without
            `EmbeddedConfig.weight_updates`.
    """

    def __init__(self, config: EmbeddedConfig, model: Model | None = None, load: Load = load_for_serving) -> None:
        self.config = config
        self._injected_model = model
        self._load = load
        self._info: EngineInfo | None = None
        self._thread: StepThread | None = None
        self._connector: KvConnector | None = None
        self._stepper: Stepper | None = None  # the step thread's; only counts of it are read here
        self._loading: asyncio.Future[tuple[Stepper, EngineInfo]] | None = None
        self._is_told_to_stop = False
        self._streams = Streams()
        self._numbers = count()
        self.weights: UpdatesWeights | None = None

    async def start(self) -> EngineInfo:
        """Load the model and start the step thread.

        Raises:
            StartupError: with one clear line.
        """
        if self._info is not None:
            raise StartupError("the embedded engine was started twice")
        stepper, info = await self._load_in_thread()
        loop, streams = asyncio.get_running_loop(), self._streams

        def break_down(cause: str) -> None:
            streams.end_all(EngineBroken(cause))
            if self.weights is not None:
                self.weights.fail(EngineBroken(cause))

        thread = StepThread(stepper, streams.deliver, break_down, loop, self.config.step_timeout_s)
        self._thread = streams.thread = thread
        self._stepper = stepper
        self._connector = stepper.connector
        self._info = info
        if stepper.weights is not None and isinstance(stepper.model, HfModel):
            self.weights = WeightControl(stepper, stepper.model, streams, self.config, stepper.weights)
        thread.start()
        return info

    async def _load_in_thread(self) -> tuple[Stepper, EngineInfo]:
        """The stepper and its description; the thread that loads it holds up no process's end."""
        loading = in_daemon_thread("load", lambda: self._load(self.config, self._injected_model))
        self._loading = asyncio.wrap_future(loading)
        try:
            return await self._loading
        except asyncio.CancelledError:
            if self._is_told_to_stop:
                raise StartupError("told to stop while the model was loading") from None
            raise
        finally:
            self._loading = None

    def stop_loading(self) -> None:
        """See `worker.engines.StopsLoading`; nobody waits for the thread that loads."""
        if self._loading is not None:
            self._is_told_to_stop = True
            self._loading.cancel()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Decode one request; see `worker.engines.ServingEngine.generate`."""
        streams, thread, stepper, info = self._streams, self._thread, self._stepper, self._info
        try:
            streams.check(request.id)
            if thread is None or stepper is None or info is None:
                raise EngineBroken("the engine has not been started")
            number, context_length = next(self._numbers), info.context_length
            adapter = None if stepper.adapters is None else stepper.adapters.of(request)
            admitted = admit(request, number, stepper.model, context_length, adapter, draft_model=stepper.draft_model)
            handle = begin_transfer(admitted, request.kv, self.config.role, self._connector)
            stepper.check(admitted)
            is_first = streams.is_first_of(admitted.client)
            check_queue(len(streams), self.config.max_num_seqs, self.config.max_queue, is_first=is_first)
        except ServingError:
            if isinstance(request.kv, ReadKv):
                self.release_kv(request.kv, len(request.token_ids))
            raise
        stream = Stream(admitted, thread)
        streams.add(stream)
        scores = admitted.tap if isinstance(admitted.tap, LogitsCollector) else None
        thread.tell(Submit(admitted, handle))
        try:
            async for delta in stream:
                streams.caught_up(stream)
                if scores is not None and not delta.is_empty and not scores.wants_prompt:
                    delta.prompt_logprobs, scores = scores.prompt_logprobs, None
                yield delta
        finally:
            streams.release(stream)

    def abort(self, request_id: str) -> None:
        """Free the request's slot and KV before the next step; its stream ends as ``cancelled``."""
        self._streams.abort(request_id)

    def num_unfinished(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._streams)

    def num_leased(self) -> int:
        """Prompts whose KV is leased to decode workers."""
        return 0 if self._connector is None else self._connector.num_leased

    def report_blocks(self, sink: KvEventSink) -> None:
        """Tell `sink` of the blocks in the cache, and then of blocks cached and evicted."""
        assert self._thread is not None
        self._thread.tell(Listen(sink))

    def tell_load(self, callback: LoadSink) -> None:
        """See `worker.engines.ReportsLoad`; pages count as a whole."""
        assert self._thread is not None
        self._thread.tell(Count(callback))

    def report_forward_passes(self, sink: ForwardPassSink) -> None:
        """Tell `sink` of every step from now on."""
        assert self._thread is not None
        self._thread.tell(Measure(sink))

    def load(self) -> EngineLoad:
        """Queues, batches and drafted tokens; see `worker.engines.Measured`."""
        stepper = self._stepper
        if stepper is None:
            return EngineLoad(0, 0, 0, 0, [0] * (len(BATCH_SIZES) + 1), 0)
        queues, drafted = stepper.scheduler.queues, stepper.speculator.counts.copy()
        return EngineLoad(
            num_waiting=stepper.num_waiting,
            num_running=len(queues.prefilling) + len(queues.decoding),
            num_used_blocks=queues.cache.num_used_blocks,
            num_preemptions=queues.num_preemptions,
            steps_by_batch_size=tuple(stepper.steps_by_batch_size),
            num_rows=stepper.num_rows,
            drafted={name: (one.proposed, one.accepted) for name, one in drafted.items()},
        )

    def transfers(self) -> dict[str, float]:
        """KV transfers so far by outcome, and seconds that reads took."""
        if self._connector is None:
            return {}
        connector = self._connector
        return {**connector.counts, "seconds": connector.seconds}

    @property
    def serves_adapters(self) -> bool:
        """See `LoadsAdapters.serves_adapters`."""
        return self._stepper is not None and self._stepper.adapters is not None

    async def load_adapter(self, name: str, directory: Path) -> str:
        """See `LoadsAdapters.load_adapter`."""
        return await asyncio.to_thread(self._adapters.load, name, directory)

    async def unload_adapter(self, name: str) -> None:
        """See `LoadsAdapters.unload_adapter`."""
        self._adapters.unload(name)

    @property
    def _adapters(self) -> LoadedAdapters:
        if self._stepper is None:
            raise EngineBroken("the engine has not been started")
        if self._stepper.adapters is None:
            raise NotSupported("this model's kernels compute no LoRA adapters")
        return self._stepper.adapters

    def release_kv(self, kv: ReadKv, num_tokens: int) -> None:
        """See `ReleasesKv.release_kv`."""
        thread, connector = self._thread, self._connector
        if thread is not None and connector is not None:
            with suppress(InvalidRequest):  # one that is not for this worker
                handle = handle_from_json(kv.handle, connector.layout, num_tokens)
                done = asyncio.get_running_loop().create_future()
                thread.tell(Call(lambda stepper: connector.release(handle), done))

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        self._streams.keep_alive()

    def migrate_all(self) -> int:
        """End every unfinished request with `Draining`, and refuse new ones; returns how many."""
        return self._streams.end_all(Draining("the worker is shutting down"))

    async def stop(self) -> None:
        """Stop the step thread and drop the model. Idempotent."""
        self._streams.end_all(Draining("the engine was stopped"))
        thread, self._thread, self._stepper = self._thread, None, None
        self._streams.thread = None
        if self.weights is not None:
            self.weights.fail(Draining("the engine was stopped"))
        if thread is not None:
            thread.tell(Stop())
            await asyncio.to_thread(thread.join)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def begin_transfer(request: Request, kv: KvPart | None, role: str, connector: KvConnector | None) -> KvHandle | None:
    """Make a request this worker's part of a KV transfer; returns the handle of its KV, if any."""
    if kv is None or isinstance(kv, LocalPrefill):
        if role == "decode":
            note_mode(request, "local prefill")
        return None
    assert connector is not None, f"an {role} engine transfers no KV"
    if isinstance(kv, ReadKv):
        return handle_from_json(kv.handle, connector.layout, len(request.tokens))
    request.keeps_kv = True
    request.params, request.chain, request.tap, request.end_ids = SamplingParams(), None, None, frozenset()
    request.companion = None
    request.prompt_length = len(request.tokens)  # the answer so far of a migrated request, too
    request.limit = request.prompt_length + 1
    return None
