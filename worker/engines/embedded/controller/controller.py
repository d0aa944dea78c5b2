"""`TextGenerationController`: dynamic and static batches, under Megatron-Core's public names.

`docs/controller.md` maps each member of Megatron-Core's class to this one. Both kinds of batch run
through the same step, so that an answer does not depend on the kind. Single rank: nothing is split
over processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TypeVar

import torch

from worker.engines.embedded.controller.padding import PaddedBatches
from worker.engines.embedded.controller.sampling import add_top_n, check_sampling, sample_rows
from worker.engines.embedded.controller.state import Running, StepReport
from worker.engines.embedded.controller.stream import Streaming
from worker.engines.embedded.controller.text import ControllerTokenizer, HfControllerTokenizer
from worker.engines.embedded.controller.types import (
    DynamicStep,
    InferenceParams,
    InferenceRequest,
    MaxSequenceLengthOverflowError,
    RequestId,
    Status,
    TokenStream,
    TopN,
)
from worker.engines.embedded.host import FairLock
from worker.engines.embedded.offline import Engine

NO_TOKEN = -1
"""Token id in `TextGenerationController.sample_from_logits` for a row that cannot be sampled."""

StopWordCallback = Callable[[list[RequestId]], Iterable[RequestId]]

_Key = TypeVar("_Key", bound=RequestId)


class TextGenerationController(PaddedBatches, Streaming):
    """Tokenises, decodes, samples and detokenises.

    Methods that change requests are thread-safe; they wait for each other.

    Args:
        engine: The loaded engine, for this controller's exclusive use.
        tokenizer: The engine's own by default.

    Raises:
        ValueError: the model has no tokenizer, and none is given.

    Attributes:
        engine: The engine.
        tokenizer: The tokenizer in use.
        sampling_errors: Reasons by row, of the last `sample_from_logits`, for those not sampled.
    """

    def __init__(self, engine: Engine, tokenizer: ControllerTokenizer | None = None) -> None:
        if tokenizer is None:
            if engine.tokenizer is None or not engine.info.eos_token_ids:
                raise ValueError("the model has no tokenizer or no end token; give one as tokenizer")
            tokenizer = HfControllerTokenizer(engine.tokenizer, engine.info.eos_token_ids[0])
        super().__init__(tokenizer)
        self.engine = engine
        self.sampling_errors: dict[int, str] = {}
        self._session = engine.session
        self._running: dict[str, Running] = {}  # by the session's id
        self._paused: list[RequestId] = []
        self._in_static_batch = False
        self._stop_callback: StopWordCallback | None = None
        self._lock = FairLock()

    # Sampling

    def sample_from_logits(
        self,
        last_token_logits: torch.Tensor,
        sampling_params: InferenceParams | Sequence[InferenceParams],
        vocab_size: int | None = None,
        generation_started: torch.Tensor | Sequence[bool] | None = None,
        top_n_logprobs_dict: MutableMapping[int, list[TopN]] | None = None,
        logits: torch.Tensor | None = None,
        *,
        positions: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Sample a token for each row, and collect its top-n.

        A token is a function of the row's seed, index, position and logits; without a seed, each
        call uses a new one. A row that cannot be sampled (NaN, +inf, all -inf) gets `NO_TOKEN` and
        an entry in `sampling_errors`; other rows are unaffected. The logits are not changed.

        Args:
            last_token_logits: floating ``[B, V]``.
            sampling_params: Parameters of all rows, or one for each; their temperature, truncation,
                seed, top-n and `logprobs_mode`.
            vocab_size: Ids from it on are padding, never sampled, and not among the top-n.
            generation_started: bool ``[B]``: rows past their prompt; needed for top-n.
            top_n_logprobs_dict: Lists by row, to which this call appends the top-n: one entry if
                the row is past its prompt or requests the prompt's too.
            logits: floating ``[B, S, V]``: prompt rows, each of which appends an entry instead.
            positions: Absolute position of each row's token; 0 by default.

        Returns:
            int64 ``[B]`` on the device of the logits.

        Raises:
            ValueError: a shape does not fit, or a control needs a request's history.
        """
        if last_token_logits.dim() != 2:
            raise ValueError(f"last_token_logits must have shape [B, V], got {list(last_token_logits.shape)}")
        count, width = last_token_logits.shape
        params = [sampling_params] * count if isinstance(sampling_params, InferenceParams) else list(sampling_params)
        check_sampling(params, count, width, vocab_size, positions)
        samples = sample_rows(last_token_logits, params, vocab_size, positions)
        if any(one.top_n_logprobs for one in params):
            rows = samples, last_token_logits, vocab_size
            add_top_n(params, *rows, generation_started, top_n_logprobs_dict, logits)
        self.sampling_errors = samples.errors
        tokens = [NO_TOKEN if row in samples.errors else token for row, token in enumerate(samples.token_ids)]
        return torch.tensor(tokens, dtype=torch.int64, device=last_token_logits.device)

    # Requests

    def add_request(self, request: InferenceRequest, stream: TokenStream | None = None) -> None:
        """Queue a request for the dynamic batch.

        Args:
            request: Filled in step by step; see `InferenceRequest.status`.
            stream: Gets a copy of the request at each step that changes it.

        Raises:
            MaxSequenceLengthOverflowError: prompt and answer do not fit into the context.
            InvalidRequest: it cannot be served.
            ValueError: the id is in use, a static batch is unfinished, or the best of several
                answers is to be streamed.
        """
        with self._lock:
            if self._in_static_batch:
                raise ValueError("a static batch is unfinished; requests cannot join it")
            self._add([request], {} if stream is None else {request.request_id: stream})

    def suspend_request(self, request_id: RequestId) -> None:
        """Take a request out of the batch; it can be resumed.

        Raises `KeyError` if there is none of that id.
        """
        with self._lock:
            running = self._find(request_id)
            self._session.suspend(running.group.id)
            if running.request.status is not Status.SUSPENDED:
                running.request.status = Status.SUSPENDED
                self._paused.append(request_id)

    def resume_request(self, request_id: RequestId) -> None:
        """Resume a suspended request. Raises `KeyError` if it is not suspended."""
        with self._lock:
            running = self._find(request_id)
            self._session.resume(running.group.id)
            running.request.status = Status.ACTIVE

    def abort_request(self, request_id: RequestId) -> None:
        """End a request with the tokens it has; unknown ids are ignored."""
        with self._lock:
            running = next((one for one in self._running.values() if one.request.request_id == request_id), None)
            if running is not None:
                self._session.abort(running.group.id)
                self._close(running)

    def set_stop_word_finished_ids_callback(self, callback: StopWordCallback | None) -> None:
        """Set a callback that returns, at each step, the active requests to end.

        It is called with the ids of unfinished requests that got a token; the newest token is the
        last of their ``generated_tokens``, and is kept. So that it sees every token as the newest
        one, nothing is drafted meanwhile. None removes it.
        """
        self._stop_callback = callback
        self._session.stepper.speculator.is_enabled = callback is None

    # Batches

    async def async_generate_output_tokens_dynamic_batch(self) -> DynamicStep | None:
        """One step of the dynamic batch, off the event loop; None if there is nothing to compute.

        Raises:
            ValueError: the stop-word callback named a request that is not active; the step has been
                done.
        """
        return await asyncio.to_thread(self.generate_output_tokens_dynamic_batch)

    def generate_output_tokens_dynamic_batch(self) -> DynamicStep | None:
        """Same as `async_generate_output_tokens_dynamic_batch`, in the caller's thread."""
        with self._lock:
            return None if self._session.is_idle else self._step()

    def generate_all_output_tokens_static_batch(
        self,
        active_requests: Mapping[_Key, InferenceRequest],
        active_streams: Mapping[_Key, TokenStream] | None = None,
    ) -> Mapping[_Key, InferenceRequest]:
        """Generate a static batch, each request with its own parameters.

        Args:
            active_requests: Filled in.
            active_streams: Streams by the same keys; each gets a copy of its request at each step
                that changes it.

        Returns:
            `active_requests`. A request that failed has its error set; the others are unaffected.

        Raises:
            MaxSequenceLengthOverflowError: prompt and answer of a request do not fit into the
                context.
            InvalidRequest: a request cannot be served.
            ValueError: there are more answers than the engine's batch size, a stream has no
                request, or is of the best of several answers, or a dynamic batch is unfinished.
        """
        unknown = [key for key in active_streams or {} if key not in active_requests]
        if unknown:
            raise ValueError(f"active_streams has {unknown}, which are no keys of active_requests")
        streams = {active_requests[key].request_id: stream for key, stream in (active_streams or {}).items()}
        try:
            with self._lock:
                self._begin_static_batch(list(active_requests.values()), streams)
            while self._step_static_batch():
                pass
        except BaseException as error:
            for stream in streams.values():
                stream.finish(error)
            raise
        return active_requests

    def dummy_forward(self) -> None:
        """No-op: its purpose is collectives on an idle rank, and there is one rank."""

    # The step

    def _begin_static_batch(
        self, requests: Sequence[InferenceRequest], streams: Mapping[RequestId, TokenStream]
    ) -> None:
        if self._running or self._in_static_batch:
            raise ValueError(f"{len(self._running)} requests of a dynamic batch are unfinished")
        answers = sum(one.sampling_params.best_of or one.sampling_params.n for one in requests)
        if answers > self.engine.info.max_num_seqs:
            raise ValueError(f"batch size {answers} exceeds the maximum, {self.engine.info.max_num_seqs}")
        self._add(requests, streams)
        self._in_static_batch = True

    def _step_static_batch(self) -> bool:
        """One step; returns whether there is more to do.

        Between steps requests may be suspended, resumed and aborted.
        """
        more = False
        try:
            if self._session.is_idle:  # all requests are suspended
                self._session.wait()
            with self._lock:
                if self._running:
                    self._step()
                more = bool(self._running)
            return more
        except BaseException as error:
            for running in list(self._running.values()):
                if running.stream is not None:  # before it ends below as if all were well
                    running.stream.finish(error)
            raise
        finally:
            if not more:
                self._end_static_batch()

    def _end_static_batch(self) -> None:
        with self._lock:
            for running in list(self._running.values()):
                self._session.abort(running.group.id)
                self._close(running)
            self._in_static_batch = False

    def _add(self, requests: Sequence[InferenceRequest], streams: Mapping[RequestId, TokenStream]) -> None:
        """Check all, then queue all."""
        taken = {one.request.request_id for one in self._running.values()}
        for request_id in (one.request_id for one in requests):
            if request_id in taken:
                raise ValueError(f"request id {request_id!r} is taken")
            taken.add(request_id)
        for one in requests:
            params = one.sampling_params
            if one.request_id in streams and (params.best_of or params.n) > params.n:
                raise ValueError(
                    f"best_of of request {one.request_id!r} must be n: which answer is best shows at the end"
                )
        prompts = [self._prompt_tokens(one) for one in requests]
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            self._check_length(f"prompts[{index}]", request.sampling_params, len(prompt))
        wanted = [
            one.sampling_params.to_sampling_params(len(prompt)) for one, prompt in zip(requests, prompts, strict=True)
        ]
        named = [one.sampling_params.processors for one in requests]
        groups = self._session.prepare(prompts, wanted, named)
        for request, prompt, group in zip(requests, prompts, groups, strict=True):
            if request.prompt_tokens is None:
                request.prompt_tokens = prompt
            request.status = Status.ACTIVE
            self._running[group.id] = Running(request, group, streams.get(request.request_id))
            self._session.add(group)

    def _check_length(self, field: str, params: InferenceParams, prompt_length: int) -> None:
        total = prompt_length + (params.max_tokens(prompt_length) or 1)  # a scored prompt has a token that is dropped
        most = self.engine.info.context_length
        if total > most:
            raise MaxSequenceLengthOverflowError(field, f"{total} tokens in all are more than the context of {most}")

    def _step(self) -> DynamicStep:
        events = self._session.step()
        report = StepReport()
        touched: dict[str, Running] = {}
        for event in events:
            running = self._running[event.group.id]
            running.follow()
            touched[event.group.id] = running
            if not running.scores_only:
                report.add(running, event)
        try:
            self._finish_by_callback(touched)
        finally:  # the step has been done, whatever the callback raises
            for key, running in touched.items():
                if key in self._running:  # the callback may have ended it
                    self._stream(running)
                    if running.group.is_done:
                        self._close(running)
                if running.group.is_done:
                    report.finished.append(running.request.request_id)
        paused, self._paused = self._paused, []
        return report.step(paused)

    def _finish_by_callback(self, touched: Mapping[str, Running]) -> None:
        active = {one.request.request_id: one for one in touched.values() if not one.group.is_done}
        if self._stop_callback is None or not active:
            return
        named = list(self._stop_callback(list(active)))
        unknown = [one for one in named if one not in active]
        if unknown:
            raise ValueError(f"the stop-word callback named {unknown}, which are not active")
        for request_id in named:
            self._session.end(active[request_id].group.id, "stop")
            active[request_id].follow()

    def _close(self, running: Running) -> None:
        """Complete the request, and drop it."""
        running.complete()
        request = running.request
        assert request.prompt_tokens is not None
        keeps = request.sampling_params.detokenize_stop_sequence
        prompt = request.prompt
        if prompt is None:
            prompt = self.detokenize(self.tokenizer, request.prompt_tokens, False, not keeps)
        request.text = prompt + (request.generated_text or "")
        if request.sampling_params.return_segments:
            ids = request.prompt_tokens + request.generated_tokens
            _, segments = self.detokenize_generations(ids, len(ids), True, not keeps)
            request.segments = None if segments is None else segments[0]
        if running.stream is not None:
            running.stream.finish()
        del self._running[running.group.id]

    def _find(self, request_id: RequestId) -> Running:
        for running in self._running.values():
            if running.request.request_id == request_id:
                return running
        raise KeyError(request_id)
