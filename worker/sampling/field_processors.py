"""Fields of `SamplingParams` that run as logits processors: one order law for both.

The operator's policy is applied to fields by it (`worker.engines.chain_builder`), and an engine
calls `with_field_processors` at admission: penalties, bans, biases and the minimum length join the
chain. With a processor that acts at the temperature stage or later, so do temperature and
truncation, because a request's own truncation must not come after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from adapters.catalog import FieldValue, Requested, SelectionError
from adapters.chain import ProcessorChain
from adapters.contract import ArgumentError, Context, Processor, Scope
from adapters.processors.truncation import Temperature
from worker.errors import InvalidRequest
from worker.sampling.control import Control, RunsAs, cached, sampling_controls
from worker.sampling.params import SamplingParams


@cached
def processor_controls(record: type) -> tuple[Control, ...]:
    """The controls of ``record`` that run as processors."""
    return tuple(one for one in sampling_controls(record) if one.runs_as)


@cached
def _engine_controls(record: type, late: bool) -> tuple[tuple[Control, RunsAs], ...]:
    """Controls that engines serve and that run as processors, early or late in the order law."""
    served = (one for one in processor_controls(record) if one.refused is None)
    return tuple((one, runs_as) for one in served for runs_as in one.runs_as if runs_as.is_late == late)


def late_controls(record: type) -> tuple[Control, ...]:
    """The controls of temperature and truncation, which a sampler can apply itself."""
    return tuple(one for one, _ in _engine_controls(record, late=True))


def field_values(
    params: SamplingParams, *, served: bool = False, guide_scope: Scope = "all"
) -> list[tuple[Control, FieldValue]]:
    """The fields that are set and run as processors, as what a client asks for by name.

    Args:
        params: Sampling parameters of the request.
        served: Errors name the field of the request, not that of `SamplingParams`.
        guide_scope: Part of the generation in which a grammar holds.
    """
    found = []
    for control in processor_controls(type(params)):
        value = getattr(params, control.name)
        if value is None:
            continue
        path = control.path if served else control.params_path
        for runs_as in control.runs_as:
            argument = runs_as.value_of(value)
            if argument is not None:
                args = {runs_as.argument: argument, **runs_as.fixed}
                scope = "all" if runs_as.guide is None else guide_scope
                requested = Requested(runs_as.processor.name, args, scope, path)
                found.append((control, FieldValue(requested, bool(argument == control.neutral))))
    return found


def refuse_twice(names: Collection[str], fields: Sequence[tuple[Control, FieldValue]]) -> None:
    """Raises `SelectionError` if a field and a processor of ``names`` are the same control."""
    for _, value in fields:
        if value.requested.name in names and not value.is_neutral:
            problem = f"is set, and the processor {value.requested.name} is named too; give one of them"
            raise SelectionError(value.requested.path, problem)


@cached
def _cleared(record: type) -> dict[str, None]:
    return {one.name: None for one in processor_controls(record) if one.refused is not None}


def for_engine(params: SamplingParams, **changes: Any) -> SamplingParams:
    """``params`` for an engine: without the fields that are processors of the chain by now.

    Args:
        params: Sampling parameters of the request.
        changes: Further fields to set.
    """
    return params.with_values(**_cleared(type(params)) | changes)


def is_sampled(params: SamplingParams, chain: ProcessorChain | None) -> bool:
    """Whether tokens are sampled: by the fields, or by a named processor if no field is greedy."""
    if not params.is_greedy:
        return True
    is_told = any(getattr(params, one.name) == one.greedy for one in late_controls(type(params)))
    return not is_told and chain is not None and chain.wants_random_sampling


def with_field_processors(
    params: SamplingParams,
    chain: ProcessorChain | None,
    prompt: Sequence[int],
    context: Context,
    extra: Sequence[Processor] = (),
    *,
    by_sampler: Collection[str],
    late: bool = False,
) -> tuple[SamplingParams, ProcessorChain | None]:
    """The parameters that are left to the sampler, and the chain with everything else.

    Args:
        params: Sampling parameters of the request.
        chain: The request's own processors, started after its prompt and added to in place; None if
            it has none.
        prompt: Token ids of the prompt.
        context: Context of the processors that are made here.
        extra: Processors that the engine adds, before those of the same stage.
        by_sampler: Fields of temperature and truncation that the engine's sampler applies itself.
            If another one is asked for, all of them join the chain.
        late: Whether temperature and truncation join the chain whatever is asked for.

    Raises:
        InvalidRequest: a value is out of the bounds of its processor, or a control is given twice.
        ProcessorFailed: a processor raised on the prompt.
    """
    if chain is not None:
        _refuse_named_too(params, chain)
    random = is_sampled(params, chain)
    added = [*extra, *_processors(params, context, late=False)]
    if late or (chain is not None and chain.shapes_late) or (random and not _sampler_does_all(params, by_sampler)):
        params, last = _late_processors(params, context, random)
        added += last
    if not added:
        return params, chain
    chain = chain or empty_chain(context, prompt)
    chain.add(added)
    return params, chain


def empty_chain(context: Context, prompt: Sequence[int]) -> ProcessorChain:
    """A chain without processors, started after a prompt."""
    chain = ProcessorChain([], context)
    chain.start(prompt)
    return chain


def check_values(params: SamplingParams, context: Context) -> None:
    """Check the fields as their processors do, for an engine that applies them itself.

    Raises:
        InvalidRequest: a value is out of the bounds of its processor.
    """
    for late in (False, True):
        _processors(params, context, late=late)


def _refuse_named_too(params: SamplingParams, chain: ProcessorChain) -> None:
    try:
        refuse_twice({member.name for member in chain.members}, field_values(params))
    except SelectionError as error:
        raise InvalidRequest(error.path, error.problem) from None


def _sampler_does_all(params: SamplingParams, by_sampler: Collection[str]) -> bool:
    """Whether the sampler applies all of the temperature and truncation that is asked for."""
    return all(one.name in by_sampler or not one.is_active(params) for one in late_controls(type(params)))


def _late_processors(params: SamplingParams, context: Context, random: bool) -> tuple[SamplingParams, list[Processor]]:
    """Temperature and truncation as processors; of a greedy request temperature 0, before all."""
    if not random:
        return params, Temperature.build(Temperature.Args(value=0.0), context)
    processors = _processors(params, context, late=True)
    cleared: dict[str, Any] = {one.name: None for one in late_controls(type(params))}
    return replace(params, **cleared | {"temperature": 1.0}), processors


def _processors(params: SamplingParams, context: Context, *, late: bool) -> list[Processor]:
    made: list[Processor] = []
    for control, runs_as in _engine_controls(type(params), late):
        if not control.is_active(params):
            continue
        value = runs_as.value_of(getattr(params, control.name))
        args = {runs_as.argument: value, **runs_as.fixed}
        try:
            made += runs_as.processor.build(runs_as.processor.Args.model_validate(args), context)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"]
            raise InvalidRequest(control.params_path, f"{problem}, got {value!r}") from None
        except ArgumentError as error:
            raise InvalidRequest(control.params_path, error.problem) from None
    return made
