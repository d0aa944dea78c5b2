"""One sampled token appended to a request: its chain accepts it, and the end is detected."""

from __future__ import annotations

from adapters.chain import ProcessorChain, ProcessorFailed
from worker.engines.embedded.plan import Output, Request, Samples


def advance(request: Request, samples: Samples, row: int) -> Output:
    """Append the token sampled in `row` to `request`; returns its output."""
    chain = request.chain
    if samples.errors and row in samples.errors:
        return Output(request.id, finish_reason="error", error=samples.errors[row], chain=chain)
    token = samples.token_ids[row]
    logprobs = samples.logprobs.get(row) if samples.logprobs else None
    request.append(token)
    ends = token in request.end_ids or len(request.tokens) >= request.limit
    output = Output(request.id, token, logprobs)
    if request.weights is not None and request.weights is not request.named_weights:
        output.weights = (len(request.tokens) - 1 - request.prompt_length, request.weights)
        request.named_weights = request.weights
    if chain is not None:
        if chain.backtracks:
            try:
                position = _rewind_position(request, chain, token, ends)
            except ProcessorFailed as failure:
                return Output(request.id, finish_reason="error", error=str(failure), chain=chain)
            if position is not None:
                return Output(request.id, rewound_to=position)
        if chain.receipt.attribution and row in samples.processed:
            chain.receipt.add_logprob(len(request.tokens) - 1, samples.processed[row])
        output.engine_data = _accept(chain, token, len(request.tokens) - 1, ends)
        try:
            output.is_too_short = chain.is_too_short
        except ProcessorFailed as failure:
            return Output(request.id, finish_reason="error", error=str(failure), chain=chain)
    if not ends:
        return output
    output.chain, output.finish_reason = chain, "length"
    if token in request.end_ids:
        output.finish_reason, output.stop_reason = "stop", token
        if not request.shows(token):
            output.end_logprobs = output.logprobs
            output.token_id = output.logprobs = None
    return output


def _rewind_position(request: Request, chain: ProcessorChain, token: int, ends: bool) -> int | None:
    """Position that a backtracking chain rewinds to, to be sampled again; None for none.

    The chain accepts `token`, unless it is an end token that is not shown and the chain rewinds
    before it.

    Raises:
        ProcessorFailed: see `ProcessorChain.rewind_if_asked`.
    """
    is_shown = request.shows(token)
    position = None if is_shown else chain.rewind_if_asked(request.num_sent, ends=ends)
    if position is None:
        chain.accept(token, len(request.tokens) - 1)
    return chain.rewind_if_asked(request.num_sent, ends=ends) if is_shown else position


def _accept(chain: ProcessorChain, token_id: int, position: int, ends: bool) -> dict[str, object] | None:
    """Let the chain accept a token; returns its receipt so far if wanted, with attribution at the
    end.
    """
    chain.accept(token_id, position)
    return {"logits_processors": chain.receipt.as_json(attribution=ends)} if chain.wants_receipt else None
