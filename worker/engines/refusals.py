"""Fields of `SamplingParams` that an engine does not serve, and the refusal of a request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

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

_DEFAULTS = SamplingParams()


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
        if name not in allowed and getattr(params, name) != getattr(_DEFAULTS, name):
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
