"""Reads TensorRT-LLM's outputs into the deltas of their requests, and classifies exceptions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from adapters.trtllm.side_channel import SideChannel
from worker.engines.trtllm import disaggregated_params
from worker.engines.trtllm.capabilities import Package
from worker.engines.trtllm.health import Watch, described
from worker.engines.trtllm.library_metrics import LibraryMetrics
from worker.engines.trtllm.reported_requests import ReportedRequests
from worker.engines.trtllm.running_request import RunningRequest
from worker.errors import EngineBroken, RequestFailed, ServingError, one_line

logger = logging.getLogger(__name__)


class OutputReader:
    """Reads the outputs of running requests; one task per request runs `read`.

    Args:
        package: The installed package.
        channel: Side channel of the processors' reports.
        watch: Monitor of the executor.
        requests: The running requests.
        broken: Called with the reason when the executor is found dead.
        metrics: TensorRT-LLM's own metrics, None if the version has none.
        facts: Facts of this worker that a hand-off tells, None for an aggregated one.
    """

    def __init__(
        self,
        package: Package,
        channel: SideChannel,
        watch: Watch,
        requests: ReportedRequests,
        broken: Callable[[str], None],
        metrics: LibraryMetrics | None,
        facts: disaggregated_params.HandOffFacts | None = None,
    ) -> None:
        self._package = package
        self._channel = channel
        self._watch = watch
        self._requests = requests
        self._broken = broken
        self._metrics = metrics
        self._facts = {} if facts is None else {"facts": asdict(facts)}

    async def read(self, request: RunningRequest, *, is_prefill: bool, seed: int | None) -> None:
        """Convert the engine's outputs to the request's deltas until it ends.

        Args:
            request: A request that the engine has taken.
            is_prefill: Whether it is a prefill for a decode worker, with a single output.
            seed: Seed that a prefill hands over.
        """
        try:
            if is_prefill:
                self._finish_prefill(request, await request.result, seed)
            else:
                await self._follow(request)
        except self._package.request_error as error:
            self._channel.poll()  # a processor failure is the better reason
            request.fail_alone(one_line(error))
            self._watch.suspect()
        except RequestFailed as error:
            request.fail_alone(str(error))
        except Exception as error:  # the engine boundary: not a request error
            failure = await self.blame(error)
            if isinstance(failure, RequestFailed):  # otherwise every stream has ended
                request.fail_and_abort(str(failure))

    async def blame(self, error: Exception) -> ServingError:
        """Classify an exception that is not a request error: fatal if the executor is dead.

        A dead executor is reported through the first request that waits. But most of a request runs
        on the client side of the library, in this process, and exceptions from there (an assertion
        on the length of the log probabilities, an unknown finish reason) say nothing about the
        executor.
        """
        logger.error("TensorRT-LLM raised %s", type(error).__name__, exc_info=error)
        problem = await self._watch.verdict()
        if self._requests.refusal is not None:
            return self._requests.refusal
        cause = described(error)
        if problem is None:
            return RequestFailed(cause)
        self._broken(f"{cause}; {problem}")
        return EngineBroken(f"{cause}; {problem}")

    async def _follow(self, request: RunningRequest) -> None:
        async for output in request.result:
            self._heard(output)
            request.advance(output.outputs)
            if request.done:
                return
        request.fail_alone("TensorRT-LLM ended the request without a reason")

    def _finish_prefill(self, request: RunningRequest, output: Any, seed: int | None) -> None:
        """The only delta of a prefill: first token and KV handle, or the complete answer."""
        self._heard(output)
        self._requests.last_prefill_s = asyncio.get_running_loop().time()
        (choice,) = output.outputs
        if choice.finish_reason in disaggregated_params.GOES_ON:
            chain = request.chain
            logprobs = chain.first_logprobs() if chain is not None and chain.has_logprobs else None
            params = disaggregated_params.complete(choice, request.disaggregated_params)
            request.kv = disaggregated_params.encode(params, seed=seed, logprobs=logprobs, **self._facts)
        request.advance(output.outputs)

    def _heard(self, output: Any) -> None:
        self._channel.poll()  # reports on these tokens were sent before them
        self._watch.heard()
        if self._metrics is not None:
            self._metrics.note_output(output)
