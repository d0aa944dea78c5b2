"""`TrtllmEngine`: drives ``tensorrt_llm.LLM`` (PyTorch backend)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from itertools import count
from typing import Any

from adapters.trtllm import ChainAdapter, Failure, Step
from adapters.trtllm.side_channel import SideChannel
from adapters.vocabulary import Vocabulary
from worker.engines import EngineInfo, EngineRequest, KeepKv, KvPart, LocalPrefill, ReadKv, TokenDelta
from worker.engines.refusals import check_queue
from worker.engines.trtllm import disaggregated_params
from worker.engines.trtllm.capabilities import Package, read_package
from worker.engines.trtllm.deltas import Cursor
from worker.engines.trtllm.description import ModelSizes, describe
from worker.engines.trtllm.health import Watch, described, own_check, submission_error
from worker.engines.trtllm.params import NativeRequest, Served, callable_of, native_request
from worker.engines.trtllm.probes import NUM_TOKENS, CallProbe, Calls, ProbeRefused, find_honoured, judge_calls
from worker.engines.trtllm.reports import RuntimeReports
from worker.engines.trtllm.running_request import RunningRequest
from worker.engines.trtllm.settings import TrtllmConfig, checkpoint_facts
from worker.engines.trtllm.submission import check_prompt, context_only, handed_logprobs, own_arguments
from worker.errors import (
    Draining,
    EngineBroken,
    InvalidRequest,
    RequestFailed,
    ServingError,
    StartupError,
)
from worker.sampling import SamplingParams

logger = logging.getLogger(__name__)

PROBE = "probe"
PROBE_PROMPT = [5, 6]
PROBE_TOKEN = 7

SHUTDOWN_S = 30.0
"""Time for the executor to shut down."""


class TrtllmEngine(RuntimeReports):
    """Implements `worker.engines.ServingEngine` on TensorRT-LLM.

    Args:
        config: Settings.
    """

    def __init__(self, config: TrtllmConfig) -> None:
        super().__init__(config)
        self._package: Package | None = None
        self._served: Served | None = None
        self._channel = SideChannel(self._on_failure, self._on_step)
        self._requests: dict[str, RunningRequest] = {}
        # by number, since request ids are reused and a late report must not reach the next request
        self._by_number: dict[str, RunningRequest] = {}
        self._probe_steps: list[Step] = []
        self._numbers = count()
        self._refusal: ServingError | None = None
        self._watch: Watch | None = None
        self._last_prefill = -math.inf

    def __repr__(self) -> str:
        state = "not started" if self._info is None else repr(self._refusal) if self._refusal else "serving"
        return f"TrtllmEngine({state}, {len(self._requests)} unfinished)"

    # Start and stop

    async def start(self) -> EngineInfo:
        """Load the model and probe this version's behaviour.

        Raises:
            StartupError: in one line.
        """
        if self._info is not None:
            raise StartupError("the TensorRT-LLM engine was started twice")
        self._loop = asyncio.get_running_loop()
        package = self._package = read_package()
        context_length, eos_token_ids = checkpoint_facts(self.config.model_path)
        arguments = self.config.llm_arguments(package.llm_fields, package.version, context_length)
        try:
            # in the event loop, as in Dynamo's own worker: the executor's queues belong to this
            # thread's loop
            self._llm = package.llm(model=self.config.model_path, **arguments)
        except Exception as error:  # the start-up boundary
            raise StartupError(f"TensorRT-LLM {package.version}: {' '.join(str(error).split())}") from error
        try:
            self._channel.open()
        except OSError as error:
            raise StartupError(f"processors cannot report: {error}") from error
        calls = await self._probe_calls(package, eos_token_ids)
        honoured = await find_honoured(self._ask, package, PROBE_PROMPT, calls.vocab_size)
        logger.info("TensorRT-LLM %s honours %s", package.version, ", ".join(sorted(honoured)) or "no control")
        self._served = Served(
            package.sampling_fields, honoured, calls.vocab_size, eos_token_ids, self.config.history == "lagged"
        )
        sizes = ModelSizes(calls.vocab_size, context_length, eos_token_ids)
        self._info = await describe(self._llm, package.version, sizes, self.config.max_num_seqs)
        self._start_watching(package)
        if self.config.role != "aggregated":
            logger.warning("NVIDIA does not support logits processors with disaggregated serving: docs/tensorrt-llm.md")
        return self._info

    async def stop(self) -> None:
        """Shut the executor down. Idempotent, and safe after a failed or missing `start`."""
        self._end_all(Draining("the engine was stopped"))
        await self._drain_prefill()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        llm, self._llm = self._llm, None
        if llm is not None:
            try:
                await asyncio.wait_for(asyncio.to_thread(llm.shutdown), SHUTDOWN_S)
            except TimeoutError:  # a dead executor may block it forever
                logger.warning("TensorRT-LLM did not shut down within %g s", SHUTDOWN_S)
        self._channel.close()

    async def _drain_prefill(self) -> None:
        """Wait for KV transfers: unfetched KV is lost with the executor."""
        if self.config.role == "prefill" and not isinstance(self._refusal, EngineBroken):
            wait = self._last_prefill + self.config.kv_lease_s - asyncio.get_running_loop().time()
            if wait > 0:
                await asyncio.sleep(wait)

    async def _probe_calls(self, package: Package, eos_token_ids: tuple[int, ...]) -> Calls:
        """Probe how logits processors are called, and load the tokenizer in their process."""
        calls = await self._probe_once(None)
        if calls.lags and self.config.history == "exact":
            raise StartupError(
                f"TensorRT-LLM {package.version} shows logits processors a history that lacks the newest token, "
                "although overlapped scheduling is off; --history lagged accepts that"
            )
        vocabulary = Vocabulary(calls.vocab_size, eos_token_ids=eos_token_ids, path=self.config.model_path)
        await self._probe_once(vocabulary)
        return calls

    async def _probe_once(self, vocabulary: Vocabulary | None) -> Calls:
        self._probe_steps = []
        probe = CallProbe(self._channel.reporter(PROBE), PROBE_TOKEN, vocabulary)
        try:
            output = await self._ask(logits_processor=[probe])
        except ProbeRefused as error:
            raise StartupError(f"TensorRT-LLM refuses a logits processor: {error}") from error
        self._channel.poll()
        tokens = list(output.outputs[0].token_ids)
        return judge_calls(self._probe_steps, tokens, PROBE_TOKEN, len(PROBE_PROMPT))

    async def _ask(self, **fields: Any) -> Any:
        """Run one short probe request. Raises `ProbeRefused` or `StartupError`."""
        assert self._package is not None
        unknown = set(fields) - self._package.sampling_fields
        if unknown:
            raise ProbeRefused(", ".join(unknown))
        try:
            params = self._package.sampling_params(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **fields)
            return await self._llm.generate_async(list(PROBE_PROMPT), params, streaming=False)
        except (self._package.request_error, ValueError, TypeError) as error:
            raise ProbeRefused(" ".join(str(error).split())) from error
        except Exception as error:  # the start-up boundary
            raise StartupError(f"TensorRT-LLM failed on its first requests: {error}") from error

    def _start_watching(self, package: Package) -> None:
        config = self.config
        self._watch = Watch(
            own_check(self._llm),
            self._send_canary,
            package,
            config.canary_interval_s,
            config.canary_timeout_s,
            self._break,
        )
        self._tasks = [asyncio.create_task(self._watch.run()), asyncio.create_task(self._report_load())]

    async def _send_canary(self) -> None:
        assert self._package is not None
        params = self._package.sampling_params(max_tokens=1, ignore_eos=True, detokenize=False)
        urgent = {"priority": 1.0} if "priority" in self._package.generate_arguments else {}
        await self._llm.generate_async(list(PROBE_PROMPT), params, streaming=False, **urgent)

    # Requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Decode one request; see `worker.engines.ServingEngine.generate`."""
        if request.choice:
            raise InvalidRequest("sampling_options.n", "TensorRT-LLM's random numbers do not depend on the choice")
        running = await self._submit(request)
        try:
            while True:
                yield await running.take()
                if running.is_exhausted:
                    return
        finally:
            self._release(running)

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends as ``cancelled``.

        On a decode worker only after the KV transfer has completed.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.abort()

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        for request in self._requests.values():
            request.keep_alive()

    def num_unfinished(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._requests)

    def migrate_all(self) -> int:
        """End every unfinished request with `Draining`, refuse new ones; how many were ended."""
        return self._end_all(Draining("the worker is shutting down"))

    async def _submit(self, engine_request: EngineRequest) -> RunningRequest:
        if self._refusal is not None:
            raise self._refusal
        if self._info is None or self._served is None or self._package is None:
            raise EngineBroken("the engine has not been started")
        if engine_request.id in self._requests:
            raise InvalidRequest("request_id", f"{engine_request.id!r} is in use by an unfinished request")
        tokens, params, kv = engine_request.token_ids, engine_request.params, engine_request.kv
        check_prompt(tokens, self._info)
        number = next(self._numbers)
        arguments = own_arguments(engine_request, self._package)
        made = native_request(engine_request, number, self._served)
        if not isinstance(kv, ReadKv):  # its prompt's KV waits at a prefill worker, and would until the time-out
            check_queue(len(self._requests), self._info.max_num_seqs, self.config.max_queue)
        request = self._running_request(engine_request.id, made, params, self._info.context_length - len(tokens))
        request.num_given = len(tokens)
        request.number = str(number)
        adapter = self._adapter(request, made, params)
        arguments |= self._disaggregated(request, kv, params)
        if adapter is not None:
            adapter.handed_over = request.handed_over
        streaming = not isinstance(kv, KeepKv)
        try:
            native = self._package.sampling_params(**made.fields)
            if adapter is not None:
                native.logits_processor = [adapter]
            request.result = self._llm.generate_async(tokens, native, streaming=streaming, **arguments)
        except Exception as error:  # the engine's boundary: classified, never the worker's end by itself
            refusal = submission_error(error, self._package, made.fields)
            raise refusal or await self._blame(error) from error
        self._requests[engine_request.id] = self._by_number[request.number] = request
        request.pump = asyncio.create_task(self._pump(request, params, kv))
        return request

    def _running_request(
        self, request_id: str, made: NativeRequest, params: SamplingParams, room: int
    ) -> RunningRequest:
        """``room``: tokens that fit into the context after the prompt; TensorRT-LLM ends there
        too.
        """
        assert self._served is not None
        left = made.fields["max_tokens"]
        max_tokens = room if left is None else min(left, room)
        eos = self._served.eos_token_ids
        default_end = None if params.ignore_eos or not eos else eos[0]
        native_logprobs = params.logprobs if made.chain is None else None
        shows_end = params.include_stop_str_in_output
        return RunningRequest(
            request_id,
            [
                Cursor(index, made.end_token_ids, default_end, shows_end, native_logprobs, max_tokens)
                for index in range(params.n)
            ],
            made.chain,
            chain_logprobs=made.chain_logprobs is not None,
            fails_open=self.config.fails_open,
        )

    def _adapter(self, request: RunningRequest, made: NativeRequest, params: SamplingParams) -> ChainAdapter | None:
        assert self._served is not None
        eos = self._served.eos_token_ids
        end_id = params.end_id if params.end_id is not None else eos[0] if eos else None
        adapter = callable_of(made, end_id, lagged=self._served.lagged)
        if adapter is None:
            return None
        reporter = self._channel.reporter(request.number)
        adapter.report, adapter.watch = reporter, reporter.step
        adapter.fails_open = self.config.fails_open
        if int(self.config.options.get("tensor_parallel_size") or 1) > 1:
            # Ranks must agree on every token, and clocks differ between them: the worker enforces
            # the budget instead.
            request.step_budget_s, adapter.chain.step_budget_s = adapter.chain.step_budget_s, math.inf
        return adapter

    def _disaggregated(self, request: RunningRequest, kv: KvPart | None, params: SamplingParams) -> dict[str, Any]:
        """Disaggregation arguments of ``generate_async``; none for a health probe."""
        assert self._package is not None
        if kv is None or isinstance(kv, LocalPrefill):
            if self.config.role == "decode":  # this executor computes the prompt itself
                request.note_mode("local prefill")
            return {}
        if params.n > 1:
            raise InvalidRequest("sampling_params.n", "must be 1 in disaggregated serving: one sequence is handed over")
        if self.config.role != ("prefill" if isinstance(kv, KeepKv) else "decode"):
            raise InvalidRequest(disaggregated_params.FIELD, f"this worker serves {self.config.role}")
        given = context_only(self._package) if isinstance(kv, KeepKv) else self._handed_over(request, kv.handle)
        request.disaggregated_params = given
        return {"disaggregated_params": given}

    def _handed_over(self, request: RunningRequest, hand_off: Mapping[str, Any]) -> Any:
        """The ``DisaggregatedParams`` of a prefill; records its first token in the request."""
        assert self._package is not None
        from tensorrt_llm.executor.result import Logprob

        given = disaggregated_params.decode(hand_off, self._package.disaggregated_params, Logprob)
        request.handed_over = len(given.first_gen_tokens)
        request.handed_logprobs = handed_logprobs(hand_off)
        request.must_not_abort = True
        request.note_mode("disaggregated")
        return given

    async def _pump(self, request: RunningRequest, params: SamplingParams, kv: KvPart | None) -> None:
        """Convert the engine's outputs to the request's deltas until it ends."""
        assert self._package is not None
        try:
            if isinstance(kv, KeepKv):
                await self._finish_prefill(request, await request.result, params)
            else:
                await self._follow(request)
        except self._package.request_error as error:
            self._channel.poll()  # a processor failure is the better reason
            request.fail_alone(" ".join(str(error).split()))
            if self._watch is not None:
                self._watch.suspect()
        except RequestFailed as error:
            request.fail_alone(str(error))
        except Exception as error:  # the engine boundary: not a request error
            failure = await self._blame(error)
            if isinstance(failure, RequestFailed):  # otherwise every stream has ended
                request.abandon(str(failure))

    async def _blame(self, error: Exception) -> ServingError:
        """Classify an exception that is not a request error: fatal if the executor is dead.

        A dead executor is reported through the first request that waits. But most of a request runs
        on the client side of the library, in this process, and exceptions from there (an assertion
        on the length of the log probabilities, an unknown finish reason) say nothing about the
        executor.
        """
        assert self._watch is not None
        logger.error("TensorRT-LLM raised %s", type(error).__name__, exc_info=error)
        problem = await self._watch.verdict()
        if self._refusal is not None:
            return self._refusal
        cause = described(error)
        if problem is None:
            return RequestFailed(cause)
        self._break(f"{cause}; {problem}")
        return EngineBroken(f"{cause}; {problem}")

    async def _follow(self, request: RunningRequest) -> None:
        async for output in request.result:
            self._heard()
            request.advance(output.outputs)
            if request.done:
                return
        request.fail_alone("TensorRT-LLM ended the request without a reason")

    async def _finish_prefill(self, request: RunningRequest, output: Any, params: SamplingParams) -> None:
        """The only delta of a prefill: first token and KV handle, or the complete answer."""
        self._heard()
        self._last_prefill = asyncio.get_running_loop().time()
        (choice,) = output.outputs
        if choice.finish_reason in disaggregated_params.GOES_ON:
            chain_logprobs = request.first_logprobs() if request.chain_logprobs else None
            passed_on = disaggregated_params.complete(choice, request.disaggregated_params)
            request.passed_on = disaggregated_params.encode(passed_on, seed=params.seed, logprobs=chain_logprobs)
        request.advance(output.outputs)

    def _heard(self) -> None:
        self._channel.poll()  # reports on these tokens were sent before them
        if self._watch is not None:
            self._watch.heard()

    def _release(self, request: RunningRequest) -> None:
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        self._by_number.pop(request.number, None)
        if not request.done:
            request.done = True
            request.abort()
        if request.pump is not None and not request.must_not_abort:
            request.pump.cancel()

    def _end_all(self, failure: ServingError) -> int:
        """Fail every stream and refuse new requests, with the first reason given."""
        self._refusal = self._refusal or failure
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if not request.done and not isinstance(failure, EngineBroken):
                request.abort()
            request.fail(failure)
        return len(requests)

    def _break(self, cause: str) -> None:
        self._end_all(EngineBroken(cause))
        if self._on_broken is not None:
            self._on_broken(cause)

    def _on_failure(self, failure: Failure) -> None:
        request = self._by_number.get(failure.request_id)
        if request is not None:
            logger.warning("request %s: %s", request.request_id, failure)
            request.noted(failure)

    def _on_step(self, request_id: str, step: Step) -> None:
        if request_id == PROBE:
            self._probe_steps.append(step)
        elif request_id in self._by_number:
            self._by_number[request_id].noted_step(step)

    @property
    def honoured(self) -> list[str]:
        """Controls that this version honours exactly; the others run as processors."""
        return sorted(self._served.honoured) if self._served is not None else []
