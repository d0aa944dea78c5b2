"""State of a running request, and of a step's report, in the `TextGenerationController`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engines import TokenLogprob
from worker.engines.embedded.controller.types import (
    DynamicStep,
    InferenceParams,
    InferenceRequest,
    RequestId,
    Status,
    TokenStream,
    TopN,
)
from worker.engines.embedded.offline import Answer, Event, RequestGroup

_STATUS = {"error": Status.FAILED, "cancelled": Status.CANCELLED}


class Running:
    """A request and the session's group of answers to it.

    Args:
        request: Filled in step by step.
        group: The session's group.
        stream: The request's stream, if any.

    Attributes:
        num_streamed: Tokens passed to the stream.
        is_reported: Whether a step has reported it.
        scores_only: Only the prompt is scored; the one generated token is dropped.
    """

    def __init__(self, request: InferenceRequest, group: RequestGroup, stream: TokenStream | None) -> None:
        self.request = request
        self.group = group
        self.stream = stream
        self.num_streamed = 0
        self.is_reported = False
        self.scores_only = request.sampling_params.max_tokens(len(group.prompt_token_ids)) == 0

    def follow(self) -> None:
        """Update the request's tokens."""
        if not self.scores_only:
            self.request.generated_tokens = list(self.group.answers[0].token_ids)
            self.request.generated_length = len(self.request.generated_tokens)

    def complete(self) -> None:
        """Fill in the results of all answers."""
        request, params, result = self.request, self.request.sampling_params, self.group.result()
        request.prompt_logits = result.context_logits
        self._fill_prompt(params)
        best = self.group.best[0]
        first = result.outputs[0]
        request.status = _STATUS.get(first.finish_reason, Status.COMPLETED)
        request.finish_reason, request.stop_reason, request.error = first.finish_reason, first.stop_reason, first.error
        if self.scores_only:
            request.generated_text = ""
            if params.return_log_probs:
                request.generated_log_probs = []
            return
        request.completions = result.outputs
        request.generated_tokens, request.generated_text = first.token_ids, first.text
        request.generated_length = len(first.token_ids)
        request.generated_logits = first.generation_logits
        request.tpot = [
            now - before for before, now in zip([0.0, *first.token_times_s], first.token_times_s, strict=False)
        ]
        if params.return_log_probs:
            request.generated_log_probs = [one[0].logprob for one in best.token_logprobs]
        if params.top_n_logprobs:
            request.generated_top_n_logprobs = [entry(one) for one in best.token_logprobs]

    def _fill_prompt(self, params: InferenceParams) -> None:
        collector = self.group.answers[0].collector
        scores = collector.prompt_logprobs if collector is not None else None
        if scores is None:
            return
        known = [one for one in scores if one is not None]
        if params.return_log_probs:
            self.request.prompt_log_probs = [one[0].logprob for one in known]
        if params.top_n_logprobs:
            self.request.prompt_top_n_logprobs = [entry(one) for one in known]


class StepReport:
    """Accumulates a `DynamicStep`."""

    def __init__(self) -> None:
        self.finished: list[RequestId] = []
        self._ids: list[RequestId] = []
        self._choices: list[int] = []
        self._tokens: list[list[int]] = []
        self._places: dict[tuple[RequestId, int], int] = {}
        self._log_probs: list[list[float] | None] = []
        self._top_n: dict[int, list[TopN]] = {}

    def add(self, running: Running, event: Event) -> None:
        """Add one answer's token; an earlier one of the same step was an accepted draft."""
        if event.token_id is None:
            return
        params = running.request.sampling_params
        index = self._place(running, event.answer)
        self._tokens[index].append(event.token_id)
        entries = self._entries(running, event)
        if params.return_log_probs:
            self._log_probs[index] = [*(self._log_probs[index] or ()), *(one[0].logprob for one in entries)]
        if params.top_n_logprobs:
            self._top_n.setdefault(index, []).extend(entry(one) for one in entries)

    def _place(self, running: Running, answer: Answer) -> int:
        """The answer's index in the report."""
        key = running.request.request_id, answer.request.choice
        if key not in self._places:
            self._places[key] = len(self._ids)
            self._ids.append(key[0])
            self._choices.append(key[1])
            self._tokens.append([])
            self._log_probs.append(None)
        return self._places[key]

    @staticmethod
    def _entries(running: Running, event: Event) -> list[list[TokenLogprob]]:
        """New log probabilities: of the prompt, once, and of the token."""
        collector = event.answer.collector
        scores = None if collector is None or running.is_reported else collector.prompt_logprobs
        running.is_reported = True
        return [one for one in (*(scores or ()), event.logprobs) if one is not None]

    def _accepted_tokens(self) -> torch.Tensor | None:
        """int64 ``[answers, most accepted]``, padded with -1; None where no draft was accepted."""
        width = max(map(len, self._tokens), default=1) - 1
        rows = [tokens[:-1] + [-1] * (width + 1 - len(tokens)) for tokens in self._tokens]
        return torch.tensor(rows, dtype=torch.int64) if width else None

    def step(self, paused: list[RequestId]) -> DynamicStep:
        """The whole."""
        return {
            "active_request_ids": self._ids,
            "choices": self._choices,
            "sample": torch.tensor([tokens[-1] for tokens in self._tokens], dtype=torch.int64),
            "log_probs": self._log_probs,
            "top_n_logprobs": self._top_n or None,
            "finished_request_ids": self.finished,
            "newly_paused_request_ids": paused,
            "accepted_tokens": self._accepted_tokens(),
            "cuda_graph_request_count": None,
        }


def entry(logprobs: Sequence[TokenLogprob]) -> TopN:
    """The top-n part of a token's log probabilities."""
    return {one.token_id: one.logprob for one in logprobs[1:]}
