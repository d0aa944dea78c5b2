"""Admission to the embedded engine: an `EngineRequest` is checked and becomes a `Request`."""

from __future__ import annotations

import secrets
from collections.abc import Set as AbstractSet

from adapters.chain import ProcessorFailed
from adapters.contract import Context
from adapters.vocabulary import Vocabulary
from worker.engines.chain_members import begin, other_members
from worker.engines.embedded.adapters import LoadedAdapter
from worker.engines.embedded.companions import companion_of
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.plan import Model, Request
from worker.engines.embedded.sampling.chain_replay import resume
from worker.engines.embedded.sampling.prompt_logprobs import LogitsCollector
from worker.engines.embedded.sampling.truncation import Controls
from worker.engines.refusals import (
    REFUSED_EVERYWHERE,
    RUN_AS_PROCESSORS,
    check_ids,
    check_prompt,
    check_refused,
)
from worker.engines.request import EngineRequest, KeepKv
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams
from worker.sampling.field_processors import with_field_processors

SAMPLED = frozenset(Controls.__dataclass_fields__)
"""Controls of temperature and truncation that the sampler applies; others run as processors."""

_SERVED_HERE = frozenset(
    {
        "end_id",
        "max_tokens",
        "stop_token_ids",
        "include_stop_str_in_output",
        "embedding_bias",
        "logits_processor",
        "logprobs_mode",
        "seed",
        "logprobs",
        "prompt_logprobs",
        "ignore_eos",
    }
)

HONOURED = _SERVED_HERE | RUN_AS_PROCESSORS
"""Fields that are served."""

REFUSED = {
    "n": "the embedded engine answers once per request",
    "best_of": "the embedded engine answers once per request",
    **REFUSED_EVERYWHERE,
    "apply_batched_logits_processor": "the embedded engine has no batched logits processor",
    "lookahead_config": "the embedded engine does not look ahead",
}
"""Fields that are not served, with the reason; refused when they differ from their default."""


def admit(
    engine_request: EngineRequest,
    number: int,
    model: Model,
    context_length: int,
    adapter: LoadedAdapter | None = None,
    *,
    allowed: AbstractSet[str] = frozenset(),
    draft_model: DraftModel | None = None,
) -> Request:
    """Check a request and make the engine's own record of it.

    Args:
        engine_request: Request to check.
        number: Id of the request within the engine.
        model: Model that answers.
        context_length: Longest prompt + answer, in tokens.
        adapter: LoRA adapter that computes it, None for the model itself.
        allowed: Fields of `REFUSED` that the caller serves itself.
        draft_model: Draft model of the engine, None if it has none.

    Raises:
        InvalidRequest: naming the first field that cannot be served, and why.
    """
    params, chain = engine_request.params, engine_request.chain
    check_refused(params, REFUSED, allowed)
    tokens = list(engine_request.token_ids)
    check_prompt(tokens, model.vocab_size, context_length)
    prompt = tokens[: len(engine_request.prompt_token_ids)]
    end_ids = end_ids_of(params, model)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    context = Context(Vocabulary(model.vocab_size), end_ids, seed, engine_request.choice)
    others = other_members(params, number, model.vocab_size)
    try:
        if chain is not None:
            begin(chain, engine_request)
        left, chain = with_field_processors(params, chain, prompt, context, others, by_sampler=SAMPLED)
        request = Request(
            id=engine_request.id,
            number=number,
            params=left,
            tokens=tokens,
            prompt_length=len(prompt),
            limit=context_length if params.max_tokens is None else min(len(prompt) + params.max_tokens, context_length),
            end_ids=end_ids,
            seed=seed,
            chain=chain,
            choice=engine_request.choice,
            hidden_end_ids=engine_request.hidden_end_ids,
            cache_salt=engine_request.cache_salt,
            adapter=adapter,
            client=engine_request.hints.client,
            speculates=chain is None or chain.speculates,
            prediction=engine_request.hints.prediction,
        )
        if engine_request.generated_token_ids:  # those of its prompt came with the first of these
            request.tap = resume(request, model)
        elif params.prompt_logprobs is not None:
            request.tap = LogitsCollector(prompt, top_n=params.prompt_logprobs, never=model.undecodable_ids)
    except ProcessorFailed as error:
        raise InvalidRequest("sampling_params.logits_processor", str(error)) from error
    if chain is not None:
        chain.receipt.numerics = model.numerics
    answers = not isinstance(engine_request.kv, KeepKv)
    request.companion = companion_of(request, context_length, draft_model, answers=answers)
    return request


def end_ids_of(params: SamplingParams, model: Model) -> frozenset[int]:
    """The ids that end an answer; without ``end_id`` the model's own too, unless ``ignore_eos``."""
    check_ids("sampling_params.stop_token_ids", params.stop_token_ids or (), model.vocab_size)
    if params.end_id is not None and params.end_id != -1:
        check_ids("sampling_params.end_id", (params.end_id,), model.vocab_size)
    named = params.end_token_ids - {-1}
    if params.end_id is None and not params.ignore_eos:
        return named | frozenset(model.eos_token_ids)
    return named
