"""Sampling controls that are fields of `SamplingParams` and run as processors: one order law for fields and chains.

An engine calls `with_field_processors` at admission. Penalties, bans, biases and the minimum length join the chain;
with a processor that acts at the temperature stage or later, so do temperature and truncation, because a request's
own truncation must not come after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context, Processor
from adapters.processors.length import MinTokens
from adapters.processors.masks import BannedTokens
from adapters.processors.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from adapters.processors.repetition import NoRepeatNgram
from adapters.processors.truncation import MinP, Temperature, TopK, TopP
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

# field, the value that asks for nothing, processor, its argument
_FIELDS: tuple[tuple[str, Any, type[Processor], str], ...] = (
    ("repetition_penalty", 1, RepetitionPenalty, "penalty"),
    ("frequency_penalty", 0, FrequencyPenalty, "penalty"),
    ("presence_penalty", 0, PresencePenalty, "penalty"),
    ("no_repeat_ngram_size", 0, NoRepeatNgram, "n"),
    ("bad_token_ids", [], BannedTokens, "token_ids"),
    ("min_tokens", 0, MinTokens, "n"),
)

# in the order of the law: temperature, then min-p, top-k, top-p
_LATE_FIELDS: tuple[tuple[str, Any, type[Processor], str], ...] = (
    ("temperature", 1, Temperature, "value"),
    ("min_p", 0, MinP, "p"),
    ("top_k", 0, TopK, "k"),
    ("top_p", 1, TopP, "p"),
)

_DRAWS = frozenset({"temperature", "top_k", "top_p", "min_p"})


def with_field_processors(
    params: SamplingParams,
    chain: ProcessorChain | None,
    prompt: Sequence[int],
    context: Context,
    extra: Sequence[Processor] = (),
    *,
    late: bool = False,
) -> tuple[SamplingParams, ProcessorChain | None]:
    """The parameters that are left to the sampler, and the chain with everything else.

    Args:
        params: Of the request.
        chain: The request's own processors, begun after its prompt and added to in place; None if it has none.
        prompt: Token ids of the prompt.
        context: Of the request, for the processors that are made here.
        extra: Processors that the engine adds, before those of the same stage.
        late: Temperature and truncation join the chain whatever is in it.

    Raises:
        InvalidRequest: a value is out of the bounds of its processor, or a control is given twice.
        ProcessorFailed: a processor raised on the prompt.
    """
    _refuse_twice(params, chain)
    added = [*extra, *_processors(params, _FIELDS, context)]
    if late or (chain is not None and chain.shapes_late):
        params, last = _late_processors(params, context)
        added += last
    if not added:
        return params, chain
    if chain is None:
        chain = ProcessorChain([], context)
        chain.start(prompt)
    chain.add(added)
    return params, chain


def _late_processors(params: SamplingParams, context: Context) -> tuple[SamplingParams, list[Processor]]:
    """A request that draws keeps drawing; one that named only processors of these stages wants to draw, too.

    One that is greedy by its own word stays so: temperature 0 comes before every processor of these stages.
    """
    fields = [getattr(params, name) for name in _DRAWS]
    if params.is_greedy and any(value is not None for value in fields):
        return params, Temperature.build(Temperature.Args(value=0.0), context)
    processors = _processors(params, _LATE_FIELDS, context)
    return replace(params, temperature=1.0, top_k=None, top_p=None, min_p=None), processors


def _processors(
    params: SamplingParams, table: tuple[tuple[str, Any, type[Processor], str], ...], context: Context
) -> list[Processor]:
    made: list[Processor] = []
    for name, neutral, processor, argument in table:
        value = getattr(params, name)
        if value is None or value == neutral:
            continue
        try:
            made += processor.build(processor.Args.model_validate({argument: value}), context)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"]
            raise InvalidRequest(f"sampling_params.{name}", f"{problem}, got {value!r}") from None
        except ArgumentError as error:
            raise InvalidRequest(f"sampling_params.{name}", error.problem) from None
    return made


def _refuse_twice(params: SamplingParams, chain: ProcessorChain | None) -> None:
    if chain is None:
        return
    named = {member.name for member in chain.members}
    for name, neutral, processor, _ in (*_FIELDS, *_LATE_FIELDS):
        value = getattr(params, name)
        if processor.name in named and value is not None and value != neutral:
            raise InvalidRequest(f"sampling_params.{name}", f"is set, and the processor {processor.name} is named too")
