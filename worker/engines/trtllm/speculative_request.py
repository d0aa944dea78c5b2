"""A request beside drafts, where TensorRT-LLM calls no logits processors."""

from __future__ import annotations

from typing import Any

from worker.engines.chain_members import begin
from worker.engines.refusals import check_refused
from worker.engines.request import EngineRequest
from worker.engines.trtllm.native_guides import FIELD, NativeGuides, guide_of
from worker.engines.trtllm.params import (
    ALWAYS_NATIVE,
    REFUSED,
    NativeRequest,
    Served,
    check_choices,
    fields_of,
    greedy,
    is_cold,
    sampling,
)
from worker.engines.trtllm.speculation import BACKEND
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import processor_controls

SAMPLES = "temperature"
"""Name in `Served.honoured` of a version that samples beside drafts; the others decode greedily."""

_NO_PROCESSORS = "needs a logits processor, and TensorRT-LLM calls none beside speculative decoding"


def speculative_request(request: EngineRequest, served: Served, guides: NativeGuides | None) -> NativeRequest:
    """A request in TensorRT-LLM's own fields alone.

    Args:
        request: The request.
        served: Controls and fields of the installed version.
        guides: The library's guided decoding, None where it has no backend for it.

    Raises:
        InvalidRequest: a field cannot be served here; it is named.
    """
    params, chain = request.params, request.chain
    check_refused(params, REFUSED)
    if chain is not None and chain.wants_receipt:  # before its seed, which the client may not have given
        problem = "lists the edits of processors, and TensorRT-LLM calls none beside speculative decoding"
        raise InvalidRequest("logits_processors.receipt", problem)
    _check_controls(params, served)
    ends = params.ends_with(served.eos_token_ids)
    guide, watched = None, None
    if chain is not None and chain.members:
        processor = guide_of(chain)
        if guides is None:
            problem = (
                f"cannot be enforced beside speculative decoding without {BACKEND}; start the worker with llguidance"
            )
            raise InvalidRequest(FIELD, problem)
        _check_guided(request, ends, served, guides)
        guide, watched = guides.guide(processor), chain
        begin(chain, request)
    native = fields_of(params, ends, served, len(request.generated_token_ids))
    drawn = greedy() if params.is_greedy or is_cold(params) else sampling(params, served.vocab_size)
    return NativeRequest(native | drawn, ends, guide=guide, watched=watched)


def _check_controls(params: SamplingParams, served: Served) -> None:
    """Refuse every control that would run as a processor, or that the library cannot sample by."""
    for control in processor_controls(type(params)):
        if control.refused is None and control.name not in ALWAYS_NATIVE and control.is_active(params):
            raise InvalidRequest(control.params_path, _NO_PROCESSORS)
    others: dict[str, Any] = {"embedding_bias": params.embedding_bias, "seed": params.seed, "logprobs": params.logprobs}
    if params.is_greedy:
        del others["seed"]  # which changes nothing
    for name, value in others.items():
        if value is not None:
            raise InvalidRequest(f"sampling_params.{name}", _NO_PROCESSORS)
    if params.logits_processors:
        raise InvalidRequest("sampling_params.logits_processor", _NO_PROCESSORS)
    check_choices(params, None)
    if not params.is_greedy and SAMPLES not in served.honoured:
        problem = "this version of TensorRT-LLM decodes greedily beside speculative decoding; ask for 0"
        raise InvalidRequest("sampling_params.temperature", problem)


def _check_guided(request: EngineRequest, ends: frozenset[int], served: Served, guides: NativeGuides) -> None:
    """Refuse what the library's guided decoding does otherwise than the grammar processors."""
    params, chain = request.params, request.chain
    assert chain is not None
    if request.generated_token_ids:
        problem = "cannot go on after a migration: TensorRT-LLM would begin the guide again"
        raise InvalidRequest(FIELD, f"{problem}; this worker runs with speculative decoding")
    if params.n > 1:
        raise InvalidRequest("sampling_params.n", "must be 1 beside a guide: choices would share it")
    if params.ignore_eos:
        raise InvalidRequest("sampling_params.ignore_eos", "must be false beside a guide: it ends with an end token")
    if not ends <= set(served.eos_token_ids) or guides.end_token_id not in ends:
        problem = "must be the model's own beside a guide: TensorRT-LLM ends a complete text with no other token"
        raise InvalidRequest("sampling_params.stop_token_ids", problem)
