"""Checks of a class's declarations and of its argument validation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from adapters.catalog import NAME
from adapters.contract import (
    ArgumentError,
    Processor,
    ProcessorArgs,
    Reads,
    ShapingProcessor,
    Stage,
    SteeringProcessor,
    Unsatisfiable,
)
from adapters.interrupts import is_interrupt
from adapters.testing.generation import each, junk, valid
from adapters.testing.registry import check
from adapters.testing.schemas import mutants, unbounded
from adapters.testing.subject import CheckFailed, Subject

_NUM_JUNK, _NUM_VALID = 60, 25
_REFUSALS = (ValidationError, ArgumentError, Unsatisfiable)


@check("declares", "name, version, stage, reads, arguments and a summary are declared, and fit its kind")
def declares(subject: Subject) -> None:
    """See `CHECKS`."""
    kind = subject.processor
    for attribute in ("name", "version", "stage", "reads", "Args"):
        if not hasattr(kind, attribute):
            raise CheckFailed(f"{kind.__name__}.{attribute} is not set")
    if not NAME.fullmatch(kind.name):
        raise CheckFailed(f"the name {kind.name!r} cannot be given in a request: {NAME.pattern}")
    if type(kind.version) is not int or kind.version < 1:
        raise CheckFailed(f"version must be a whole number of at least 1, got {kind.version!r}")
    if not isinstance(kind.reads, Reads) or not isinstance(kind.stage, Stage):
        raise CheckFailed(f"reads and stage must be members of Reads and Stage, got {kind.reads!r} and {kind.stage!r}")
    if not inspect.getdoc(kind) or kind.__doc__ is None:
        raise CheckFailed(f"{kind.__name__} has no docstring; its first line is the summary in the catalogue")
    _check_args_model(kind.Args)
    for case in subject.cases:
        for processor in subject.build(case.arguments):
            _check_stage(processor)


def _check_args_model(model: type[ProcessorArgs]) -> None:
    if not (isinstance(model, type) and issubclass(model, ProcessorArgs)):
        raise CheckFailed("Args must be a subclass of ProcessorArgs")
    config = model.model_config
    kept = (config.get("extra"), config.get("strict"), config.get("allow_inf_nan"))
    if kept != ("forbid", True, False):
        raise CheckFailed("Args loosens ProcessorArgs: unknown names, NaN and wrong types must stay forbidden")


def _check_stage(processor: Processor) -> None:
    stage = processor.stage
    if isinstance(processor, SteeringProcessor):
        if stage > Stage.FORCE:
            raise CheckFailed(f"a steering processor acts up to the stage FORCE, not at {stage.name}")
    elif not isinstance(processor, ShapingProcessor):
        raise CheckFailed(f"{type(processor).__name__} is neither a steering nor a shaping processor")


@check("bounds", "every number, text and list of the arguments is bounded, in the schema where callers see it")
def bounds(subject: Subject) -> None:
    """See `CHECKS`."""
    missing = list(dict.fromkeys(unbounded(subject.schema, subject.schema)))
    if missing:
        raise CheckFailed(f"{'; '.join(missing)}: give Field(ge=, le=) or Field(max_length=)")


@check("arguments", "wrong arguments are refused with ValidationError or ArgumentError, and never with anything else")
def arguments(subject: Subject) -> str:
    """See `CHECKS`."""
    num_mutants = 0
    for example in [case.arguments for case in subject.cases if case.is_example] or [{}]:
        for mutant in mutants(subject.schema, example):
            num_mutants += 1
            accepted = _take(subject, mutant.arguments, mutant.wrong)
            if accepted and mutant.refused:
                raise CheckFailed(f"accepted although {mutant.wrong} (otherwise {dict(example)!r:.200})")
    each(junk(subject.schema), _NUM_JUNK, lambda values: _take(subject, values, "junk"))
    each(valid(subject.schema, subject.examples), _NUM_VALID, lambda values: _take(subject, values, "made up"))
    return f"{num_mutants} wrong and {_NUM_JUNK + _NUM_VALID} made-up arguments"


def _take(subject: Subject, given: Mapping[str, Any], what: str) -> bool:
    """Whether ``given`` is accepted, both as JSON and as Python values.

    Raises:
        CheckFailed: it is refused with an error other than ValidationError or ArgumentError.
    """
    accepted = False
    for way in (subject.parse, subject.processor.Args.model_validate):
        try:
            subject.processor.build(way(given), subject.context)
        except _REFUSALS:
            continue
        except BaseException as error:  # the processor boundary: it may exit
            if is_interrupt(error):
                raise
            text = f"{type(error).__name__}: {error}"
            shown = f"{dict(given)!r:.200}"
            raise CheckFailed(f"{what}: raised {text:.200}; raise ArgumentError(name, problem) ({shown})") from error
        accepted = True
    return accepted
