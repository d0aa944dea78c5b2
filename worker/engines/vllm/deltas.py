"""Deltas of vLLM's outputs, which hold the tokens since the last one (``RequestOutputKind.DELTA``).

The token that ended an answer is the last one of vLLM's; here it is shown exactly if the request
wants it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.engines import FinishReason, QueueTimes, TokenDelta, TokenLogprob
from worker.engines.library_outputs import end_choice, entries_of_mapping

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(slots=True)
class Reader:
    """Reads the outputs of one request.

    Attributes:
        prompt_token_ids: The prompt, without the answer so far of a migrated request.
        shows_end: Whether the token that ended the answer is part of it.
        num_logprobs: Top-n to report for each token, None for no log probabilities.
        num_prompt_logprobs: The same for each token of the prompt.
        num_sent: Tokens read so far.
    """

    prompt_token_ids: list[int]
    shows_end: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_sent: int = 0

    def read(self, output: Any) -> TokenDelta:
        """The delta of a ``RequestOutput``."""
        (choice,) = output.outputs
        delta = TokenDelta(list(choice.token_ids), num_cached_tokens=int(output.num_cached_tokens or 0))
        if self.num_logprobs is not None and choice.logprobs is not None:
            pairs = zip(delta.token_ids, choice.logprobs, strict=True)
            delta.logprobs = [entries_of_mapping(token, found, self.num_logprobs) for token, found in pairs]
        if self.num_sent == 0 and self.num_prompt_logprobs is not None and output.prompt_logprobs:
            delta.prompt_logprobs = self._of_prompt(output.prompt_logprobs)
        self.num_sent += len(delta.token_ids)
        _note_times(delta, output.metrics)
        if choice.finish_reason is not None:
            end_choice(delta, "vLLM", _FINISH, str(choice.finish_reason), choice.stop_reason)
            self._settle_end(delta)
        return delta

    def _of_prompt(self, found: Any) -> list[list[TokenLogprob] | None]:
        count = self.num_prompt_logprobs or 0
        pairs = zip(self.prompt_token_ids, found, strict=False)
        return [None if each is None else entries_of_mapping(token, each, count) for token, each in pairs]

    def _settle_end(self, delta: TokenDelta) -> None:
        if delta.finish_reason != "stop" or self.shows_end or delta.token_ids[-1:] != [delta.stop_reason]:
            return
        del delta.token_ids[-1]
        if delta.logprobs is not None:
            delta.end_logprobs = delta.logprobs.pop()


def _note_times(delta: TokenDelta, metrics: Any) -> None:
    """Preemptions and queue times, where this version reports them."""
    if metrics is None:
        return
    delta.num_preemptions = int(metrics.num_preemptions)
    if metrics.scheduled_ts:
        delta.queue_times = QueueTimes(metrics.scheduled_ts, metrics.scheduled_ts)
