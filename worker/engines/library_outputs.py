"""Outputs of a library in the worker's form: ends of answers, and log probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.engines import LEAST_LOGPROB, FinishReason, TokenDelta, TokenLogprob


def end_choice(
    delta: TokenDelta, library: str, known: Mapping[str, FinishReason], reason: str, stop_reason: Any
) -> None:
    """End a choice as the library says.

    Args:
        delta: The choice's last delta.
        library: The library's name, for messages.
        known: The library's reasons for which a choice ends without an error.
        reason: The library's reason.
        stop_reason: The stop token id that ended the choice; anything else is not shown.
    """
    finish = known.get(reason)
    if finish is None:
        delta.finish_reason, delta.error = "error", f"{library} ended the request: {reason}"
        return
    delta.finish_reason = finish
    delta.stop_reason = stop_reason if type(stop_reason) is int else None


def entries_of_mapping(token_id: int, found: Mapping[int, Any], count: int) -> list[TokenLogprob]:
    """The token itself first, whatever the library's order; then the top ``count`` by rank, without
    those that could not have been sampled.

    Args:
        token_id: The token.
        found: Objects with ``logprob`` and ``rank`` by token id.
        count: Number of the most likely tokens.
    """
    entries = [TokenLogprob(each, finite(float(at.logprob)), int(at.rank or 0)) for each, at in found.items()]
    sampled = [entry for entry in entries if entry.token_id == token_id]
    top = [entry for entry in entries if 0 < entry.rank <= count and entry.logprob > LEAST_LOGPROB]
    return [*sampled, *sorted(top, key=lambda entry: entry.rank)]


def finite(logprob: float) -> float:
    """A log probability that JSON can say: at least `LEAST_LOGPROB`, also for NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
