"""The async edge: requests go to the step thread, outputs come back as streams."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

import torch

from worker.engines import EngineInfo, KeepKv, KvEventSink, ReadKv, TokenDelta
from worker.engines.embedded.admission import admit
from worker.engines.embedded.blocks import ROOT, BlocksRemoved, BlocksStored
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.exchange import Exchange, open_exchange
from worker.engines.embedded.handoff import fingerprint, handle_from_json
from worker.engines.embedded.memory import choose_kv_blocks, is_out_of_memory
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.plan import Model, Output, Request
from worker.engines.embedded.step import Stepper, make_stepper
from worker.engines.embedded.stream import Stream
from worker.engines.embedded.transfer import KvHandle
from worker.engines.embedded.watchdog import Watchdog
from worker.errors import Draining, EngineBroken, InvalidRequest, Overloaded, ServingError, StartupError
from worker.sampling import SamplingParams

logger = logging.getLogger(__name__)


RUN_AHEAD = 32
"""Steps that may wait for the event loop. A model faster than the loop would otherwise take the processor from it."""

MAX_PAUSE_S = 0.01
"""Longest that the step thread holds back for the loop, so that a loop that hangs slows decoding but never stops it."""

GATHER_S = 0.001
"""How long decoding waits after a request came in for the next one, whose prompt is computed at once. So requests that
come together start together, and their first tokens do not queue behind the many tokens of a fast model."""

MAX_GATHER_S = 0.02
"""Longest that decoding waits while requests keep coming."""


@dataclass(frozen=True, slots=True)
class Submit:
    """To the step thread: a new request, and where its prompt's KV is, if another worker holds it."""

    request: Request
    kv: KvHandle | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """To the step thread: free what a request holds."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """To the step thread: leave."""


class StepThread:
    """Runs a `Stepper` in its own thread, and hands all outputs of a step over in one go.

    Args:
        stepper: Used by this thread alone from now on.
        deliver: Called on `loop` with outputs, oldest first.
        died: Called on `loop` with a text, if the thread ends without having been told to.
        loop: The event loop of the callers.
        step_timeout_s: Seconds after which a step counts as hung.
    """

    def __init__(
        self,
        stepper: Stepper,
        deliver: Callable[[list[Output]], None],
        died: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        step_timeout_s: float,
    ) -> None:
        self._watchdog = Watchdog(step_timeout_s)
        self._stepper = stepper
        self._deliver = deliver
        self._died = died
        self._loop = loop
        self._inbox: SimpleQueue[Submit | Abort | Stop] = SimpleQueue()
        self._outbox: list[Output] = []
        self._outbox_lock = threading.Lock()
        self._num_ahead = 0  # steps published since the loop last collected
        self._may_run = threading.Event()
        self._may_run.set()
        self._last_arrival_s = -math.inf
        self._gathering_since_s = -math.inf
        self._sink: KvEventSink | None = None
        self._thread = threading.Thread(target=self._run, name="embedded-step", daemon=True)

    def report_blocks(self, sink: KvEventSink) -> None:
        """Tell `sink` of the cache's blocks, from the next step on, with what was recorded until then."""
        self._sink = sink

    def start(self) -> None:
        """Start the thread."""
        self._watchdog.start()
        self._thread.start()

    def tell(self, message: Submit | Abort | Stop) -> None:
        """Leave a message, read between steps."""
        self._inbox.put(message)

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()
        self._watchdog.stop()

    def _run(self) -> None:
        try:
            while self._read_messages():
                self._may_run.wait(MAX_PAUSE_S)
                self._publish(self._watchdog.watch(partial(self._stepper.step, self._is_gathering())))
                if self._sink is not None:
                    report(self._stepper.scheduler.cache.drain_events(), self._sink)
            self._stepper.close()
        except BaseException as error:  # the thread's outermost frame: whatever it was, the engine is broken
            logger.exception("the step thread died")
            reason = "out of memory, as " if is_out_of_memory(error) else ""
            self._call_soon(self._died, f"the step thread died of {reason}{type(error).__name__}: {error}")

    def _read_messages(self) -> bool:
        """Act on all messages, waiting for one while there is nothing else to do; False to leave."""
        while (message := self._next_message()) is not None:
            match message:
                case Submit(request, kv):
                    self._stepper.add(request, kv)
                    self._note_arrival()
                case Abort(request_id):
                    cancelled = self._stepper.abort(request_id)
                    if cancelled is not None:
                        self._publish([cancelled])
                case Stop():
                    return False
        return True

    def _next_message(self) -> Submit | Abort | Stop | None:
        """The next message; None if there is none, and it is time for a step."""
        wait_s = self._wait_s()
        if wait_s == 0 and self._inbox.empty():
            return None
        try:
            return self._inbox.get(timeout=wait_s)
        except Empty:
            return None

    def _wait_s(self) -> float | None:
        """How long to wait for a message before the next step; None if there is nothing to compute."""
        wait_s = self._stepper.wait_s
        if wait_s == 0 and self._is_gathering() and not self._stepper.scheduler.has_prompts:
            return max(0.0, self._last_arrival_s + GATHER_S - time.monotonic())
        return wait_s

    def _note_arrival(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_arrival_s > GATHER_S:
            self._gathering_since_s = now_s
        self._last_arrival_s = now_s

    def _is_gathering(self) -> bool:
        """Whether requests are coming in one after the other."""
        now_s = time.monotonic()
        return now_s - self._last_arrival_s < GATHER_S and now_s - self._gathering_since_s < MAX_GATHER_S

    def _publish(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        # while the loop is behind, outputs collect here and it is not woken again
        with self._outbox_lock:
            waiting = bool(self._outbox)
            self._outbox += outputs
            self._num_ahead += 1
            if self._num_ahead >= RUN_AHEAD:
                self._may_run.clear()
        if not waiting:
            self._call_soon(self._collect)

    def _collect(self) -> None:
        with self._outbox_lock:
            outputs, self._outbox = self._outbox, []
            self._num_ahead = 0
            self._may_run.set()
        self._deliver(outputs)

    def _call_soon(self, callback: Callable[..., None], *arguments: str) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # closed: nobody is left to tell
                raise


def report(events: Sequence[BlocksStored | BlocksRemoved], sink: KvEventSink) -> None:
    """Tell `sink` what has become of blocks, oldest first."""
    for event in events:
        if isinstance(event, BlocksStored):
            parent = None if event.parent_hash == ROOT else event.parent_hash
            sink.stored(parent, event.block_hashes, event.token_ids)
        else:
            sink.removed(event.block_hashes)


def load(config: EmbeddedConfig, model: Model | None = None) -> tuple[Stepper, EngineInfo]:
    """The stepper of an engine, and what the engine tells of itself.

    Args:
        config: Settings, checked here.
        model: A model to use instead of the checkpoint in ``config.model_path``.

    Raises:
        StartupError: with one clear line.
    """
    config.check()
    model = model or load_model(config)
    context_length = config.context_length or model.context_length
    if context_length > model.context_length:
        raise StartupError(
            f"--context-length {context_length} is above the model's own limit of {model.context_length} tokens"
        )
    num_kv_blocks = choose_kv_blocks(config, model, context_length)
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
    )
    stepper = make_stepper(config, model, num_kv_blocks)
    if config.kv_events:
        stepper.scheduler.cache.record_events()
    if config.role != "aggregated":
        if not isinstance(model, HfModel):
            raise StartupError(f"--disaggregation-mode {config.role}: {type(model).__name__} has no KV to hand over")
        identity = fingerprint(config.model_path)
        stepper.exchange = open_exchange(model.kv_tensors(), stepper.scheduler, config, identity)
    return stepper, info


class EmbeddedEngine:
    """Implements `worker.engines.Engine` in torch.

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
        self._exchange: Exchange | None = None
        self._streams: dict[str, Stream] = {}
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
        stepper, info = await asyncio.to_thread(load, self.config, self._injected_model)
        loop = asyncio.get_running_loop()
        self._thread = StepThread(stepper, self._deliver, self._break, loop, self.config.step_timeout_s)
        self._model = stepper.model
        self._exchange = stepper.exchange
        self._info = info
        self._thread.start()
        return info

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        kv: KeepKv | ReadKv | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Decode one request; see `worker.engines.Engine.generate`."""
        stream = self._admit(request_id, prompt_token_ids, sampling_params, kv, cache_salt)
        try:
            while True:
                delta = await stream.take()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if self._streams.get(request_id) is stream:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Free the request's slot and KV before the next step; its stream ends as ``cancelled``."""
        if request_id in self._streams and self._thread is not None:
            self._thread.tell(Abort(request_id))

    def num_unfinished(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._streams)

    def num_held(self) -> int:
        """Prompts whose KV is held for other workers."""
        return 0 if self._exchange is None else self._exchange.num_held

    def report_blocks(self, sink: KvEventSink) -> None:
        """Tell `sink` of the blocks in the cache; ``config.kv_events`` must be set."""
        assert self.config.kv_events and self._thread is not None
        self._thread.report_blocks(sink)

    def transfers(self) -> dict[str, float]:
        """Hand-offs so far by what became of them, the seconds that reads took, and the blocks in use now."""
        if self._exchange is None:
            return {}
        exchange = self._exchange
        return {**exchange.counts, "seconds": exchange.seconds, "used_blocks": exchange.num_used_blocks}

    def hand_off(self) -> int:
        """End every unfinished request with `Draining`, and refuse new ones; returns how many were ended."""
        return self._end_all(Draining("the worker is shutting down"))

    async def stop(self) -> None:
        """Stop the step thread and drop the model. Idempotent."""
        self._end_all(Draining("the engine was stopped"))
        thread, self._thread, self._model = self._thread, None, None
        if thread is not None:
            thread.tell(Stop())
            await asyncio.to_thread(thread.join)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _admit(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        kv: KeepKv | ReadKv | None,
        cache_salt: str | None,
    ) -> Stream:
        if self._refusal is not None:
            raise self._refusal
        if self._thread is None or self._model is None or self._info is None:
            raise EngineBroken("the engine has not been started")
        if request_id in self._streams:
            raise InvalidRequest("request_id", f"{request_id!r} is in use by an unfinished request")
        request = admit(request_id, next(self._numbers), prompt, params, self._model, self._info.context_length)
        request.cache_salt = cache_salt
        handle = self._part(request, kv)
        places = self.config.max_num_seqs + self.config.max_queue
        if len(self._streams) >= places:
            raise Overloaded(f"all {places} places are taken; retry later or elsewhere")
        stream = self._streams[request_id] = Stream(request_id)
        self._thread.tell(Submit(request, handle))
        return stream

    def _part(self, request: Request, kv: KeepKv | ReadKv | None) -> KvHandle | None:
        """Make `request` this worker's part of what was asked; where its prompt's KV is, if elsewhere."""
        if kv is None:
            return None
        assert self._exchange is not None, f"an {self.config.role} engine exchanges no KV"
        if isinstance(kv, ReadKv):
            return handle_from_json(kv.handle, self._exchange.layout, request.prompt_length)
        request.keeps_kv = True
        request.params, request.chain, request.end_ids = SamplingParams(), None, frozenset()
        request.limit = request.prompt_length + 1
        return None

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # ended by hand_off or stop
            stream.push(output)
            if stream.finished:
                del self._streams[output.request_id]

    def _break(self, cause: str) -> None:
        self._end_all(EngineBroken(cause))

    def _end_all(self, failure: ServingError) -> int:
        """Fail every stream and refuse new requests, for the first reason ever given."""
        self._refusal = self._refusal or failure
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(failure)
            if self._thread is not None:
                self._thread.tell(Abort(stream.request_id))
        return len(streams)
