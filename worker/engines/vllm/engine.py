"""`VllmEngine`: drives vLLM's ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from asyncio import wrap_future
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any

from prometheus_client import REGISTRY, Metric

from adapters.vllm.model import ModelFacts
from adapters.vllm.requests import REPORT
from worker.engines import EngineInfo, EngineLoad, EngineRequest, KeepKv, KvEventSink, TokenDelta
from worker.engines.daemon_threads import in_daemon_thread
from worker.engines.library_engine import LibraryEngine
from worker.engines.refusals import check_prompt, check_queue
from worker.engines.request_table import RequestTable
from worker.engines.vllm.control_probes import find_native
from worker.engines.vllm.core_reports import CoreReports
from worker.engines.vllm.deltas import Reader
from worker.engines.vllm.description import describe
from worker.engines.vllm.grammar_waits import GrammarWaits
from worker.engines.vllm.images import Images, check_room, processor_refusal
from worker.engines.vllm.kv_connector import transfer_config
from worker.engines.vllm.kv_events import KvEvents
from worker.engines.vllm.kv_transfer import KEEP, PARAMS, KvTransfers
from worker.engines.vllm.loading import Loading, stop_reading
from worker.engines.vllm.loads import LoadReports
from worker.engines.vllm.lora import load_adapters
from worker.engines.vllm.package import Package, read_package
from worker.engines.vllm.params import SHIPPED, NativeRequest, Served, Shipped, native_request, of_prompt, shipped
from worker.engines.vllm.probes import check_processors
from worker.engines.vllm.requests import RunningRequest
from worker.engines.vllm.settings import VllmConfig
from worker.engines.vllm.weights import VllmWeights
from worker.errors import (
    KV_TRANSFER_FIELD,
    Draining,
    EngineBroken,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    ServingError,
    StartupError,
    one_line,
)
from worker.parent_watch import name_worker

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Pause between looks at whether vLLM's processes live, seconds."""

METRICS = "vllm:"
"""Prefix of vLLM's metrics in Prometheus's own registry of the process."""

PRIORITIES = 1024
"""Steps of vLLM's priorities, which are integers, per 1 of a request's."""


