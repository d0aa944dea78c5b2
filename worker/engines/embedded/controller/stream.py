"""Streaming: copies of unfinished requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engines.embedded.controller.state import Running
from worker.engines.embedded.controller.text import Texts
from worker.engines.embedded.controller.types import InferenceParams, InferenceRequest, RequestId, TokenStream


class Streaming(Texts):
    """The part of `TextGenerationController` that writes to streams."""

    def stream_tokens(
        self,
        sampling_params: InferenceParams,
        request_ids: Sequence[RequestId],
        requests: Sequence[InferenceRequest],
        streams: Sequence[TokenStream],
        generation_started: Sequence[bool] | torch.Tensor,
        is_generation_done: Sequence[bool] | torch.Tensor,
        tokens: Sequence[Sequence[int]] | torch.Tensor,
        prompt_lengths: Sequence[int] | torch.Tensor,
        generated_lengths: Sequence[int] | torch.Tensor,
        output_log_probs: Sequence[Sequence[float] | None] | torch.Tensor | None,
        *,
        texts: Sequence[str | None] | None = None,
    ) -> None:
        """Give each stream a request with what has been generated so far.

        Skips streams that are finished, whose request has not started, or without a new token; a
        stream ends when its generation is done or has its full length.

        Args:
            sampling_params: Parameters of all requests.
            request_ids: One per stream, as all following arguments.
            requests: The requests to copy.
            streams: Streams of the requests.
            generation_started: Whether the prompt is done.
            is_generation_done: Whether the generation is done.
            tokens: Ids, prompt and answer.
            prompt_lengths: Tokens of the prompt.
            generated_lengths: Tokens of the answer.
            output_log_probs: Log probabilities of all tokens but the first, or None.
            texts: The answers' texts, made from the tokens by default.
        """
        for index, (request_id, request, stream) in enumerate(zip(request_ids, requests, streams, strict=True)):
            start, count = int(prompt_lengths[index]), int(generated_lengths[index])
            most = sampling_params.max_tokens(start)
            if bool(generation_started[index]) and not stream.finished and most != 0:
                ids = [int(one) for one in tokens[index][start : start + count]]
                log_probs = None if output_log_probs is None else output_log_probs[index]
                text = None if texts is None else texts[index]
                with_segments = sampling_params.return_segments
                stream.put(self._partial(request_id, request, ids, start, log_probs, text, with_segments))
                if bool(is_generation_done[index]) or count == most:
                    stream.finish()

    def _stream(self, running: Running) -> None:
        request, answer = running.request, running.group.answers[0]
        if running.stream is None or running.stream.finished:
            return
        count, done = answer.num_shown, running.group.is_done
        if count == running.num_streamed and not done:
            return
        running.num_streamed = count
        log_probs = None
        if request.sampling_params.return_log_probs:
            padding = [0.0] * (len(running.group.prompt_token_ids) - 1)  # for the prompt's, which are not streamed
            log_probs = padding + [one[0].logprob for one in answer.token_logprobs]
        self.stream_tokens(
            request.sampling_params,
            [request.request_id],
            [request],
            [running.stream],
            [True],
            [done],
            [running.group.prompt_token_ids + answer.token_ids],
            [len(running.group.prompt_token_ids)],
            [count],
            [log_probs],
            texts=[None if answer.text is None else answer.text.shown],
        )

    def _partial(
        self,
        request_id: RequestId,
        request: InferenceRequest,
        ids: list[int],
        prompt_length: int,
        log_probs: Sequence[float] | torch.Tensor | None,
        text: str | None,
        with_segments: bool,
    ) -> InferenceRequest:
        segments: list[list[str]] | None = None
        if text is None or with_segments:  # else the whole answer would be decoded again at each token
            own, segments = self.detokenize_generations(ids, len(ids), with_segments)
            text = own if text is None else text
        shown = None
        if log_probs is not None:
            shown = [float(one) for one in log_probs[prompt_length - 1 : prompt_length - 1 + len(ids)]]
        return InferenceRequest(
            request_id=request_id,
            prompt=request.prompt,
            prompt_tokens=request.prompt_tokens,
            sampling_params=request.sampling_params,
            status=request.status,
            generated_text=text,
            generated_segments=None if segments is None else segments[0],
            generated_tokens=ids,
            generated_log_probs=shown,
            generated_length=len(ids),
        )
