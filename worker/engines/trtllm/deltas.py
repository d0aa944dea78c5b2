"""Deltas of TensorRT-LLM's cumulative outputs.

Its ids may shrink at the end, when a stop word is removed, and whether the token that ended an
answer is among them depends on its kind and on the version; here it is shown exactly if the request
wants it. Of several sequences only the last one to end gets a finish reason, and the first token of
a prefill worker may not count towards the length limit: so end tokens and the limit are detected
here, whatever TensorRT-LLM reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.engines import FinishReason, TokenDelta, TokenLogprob
from worker.engines.library_outputs import end_choice, entries_of_mapping, finite

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "not_finished": "length",  # of a context_only request: its one token
}


@dataclass(slots=True)
class Cursor:
    """State of one choice: the part of it that has been sent.

    Attributes:
        index: The choice.
        end_token_ids: Ids that end the answer.
        default_end: The end token that TensorRT-LLM was given, None if it was given none.
        shows_end: Whether the id that ended the answer is part of it.
        num_logprobs: Top-n to report for each token, None for no log probabilities.
        max_tokens: Longest answer, None for TensorRT-LLM's own limit.
        num_sent: Tokens sent so far.
        finished: Whether the last delta has been made.
    """

    index: int
    end_token_ids: frozenset[int]
    default_end: int | None = None
    shows_end: bool = False
    num_logprobs: int | None = None
    max_tokens: int | None = None
    num_sent: int = 0
    finished: bool = field(default=False)

    def advance(self, output: Any, *, is_last: bool = False) -> TokenDelta | None:
        """The new part of a ``CompletionOutput``, None if nothing is; ``is_last``: it is final."""
        if self.finished:
            return None
        tokens = list(output.token_ids or ())
        delta = TokenDelta(tokens[self.num_sent :], self.index)
        if output.finish_reason is not None:
            end_choice(delta, "TensorRT-LLM", _FINISH, str(output.finish_reason), output.stop_reason)
        elif is_last:
            self._finish_unsaid(delta)
        self._end_at_limit(delta)
        self._end_at_first(delta)
        if self.num_logprobs is not None and output.logprobs:
            shown = output.logprobs[self.num_sent : self.num_sent + len(delta.token_ids)]
            delta.logprobs = [entries_of_mapping(t, each, self.num_logprobs) for t, each in zip(delta.token_ids, shown)]  # noqa: B905
        self._settle_end(delta, output.logprobs)
        self.num_sent += len(delta.token_ids)
        self.finished = delta.finish_reason is not None
        return delta if delta.token_ids or self.finished else None

    def _finish_unsaid(self, delta: TokenDelta) -> None:
        """A sequence that ended without a reason, an end token or its last token.

        This version hides the end token.
        """
        if self.default_end is None:
            delta.finish_reason, delta.error = "error", "TensorRT-LLM ended the request without a reason"
        else:
            delta.finish_reason = "stop"

    def _end_at_limit(self, delta: TokenDelta) -> None:
        if self.max_tokens is None or self.num_sent + len(delta.token_ids) < self.max_tokens:
            return
        del delta.token_ids[self.max_tokens - self.num_sent :]
        delta.finish_reason, delta.stop_reason, delta.error = "length", None, None

    def _end_at_first(self, delta: TokenDelta) -> None:
        """The first end token ends the answer, whether TensorRT-LLM stops there or not."""
        for index, token_id in enumerate(delta.token_ids):
            if token_id in self.end_token_ids:
                del delta.token_ids[index + 1 :]
                delta.finish_reason, delta.stop_reason = "stop", token_id
                return

    def _settle_end(self, delta: TokenDelta, scores: Sequence[Mapping[int, Any]] | None) -> None:
        """Show the token that ended the answer, or not.

        Args:
            delta: The last delta.
            scores: ``CompletionOutput.logprobs``, which keep those of a stop word that was removed.
        """
        if delta.finish_reason != "stop":
            return
        if delta.stop_reason is None:
            delta.stop_reason = self.default_end
        ended_by, among = delta.stop_reason, delta.token_ids[-1:] == [delta.stop_reason]
        if not self.shows_end:
            if among:
                del delta.token_ids[-1:]
            self._hide_scores(delta, scores)
        elif not among and ended_by is not None:
            if self.num_logprobs is not None:
                delta.finish_reason = "error"
                delta.error = "this version of TensorRT-LLM reports no log probability of the token that ended it"
            else:
                delta.token_ids.append(ended_by)

    def _hide_scores(self, delta: TokenDelta, scores: Sequence[Mapping[int, Any]] | None) -> None:
        """Leave the log probabilities of the shown tokens, and beside them the end token's."""
        if delta.logprobs is None or self.num_logprobs is None:
            return
        del delta.logprobs[len(delta.token_ids) :]
        behind = (scores or ())[self.num_sent + len(delta.token_ids) :][:1]
        if delta.stop_reason is not None and behind and delta.stop_reason in behind[0]:
            delta.end_logprobs = entries_of_mapping(delta.stop_reason, behind[0], self.num_logprobs)


def entries_of(step: Sequence[tuple[int, float, int]]) -> list[TokenLogprob]:
    """The same from a chain's report."""
    return [TokenLogprob(token_id, finite(logprob), rank) for token_id, logprob, rank in step]
