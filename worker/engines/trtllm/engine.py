"""`TrtllmEngine`: drives ``tensorrt_llm.LLM`` (PyTorch backend)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any

from prometheus_client import Metric

from adapters.trtllm import ChainAdapter, Step
from adapters.trtllm.side_channel import SideChannel
from adapters.vocabulary import Vocabulary
from worker.engines import (
    EngineInfo,
    EngineRequest,
    KeepKv,
    KvEventSink,
    KvPart,
    LoadSink,
    LocalPrefill,
    ReadKv,
    TokenDelta,
)
from worker.engines.forward_pass import ForwardPassSink
from worker.engines.library_engine import LibraryEngine
from worker.engines.refusals import check_prompt, check_queue
from worker.engines.trtllm import disaggregated_params
from worker.engines.trtllm.cache_reports import EventRelay
from worker.engines.trtllm.capabilities import Package, most_logprobs, read_package
from worker.engines.trtllm.deltas import Cursor
from worker.engines.trtllm.description import ModelSizes, describe
from worker.engines.trtllm.health import Watch, own_check, submission_error
from worker.engines.trtllm.images import Images, check_controls
from worker.engines.trtllm.library_metrics import LibraryMetrics, collected
from worker.engines.trtllm.lora import lora_argument, lora_requests
from worker.engines.trtllm.native_guides import NativeGuides, read_guides
from worker.engines.trtllm.output_reader import OutputReader
from worker.engines.trtllm.params import NativeRequest, Served, callable_of, default_end, native_request
from worker.engines.trtllm.placement import keeps_conversations, placement
from worker.engines.trtllm.probe_requests import PROBE, ProbeRequests
from worker.engines.trtllm.reported_chain import ReportedChain
from worker.engines.trtllm.reported_requests import ReportedRequests
from worker.engines.trtllm.reports import ExecutorReports
from worker.engines.trtllm.running_request import RunningRequest
from worker.engines.trtllm.settings import TrtllmConfig, checkpoint_facts, vocabulary_size
from worker.engines.trtllm.speculative_request import SAMPLES, speculative_request
from worker.engines.trtllm.submission import check_hand_over, context_only, handed_logprobs, own_arguments
from worker.engines.trtllm.watched_chain import WatchedChain
from worker.errors import Draining, EngineBroken, InvalidRequest, StartupError, one_line
from worker.sampling import MAX_LOGPROBS, SamplingParams

logger = logging.getLogger(__name__)

_DEVICES = "UCX_NET_DEVICES"


class TrtllmEngine(LibraryEngine[RunningRequest]):
    """Implements `worker.engines.ServingEngine` on TensorRT-LLM.

    Args:
        config: Settings.
        digest: Begins to compute the digest of the checkpoint, for hand-offs; None compares none.
    """

    library = "TensorRT-LLM"
    _requests: ReportedRequests

    def __init__(self, config: TrtllmConfig, digest: Callable[[], Future[str]] | None = None) -> None:
        super().__init__(ReportedRequests())
        self.config = config
        self._digest = digest
        self._facts: disaggregated_params.HandOffFacts | None = None
        self._package: Package | None = None
        self._served: Served | None = None
        self._adapters: Mapping[str, Any] = {}
        self._guides: NativeGuides | None = None
        self._images: Images | None = None
        self._keeps_conversations = False
        self._probes: ProbeRequests | None = None
        self._reader: OutputReader | None = None
        self._reports: ExecutorReports | None = None
        self._channel = SideChannel(self._requests.note_failure, self._note_step)
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []

    # Start and stop

    async def start(self) -> EngineInfo:
        """Load the model and probe this version's behaviour.

        Raises:
            StartupError: in one line.
        """
        if self._info is not None:
            raise StartupError("the TensorRT-LLM engine was started twice")
        self._loop = asyncio.get_running_loop()
        for note in self.config.notes:
            logger.warning("%s", note)
        if self.config.role != "aggregated" and self.config.kv_devices is not None:
            os.environ[_DEVICES] = self.config.kv_devices  # of the cache transceiver, in the executor's process
        package = self._package = read_package()
        digest = None if self._digest is None or self.config.role == "aggregated" else self._digest()
        context_length, eos_token_ids = checkpoint_facts(self.config.model_path)
        arguments = self.config.llm_arguments(package.llm_fields, package.version, context_length)
        arguments |= lora_argument(self.config.adapters, package)
        self._adapters = lora_requests(self.config.adapters)
        try:
            # in the event loop, as in Dynamo's own worker: the executor's queues belong to this
            # thread's loop
            self._llm = package.llm(model=self.config.model_path, **arguments)
        except Exception as error:  # the start-up boundary
            raise StartupError(f"TensorRT-LLM {package.version}: {one_line(error)}") from error
        try:
            self._channel.open()
        except OSError as error:
            raise StartupError(f"processors cannot report: {error}") from error
        probes = self._probes = ProbeRequests(self._llm, package, self._channel)
        self._keeps_conversations = keeps_conversations(self._llm, package)
        if self.config.images is not None:
            self._images = Images(self.config.images, self._llm, package)
        if self.config.drafts:
            vocab_size = vocabulary_size(self.config.model_path)
            honoured = await self._try_drafts(probes, vocab_size, eos_token_ids)
        else:
            vocab_size = (await probes.find_calls(self.config, eos_token_ids)).vocab_size
            honoured = await probes.find_honoured(vocab_size)
        for name, adapter in self._adapters.items():
            await probes.try_adapter(name, adapter)
        logger.info("TensorRT-LLM %s honours %s", package.version, ", ".join(sorted(honoured)) or "no control")
        self._served = Served(
            package.sampling_fields, honoured, vocab_size, eos_token_ids, self.config.history == "lagged"
        )
        sizes = ModelSizes(vocab_size, context_length, eos_token_ids)
        self._info = replace(
            await describe(self._llm, package.version, sizes, self.config.max_num_seqs),
            honours_priority="priority" in package.generate_arguments,
            reports_blocks=self.has_events,
            adapters={adapter.name: adapter.digest for adapter in self.config.adapters},
            takes_images=self._images is not None,
            max_logprobs=None if self.config.drafts else most_logprobs(package, MAX_LOGPROBS),
            scores_prompts=False,
            honours_cache_salt="cache_salt" in package.generate_arguments,
            runs_all_processors=False,
            native_guides=self._native_guides(),
        )
        if self.config.role != "aggregated":
            self._facts = await self._hand_off_facts(package.version, digest)
        metrics = LibraryMetrics.load(self.config.served_model_name)
        watch = Watch(
            own_check(self._llm),
            probes.send_canary,
            package,
            self.config.canary_interval_s,
            self.config.canary_timeout_s,
            self._break,
        )
        self._reader = OutputReader(package, self._channel, watch, self._requests, self._break, metrics, self._facts)
        self._reports = ExecutorReports(self._llm, metrics)
        self._tasks = [asyncio.create_task(watch.run()), asyncio.create_task(self._reports.poll_load())]
        if self.config.role != "aggregated":
            logger.warning("NVIDIA does not support logits processors with disaggregated serving: docs/tensorrt-llm.md")
        return self._info

    async def _hand_off_facts(self, version: str, digest: Future[str] | None) -> disaggregated_params.HandOffFacts:
        """Facts that must be the same on both sides of a hand-off."""
        options = self.config.options
        model = ""
        if digest is not None:
            with contextlib.suppress(StartupError):  # it cannot be read as a whole: other facts are compared
                model = await asyncio.wrap_future(digest)
        cache = options.get("kv_cache_config") or {}
        dtypes = str(options.get("dtype") or "auto"), str(cache.get("dtype") or "auto")
        return disaggregated_params.HandOffFacts(version, model, *dtypes)

    async def _try_drafts(
        self, probes: ProbeRequests, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> frozenset[str]:
        """Find out what works beside speculative decoding; the controls that are honoured."""
        logger.warning(
            "TensorRT-LLM calls no logits processors beside speculative decoding: requests that need one are refused"
        )
        backend = self.config.guided_backend
        if backend is not None:
            read = Vocabulary.from_pretrained
            vocabulary = await asyncio.to_thread(read, self.config.model_path, vocab_size, eos_token_ids)
            self._guides = await asyncio.to_thread(read_guides, backend, vocabulary)
            if self._guides.problem is None:
                await probes.try_guide(self._guides, vocabulary)
            else:
                logger.warning("guides are refused: %s", self._guides.problem)
        return frozenset({SAMPLES} if await probes.samples() else ())

    def _native_guides(self) -> frozenset[str] | None:
        """See `EngineInfo.native_guides`."""
        if not self.config.drafts:
            return None
        return frozenset() if self._guides is None else self._guides.names

    async def stop(self) -> None:
        """Shut the executor down. Idempotent, and safe after a failed or missing `start`."""
        self._requests.end_all(Draining("the engine was stopped"))
        await self._drain_prefill()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._shut_down()
        self._channel.close()

    async def _drain_prefill(self) -> None:
        """Wait for KV transfers: unfetched KV is lost with the executor."""
        if self.config.role == "prefill" and not isinstance(self._requests.refusal, EngineBroken):
            wait = self._requests.last_prefill_s + self.config.kv_lease_s - asyncio.get_running_loop().time()
            if wait > 0:
                await asyncio.sleep(wait)

    # Requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Decode one request; see `worker.engines.ServingEngine.generate`."""
        pictured = await self._images.inputs(request) if self._images is not None and request.images else None
        running = await self._submit(request, pictured)
        try:
            async for delta in running:
                yield delta
        finally:
            self._requests.release(running)

    async def _submit(self, engine_request: EngineRequest, pictured: Any) -> RunningRequest:
        """Hand a request to the library; ``pictured``: its prompt with pictures, None without."""
        self._requests.check(engine_request.id)
        if self._info is None or self._served is None or self._package is None or self._reader is None:
            raise EngineBroken("the engine has not been started")
        tokens, params, kv = engine_request.token_ids, engine_request.params, engine_request.kv
        check_prompt(tokens, self._info.vocab_size, self._info.context_length)
        number = next(self._numbers)
        arguments = own_arguments(engine_request, self._package, self._info.num_dp_ranks)
        arguments |= placement(
            engine_request.hints, self._info.num_dp_ranks, keeps_conversations=self._keeps_conversations
        )
        if engine_request.lora_name is not None:
            arguments["lora_request"] = self._adapters[engine_request.lora_name]
        if self.config.drafts:
            made = speculative_request(engine_request, self._served, self._guides)
        else:
            made = native_request(engine_request, number, self._served)
            check_controls(made, engine_request.images)
        if not isinstance(kv, ReadKv):  # its prompt's KV waits at a prefill worker, and would until the time-out
            check_queue(len(self._requests), self._info.num_slots, self.config.max_queue)
        request = self._running_request(engine_request.id, made, params, len(tokens))
        request.number = str(number)
        request.has_pictures = pictured is not None
        adapter = self._adapter(request, made, params)
        arguments |= self._disaggregated(request, kv, params)
        if adapter is not None and isinstance(request.chain, ReportedChain):
            adapter.handed_over = request.chain.handed_over
        streaming = not isinstance(kv, KeepKv)
        try:
            guide = (
                {} if made.guide is None else {"guided_decoding": self._package.guided_decoding_params(**made.guide)}
            )
            native = self._package.sampling_params(**made.fields, **guide)
            if adapter is not None:
                native.logits_processor = [adapter]
            inputs = tokens if pictured is None else pictured
            request.result = self._llm.generate_async(inputs, native, streaming=streaming, **arguments)
        except Exception as error:  # the engine's boundary: classified, never the worker's end by itself
            refusal = submission_error(error, self._package, made.fields)
            raise refusal or await self._reader.blame(error) from error
        self._requests.add(request)
        reading = self._reader.read(request, is_prefill=isinstance(kv, KeepKv), seed=params.seed)
        request.pump = asyncio.create_task(reading)
        return request

    def _running_request(
        self, request_id: str, made: NativeRequest, params: SamplingParams, num_given: int
    ) -> RunningRequest:
        assert self._served is not None
        assert self._info is not None
        room = self._info.context_length - num_given  # TensorRT-LLM ends an answer there, too
        left = made.fields["max_tokens"]
        max_tokens = room if left is None else min(left, room)
        native_logprobs = params.logprobs if made.chain is None else None
        end_id, shows_end = default_end(params, self._served), params.include_stop_str_in_output
        chain: ReportedChain | WatchedChain | None = None
        if made.watched is not None:
            chain = WatchedChain(made.watched)
        elif made.chain is not None:
            chain = ReportedChain(made.chain, num_given, made.chain_logprobs is not None, self.config.fails_open)
        cursors = [
            Cursor(index, made.end_token_ids, end_id, shows_end, native_logprobs, max_tokens)
            for index in range(params.n)
        ]
        return RunningRequest(request_id, cursors, chain)

    def _adapter(self, request: RunningRequest, made: NativeRequest, params: SamplingParams) -> ChainAdapter | None:
        assert self._served is not None
        eos = self._served.eos_token_ids
        end_id = params.end_id if params.end_id is not None else eos[0] if eos else None
        adapter = callable_of(made, end_id, lagged=self._served.lagged)
        if adapter is None or not isinstance(request.chain, ReportedChain):
            return None
        reporter = self._channel.reporter(request.number)
        adapter.report, adapter.watch = reporter, reporter.step
        adapter.fails_open = self.config.fails_open
        if self.config.num_copies > 1:
            # Ranks must agree on every token, and clocks differ between them: the worker enforces
            # the budget instead.
            failures = adapter.chain.failures
            request.chain.step_budget_s, failures.step_budget_s = failures.step_budget_s, math.inf
        return adapter

    def _disaggregated(self, request: RunningRequest, kv: KvPart | None, params: SamplingParams) -> dict[str, Any]:
        """Disaggregation arguments of ``generate_async``; none for a health probe."""
        assert self._package is not None
        if kv is None or isinstance(kv, LocalPrefill):
            if self.config.role == "decode" and request.chain is not None:  # this executor computes the prompt
                request.chain.note_mode("local prefill")
            return {}
        if params.n > 1:
            raise InvalidRequest("sampling_params.n", "must be 1 in disaggregated serving: one sequence is handed over")
        if self.config.role != ("prefill" if isinstance(kv, KeepKv) else "decode"):
            raise InvalidRequest(disaggregated_params.FIELD, f"this worker serves {self.config.role}")
        check_hand_over(None if request.chain is None else request.chain.chain)
        given = context_only(self._package) if isinstance(kv, KeepKv) else self._handed_over(request, kv.handle)
        request.disaggregated_params = given
        return {"disaggregated_params": given}

    def _handed_over(self, request: RunningRequest, hand_off: Mapping[str, Any]) -> Any:
        """The ``DisaggregatedParams`` of a prefill; records its first token in the request."""
        assert self._package is not None
        from tensorrt_llm.executor.result import Logprob

        if self._facts is not None:
            self._facts.check(hand_off)
        given = disaggregated_params.decode(hand_off, self._package.disaggregated_params, Logprob)
        logprobs = handed_logprobs(hand_off)
        request.must_not_abort = True
        if isinstance(request.chain, ReportedChain):
            request.chain.handed_over, request.chain.handed_logprobs = len(given.first_gen_tokens), logprobs
            request.chain.note_mode("disaggregated")
        return given

    def _note_step(self, number: str, step: Step) -> None:
        if number == PROBE and self._probes is not None:
            self._probes.note_step(step)
        else:
            self._requests.note_step(number, step)

    # Reports to the runtime

    def tell_load(self, callback: LoadSink) -> None:
        """Call ``callback`` with used and total KV blocks whenever the executor reports them."""
        assert self._reports is not None, "start comes first"
        self._reports.on_load = callback

    def report_forward_passes(self, sink: ForwardPassSink) -> None:
        """Tell `sink` of every forward pass that the executor reports."""
        assert self._reports is not None, "start comes first"
        self._reports.on_pass = sink

    def report_blocks(self, sink: KvEventSink) -> None:
        """Report the cached prefixes to `sink`, if the event buffer is on. Thread-safe."""
        self.report_blocks_of_ranks([sink])

    def report_blocks_of_ranks(self, sinks: Sequence[KvEventSink]) -> None:
        """Report the cached prefixes of each rank, if the event buffer is on. Thread-safe."""
        assert self._info is not None
        assert self._reports is not None
        if not self.has_events:
            return
        size, has_adapters = self._info.kv_block_size, bool(self._adapters)
        relays = [EventRelay(sink, size, has_adapters) for sink in sinks]
        poll = self._reports.poll_events
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(self._loop.create_task(poll(relays))))

    @property
    def has_events(self) -> bool:
        """Whether KV events are recorded."""
        cache = self.config.options.get("kv_cache_config") or {}
        return int(cache.get("event_buffer_max_size") or 0) > 0

    @property
    def honoured(self) -> list[str]:
        """Controls that this version honours exactly; the others run as processors."""
        return sorted(self._served.honoured) if self._served is not None else []

    def collect(self) -> Iterable[Metric]:
        """TensorRT-LLM's own metrics of now; `prometheus_client` calls it."""
        return collected()
