"""Fields of `SamplingParams` that an engine does not serve, and other refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict

from worker.errors import InvalidRequest, Overloaded
from worker.sampling import SamplingParams, sampling_controls

REFUSED_EVERYWHERE = {one.name: one.refused for one in sampling_controls(SamplingParams) if one.refused is not None}
"""Fields that no engine serves, with the reason that stands beside the field."""

IRRELEVANT = frozenset(one.name for one in sampling_controls(SamplingParams) if one.is_about_text)
"""Fields about text or padding: token ids go in and come out, whatever they say."""

RUN_AS_PROCESSORS = frozenset(
    one.name for one in sampling_controls(SamplingParams) if one.runs_as and one.refused is None
)
"""Fields that every engine serves: in its sampler, natively, or as a logits processor."""

_DEFAULTS = asdict(SamplingParams())


def check_refused(params: SamplingParams, refused: Mapping[str, str], allowed: AbstractSet[str] = frozenset()) -> None:
    """Refuse fields that an engine does not serve.

    Args:
        params: Sampling parameters of the request.
        refused: Fields that are not served, with the reason.
        allowed: Fields among them that the caller serves itself.

    Raises:
        InvalidRequest: naming the first such field that differs from its default.
    """
    for name, reason in refused.items():
        if getattr(params, name) != _DEFAULTS[name] and name not in allowed:
            raise InvalidRequest(f"sampling_params.{name}", reason)


def check_queue(num_requests: int, max_num_seqs: int, max_queue: int, *, is_first: bool = False) -> None:
    """Raises `Overloaded` if as many requests are unfinished as may run and wait.

    ``is_first``: it is the only request of its client, whom a full queue of others does not keep
    out; as many of these as may run are taken beyond it.
    """
    if num_requests >= max_num_seqs + max_queue + (max_num_seqs if is_first else 0):
        raise Overloaded(
            f"the queue is full: {max_num_seqs} requests may run and {max_queue} wait; retry later or elsewhere"
        )


def check_prompt(prompt: Sequence[int], vocab_size: int, context_length: int) -> None:
    """Raises `InvalidRequest` if a prompt is empty, too long or out of the vocabulary."""
    if not prompt:
        raise InvalidRequest("prompt_token_ids", "must hold at least one token")
    if len(prompt) >= context_length:
        problem = f"must be shorter than the context of {context_length} tokens, got {len(prompt)}"
        raise InvalidRequest("prompt_token_ids", problem)
    check_ids("prompt_token_ids", prompt, vocab_size)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` for the field `name` if one of its ids is out of the vocabulary."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return  # sooner than the search for the first wrong one
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            problem = f"must be token ids from 0 to {vocab_size - 1}, got {token!r} at index {position}"
            raise InvalidRequest(name, problem)