class VllmEngine(LibraryEngine[RunningRequest]):
    """Implements `worker.engines.ServingEngine` on vLLM.

    Args:
        config: Settings.
        read: Imports the library.
        digest: Begins to compute the digest of the checkpoint, for KV transfers and updates.

    Attributes:
        weights: Changes the weights; None before `start`, or without `VllmConfig.weight_updates`.
    """

    library = "vLLM"

    def __init__(
        self,
        config: VllmConfig,
        read: Callable[[], Package] = read_package,
        digest: Callable[[], Future[str]] | None = None,
    ) -> None:
        super().__init__(RequestTable())
        self.config = config
        self._read_package = read
        self._digest = digest
        self._loading = Loading()
        self._transfers: KvTransfers | None = None
        self._package: Package | None = None
        self._served: Served | None = None
        self._reports: CoreReports | None = None
        self._grammars: GrammarWaits | None = None
        self._loads = LoadReports()
        self._adapters: dict[str, Any] = {}
        self._images: Images | None = None
        self._events: KvEvents | None = None
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._heard_s = 0.0  # the event loop's time of the newest output, or of the first request after a pause
        self._drops: set[asyncio.Task[None]] = set()
        self.weights: VllmWeights | None = None

    # Start and stop

    async def start(self) -> EngineInfo:
        """Load the model, and try whether logits processors work in it.

        Raises:
            StartupError: in one line.
        """
        if self._info is not None:
            raise StartupError("the vLLM engine was started twice")
        return await self._loading.run(self._start())

    async def _start(self) -> EngineInfo:
        package = self._package = await wrap_future(in_daemon_thread("vllm-import", self._read_package))
        name_worker()
        if self.config.has_events:
            self._events = KvEvents()
        arguments = self.config.engine_arguments(package.engine_fields, package.version, is_cpu=package.is_cpu)
        if self._events is not None:
            arguments["kv_events_config"] = self._events.config
        digest, transfers = None, self.config.role != "aggregated"
        if transfers:
            arguments["kv_transfer_config"] = transfer_config(package, self.config, os.environ)
        if transfers or self.config.weight_updates:
            assert self._digest is not None, "it says which model it has"
            digest = self._digest()
        try:
            loading = in_daemon_thread("vllm-load", lambda: package.load(arguments, self._loads))
            self._llm = await wrap_future(loading)
        except Exception as error:  # the start-up boundary
            raise StartupError(f"vLLM {package.version}: {one_line(error)}") from error
        facts = ModelFacts.of(self._llm.vllm_config)
        ends = tuple(sorted(facts.eos_token_ids))
        parallel, tokenizer_end = self.config.tensor_parallel_size > 1, self._llm.tokenizer.eos_token_id
        self._served = Served(facts.vocab_size, ends, tokenizer_end, is_parallel=parallel)
        scheduler = self._llm.vllm_config.scheduler_config
        self._reports = CoreReports(self._llm, scheduler.max_num_seqs + self.config.max_queue)
        self._grammars = GrammarWaits(self._llm)
        self._adapters = await load_adapters(self._llm, package, self.config.adapters)
        digests = {adapter.name: adapter.digest for adapter in self.config.adapters}
        if self.config.images is not None:
            self._images = Images(self.config.images, self._llm.vllm_config.model_config, package.version)
        images = self._images is not None
        self._info = describe(self._llm.vllm_config, package.version, facts.vocab_size, ends, digests, images)
        if digest is not None and transfers:
            self._transfers = await KvTransfers.of(self._llm, self.config, package.version, digest, self._loads)
        self._loop = asyncio.get_running_loop()
        self._watch = asyncio.create_task(self._watch_processes())
        await check_processors(self.generate, self._info)
        self._served = replace(self._served, native=await find_native(self._llm, package, self._info))
        if digest is not None and self.config.weight_updates:
            self.weights = VllmWeights(self._llm, self.config, self._requests, await wrap_future(digest), self._break)
        return self._info

    async def stop(self) -> None:
        """End vLLM's processes. Idempotent, and safe after a failed or missing `start`."""
        stopped = Draining("the engine was stopped")
        self._requests.end_all(stopped)
        self._fail_calls(stopped)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        self.stop_loading()
        await stop_reading(self._llm)
        await self._shut_down()
        if self._events is not None:
            await self._events.close()

    def stop_loading(self) -> None:
        """End a `start` under way: vLLM's processes are killed, and `start` raises."""
        self._loading.stop()

    # Requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Decode one request; see `worker.engines.ServingEngine.generate`."""
        running = self._submit(request)
        try:
            async for delta in running:
                yield delta
        finally:
            self._requests.release(running)

    def _submit(self, request: EngineRequest) -> RunningRequest:
        self._requests.check(request.id)
        if self._info is None or self._served is None:
            raise EngineBroken("the engine has not been started")
        check_prompt(request.token_ids, self._info.vocab_size, self._info.context_length)
        native = native_request(request, self._served)
        running = RunningRequest(request.id)
        if self._transfers is not None:
            self._transfers.take_part(running, request, self._adapter_digest(request))
        elif request.kv is not None:
            raise InvalidRequest(KV_TRANSFER_FIELD, "this is an aggregated worker")
        if running.pulls is None:  # else its KV waits at a prefill worker
            check_queue(len(self._requests), self._info.max_num_seqs, self.config.max_queue)
        if not self._awaits_outputs():
            self._heard_s = asyncio.get_running_loop().time()
        self._requests.add(running)
        running.task = asyncio.create_task(self._run(running, request, native))
        return running

    def _awaits_outputs(self) -> bool:
        """Whether a request has not ended in vLLM; of one that has, a consumer may be behind."""
        return any(each.task is not None and not each.task.done() for each in self._requests.unfinished)

    def _adapter_digest(self, request: EngineRequest) -> str | None:
        assert self._info is not None
        return None if request.lora_name is None else self._info.adapters[request.lora_name]

    async def _run(self, running: RunningRequest, request: EngineRequest, native: NativeRequest) -> None:
        """Give a request to vLLM, and put its outputs into the stream until it ends."""
        assert self._package is not None
        try:
            if self.weights is not None:
                await self.weights.admit(running)
            if isinstance(request.kv, KeepKv):
                await self._compute_prompt(running, request, native)
            else:
                while not await self._follow(running, request, native):
                    assert self._transfers is not None
                    self._transfers.note_lost(running)
        except asyncio.CancelledError:
            if self._transfers is not None:
                self._transfers.note_cancelled(running)
            self._drop_report(running)
            raise
        except InvalidRequest as error:
            self._drop_report(running)
            running.fail(error)
        except self._package.dead_error as error:
            self._break(f"vLLM's engine died: {one_line(error)}")
        except self._package.busy_errors as error:
            running.fail(Overloaded(f"vLLM: {one_line(error)}"))
        except self._package.client_errors as error:
            running.fail(InvalidRequest("request", one_line(error)))
        except Exception as error:  # the engine's boundary
            refused = processor_refusal(error) if request.images else None
            if refused is None:
                logger.exception("request %s", request.id)
            told = error if str(error) or error.__cause__ is None else error.__cause__  # vLLM's own says nothing
            running.fail(refused or RequestFailed(f"vLLM: {type(told).__name__}: {one_line(told)}"))

    async def _compute_prompt(self, running: RunningRequest, request: EngineRequest, native: NativeRequest) -> None:
        """Let vLLM compute a prompt and keep its KV; the token that it samples is dropped."""
        assert self._served is not None
        assert self._transfers is not None
        name = f"{request.id}-{next(self._numbers)}"
        shipped(native, name, self._served.eos_token_ids)  # refuses here what the decode worker would refuse
        async with contextlib.aclosing(self._outputs(request, name, of_prompt(), {PARAMS: dict(KEEP)})) as outputs:
            async for output in outputs:
                self._heard_s = asyncio.get_running_loop().time()
                if output.finished:
                    handle = self._transfers.hand_off(output, self._adapter_digest(request))
                    cached = int(output.num_cached_tokens or 0)
                    running.put(TokenDelta(finish_reason="length", num_cached_tokens=cached, kv=handle))
        running.put(TokenDelta(finish_reason="error", error="vLLM ended the request without a reason"))

    async def _follow(self, running: RunningRequest, request: EngineRequest, native: NativeRequest) -> bool:
        """Put vLLM's outputs into the stream; False if the KV that it waited for did not come."""
        assert self._served is not None
        assert self._info is not None
        params, name = request.params, f"{request.id}-{next(self._numbers)}"
        carried = shipped(native, name, self._served.eos_token_ids)
        running.report = None if carried is None else name
        running.chain = native.chain
        extra: dict[str, Any] = {} if carried is None else {SHIPPED: tuple(carried), REPORT: name}
        if running.pulls is not None:
            extra[PARAMS] = dict(running.pulls)
        if native.chain is not None and self._grammars is not None:
            await self._grammars.wait(native.chain)
            self._heard_s = asyncio.get_running_loop().time()
        images = [] if self._images is None else await self._images.load(request.images)
        reader = Reader(
            list(request.prompt_token_ids), params.include_stop_str_in_output, params.logprobs, params.prompt_logprobs
        )
        async with contextlib.aclosing(self._outputs(request, name, native.fields, extra, images)) as outputs:
            async for output in outputs:
                self._heard_s = asyncio.get_running_loop().time()
                if running.pulls is not None and self._transfers is not None:
                    if output.outputs[0].finish_reason == "error":
                        return False
                    self._transfers.note_received(running)
                delta = reader.read(output)
                running.name_weights(delta, self.weights, len(request.generated_token_ids))
                if images:
                    delta.num_prompt_tokens = len(output.prompt_token_ids) - len(request.generated_token_ids)
                    running.num_added = len(output.prompt_token_ids) - len(request.token_ids)
                    check_room(native.chain, params.max_tokens, delta.num_prompt_tokens, self._info.context_length)
                if carried is not None:
                    end = len(request.token_ids) + running.num_added + reader.num_sent
                    await self._confirm(running, delta, output.outputs[0].token_ids, end, carried)
                running.put(delta)
                if running.done and not output.finished:  # an end that vLLM does not know of: it frees the request
                    return True
        running.put(TokenDelta(finish_reason="error", error="vLLM ended the request without a reason"))
        return True

    def _outputs(
        self,
        request: EngineRequest,
        name: str,
        fields: Mapping[str, Any],
        extra: Mapping[str, Any],
        images: Sequence[Any] = (),
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for a request and its pictures, under a name of its own."""
        assert self._package is not None
        sampling = self._package.sampling_params(
            **fields, output_kind=self._package.delta, extra_args=dict(extra) or None
        )
        prompt = self._package.tokens_prompt(prompt_token_ids=request.token_ids)
        if images:
            prompt["multi_modal_data"] = {"image": images}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        hints = request.hints
        outputs: AsyncGenerator[Any, None] = self._llm.generate(
            prompt,
            sampling,
            name,
            priority=-round(hints.priority * PRIORITIES),
            trace_headers=dict(hints.trace_headers) or None,
            lora_request=None if request.lora_name is None else self._adapters[request.lora_name],
        )
        return outputs

    async def _confirm(
        self,
        running: RunningRequest,
        delta: TokenDelta,
        sampled: Sequence[int],
        end: int,
        carried: Shipped,
    ) -> None:
        """Complete a delta of a request with a chain; one that fails forces its end token.

        Args:
            running: The request.
            delta: The delta.
            sampled: Tokens of the delta, hidden ones too.
            end: Number of tokens by now, prompt and answer.
            carried: The record that vLLM's process was given.
        """
        assert self._reports is not None
        if delta.finish_reason is None and carried.end_id not in sampled:
            return
        failure = await self._reports.failure(carried.report)
        if delta.finish_reason is None and failure is None:
            return
        last = (sampled[-1], end - 1) if sampled and failure is None else None
        running.note_receipt(delta, await self._reports.receipt(carried.report, last))
        if failure is not None:
            delta.token_ids, delta.logprobs, delta.end_logprobs = [], None, None
            delta.finish_reason, delta.stop_reason = "error", None
            delta.failure, delta.error = failure, str(failure)

    async def add_receipt(self, request_id: str, delta: TokenDelta, position: int) -> None:
        """See `worker.engines.KeepsReceipts.add_receipt`."""
        running = self._requests.get(request_id)
        if running is None or running.report is None or not delta.token_ids:
            return
        assert self._reports is not None
        assert self._package is not None
        last = delta.token_ids[-1], position + running.num_added
        with contextlib.suppress(self._package.dead_error, EngineBroken, Draining):  # the answer is complete
            found = running.receipt or await self._reports.receipt(running.report, last)
            running.note_receipt(delta, running.receipt or found)  # the engine may have ended it meanwhile

    def _drop_report(self, running: RunningRequest) -> None:
        """Let vLLM's process forget the chain of a request that was aborted."""
        if running.report is None or self._reports is None or self._requests.refusal is not None:
            return
        task = asyncio.create_task(self._reports.drop(running.report))
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    def _break(self, cause: str) -> None:
        super()._break(cause)
        self._fail_calls(EngineBroken(cause))

    def _fail_calls(self, failure: ServingError) -> None:
        if self._reports is not None:
            self._reports.fail(failure)
        if self.weights is not None:
            self.weights.fail(failure)

    # Reports to the runtime

    def tell_load(self, callback: Callable[[int, int], None]) -> None:
        """Call ``callback`` with used and total KV blocks at each step of vLLM."""
        self._loads.on_load = callback

    def load(self) -> EngineLoad:
        """Queues and batches; see `worker.engines.Measured`."""
        return self._loads.load()

    def collect(self) -> Iterator[Metric]:
        """vLLM's own metrics; see `worker.engines.Collecting`."""
        return (metric for metric in REGISTRY.collect() if metric.name.startswith(METRICS))

    def num_leased(self) -> int:
        """Prompts whose KV is kept for decode workers; see `KvTransfers.num_leased`."""
        return 0 if self._transfers is None else self._transfers.num_leased()

    def transfers(self) -> Mapping[str, float]:
        """Counts of KV transfers; see `worker.engines.ServingEngine.transfers`."""
        return {} if self._transfers is None else self._transfers.measured()

    def report_blocks(self, sink: KvEventSink) -> None:
        """Report the cached prefixes to `sink`, if vLLM publishes KV events. Thread-safe."""
        if self._events is not None:
            assert self._info is not None
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._events.follow, sink, self._info.kv_block_size)

    async def _watch_processes(self) -> None:
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while not self._llm.errored:
            before_s, looked_s = looked_s, loop.time()
            self._heard_s += max(0.0, looked_s - before_s - 2 * WATCH_S)  # this process was stopped: nothing was heard
            if self.weights is not None and self.weights.is_busy:
                self._heard_s = loop.time()
            elif loop.time() - self._heard_s > self.config.step_timeout_s and self._awaits_outputs():
                self._break(f"vLLM has had no output for {self.config.step_timeout_s:g} s")
                return
            await asyncio.sleep(WATCH_S)
        self._break("vLLM's engine died")
