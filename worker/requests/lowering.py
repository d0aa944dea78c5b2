"""A `GenerationRequest` → the `SamplingParams` that an engine takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker.errors import InvalidRequest
from worker.requests.request import GenerationRequest
from worker.sampling import SamplingParams


def lower(
    request: GenerationRequest,
    eos_token_ids: Sequence[int],
    logits_processors: Sequence[Callable[..., None]] = (),
    seed: int | None = None,
) -> SamplingParams:
    """Sampling parameters of ``request``.

    The model's end tokens end the answer unless ``ignore_eos`` is set, whatever the request's own
    lists say. If any stop token is to be shown, the engine shows all of them and
    `worker.requests.response` drops the hidden ones again, because `SamplingParams` has one switch
    for both kinds. ``seed`` takes the place of the request's own.

    Raises:
        InvalidRequest: `SamplingParams` refuses a value.
    """
    ends = request.stop_token_ids | request.stop_token_ids_visible | request.stop_token_ids_hidden
    if not request.ignore_eos:
        ends |= frozenset(eos_token_ids)
    try:
        return SamplingParams(
            end_id=eos_token_ids[0] if eos_token_ids else None,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=sorted(ends) or None,
            include_stop_str_in_output=bool(request.shown_stop_token_ids),
            ignore_eos=request.ignore_eos,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed if seed is None else seed,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logprobs=request.logprobs,
            logits_processor=list(logits_processors) or None,
            detokenize=False,
        )
    except ValueError as error:
        field, _, problem = str(error).partition(" ")
        raise InvalidRequest(f"sampling_options.{field}", problem) from None
