"""Wrapping of third-party logits processors: as a class for the catalogue, or for one chain."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from adapters.contract import ArgumentError, Context, Processor, ProcessorArgs, Stage
from adapters.third_party.arguments import END_TOKENS, args_model, constructor_parameters, from_context
from adapters.third_party.copies import copied
from adapters.third_party.processors import DynamoProcessor, HuggingFaceProcessor, ThirdPartyProcessor, ZooProcessor
from adapters.third_party.protocols import ThirdPartyProtocol, name_of, protocol_of

_MAX_MESSAGE = 300

_WRAPPERS: dict[str, type[ThirdPartyProcessor]] = {
    "dynamo": DynamoProcessor,
    "huggingface": HuggingFaceProcessor,
    "trtllm": ZooProcessor,
}


def wrap_third_party(
    target: Any,
    name: str | None = None,
    *,
    stage: Stage = Stage.SOFT,
    version: int = 1,
    stateful: bool | None = None,
    protocol: ThirdPartyProtocol | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> type[ThirdPartyProcessor]:
    """A class for the catalogue that runs a third-party processor.

    Requests may set the constructor arguments that are JSON data (numbers, texts, booleans, lists
    of them), within generic bounds. By their names, ``tokenizer``, ``vocab_size`` (the width of a
    row) and ``device`` (of the logits) come from the model, never from the request;
    ``eos_token_id`` and ``eos_token_ids`` default to the request's end tokens: all of them where
    the annotation has a list, else the model's own.

    Args:
        target: A third-party class, an instance (each choice gets a copy of it), or a function.
        name: Name in the catalogue; the target's own by default.
        stage: Position in the order law.
        version: Version of the third-party processor.
        stateful: Whether calls depend on earlier calls; by default all but plain functions are
            taken to be stateful.
        protocol: Calling convention, if the signature is ambiguous.
        arguments: Arguments of the constructor that requests cannot set.

    Raises:
        TypeError: the target follows none of the conventions, or its constructor requires an
            argument that neither a request nor ``arguments`` can give.
    """
    fixed = dict(arguments or {})
    wrapper = _WRAPPERS[protocol or protocol_of(target)]
    name = name or name_of(target)
    model = args_model(target, fixed) if isinstance(target, type) else ProcessorArgs

    def build(cls: type[ThirdPartyProcessor], args: ProcessorArgs, context: Context) -> list[Processor]:
        make = functools.partial(third_party_processor, target, name=name, stage=stage, version=version)
        return [_built(functools.partial(make, stateful=stateful, protocol=protocol), target, fixed, args, context)]

    summary = (
        " ".join((inspect.getdoc(target) or "").strip().partition("\n\n")[0].split())
        or f"Runs {name_of(target)} unchanged."
    )
    members = {
        "__doc__": summary,
        "__module__": __name__,
        "name": name,
        "stage": stage,
        "version": version,
        "observes_logits": _is_stateful(target) if stateful is None else stateful,
        "Args": model,
        "build": classmethod(build),
    }
    return cast(type[ThirdPartyProcessor], type(wrapper.__name__, (wrapper,), members))


def _built(
    make: Callable[..., ThirdPartyProcessor],
    target: Any,
    fixed: Mapping[str, Any],
    args: ProcessorArgs,
    context: Context,
) -> ThirdPartyProcessor:
    """The processor of one choice.

    Args:
        make: Takes the arguments of the constructor, and the tokenizer.
        target: The third-party class, instance or function.
        fixed: Arguments that requests cannot set.
        args: Arguments of the request.
        context: Context of the choice.

    Raises:
        ArgumentError: the constructor refuses what the request has set.
    """
    given = {field: getattr(args, field) for field in args.model_fields_set}
    given = {field: value for field, value in given.items() if field not in END_TOKENS or value is not None}
    given = {**fixed, **given}
    arguments = given | (from_context(target, context, given) if isinstance(target, type) else {})
    try:
        return make(arguments=arguments, tokenizer=context.vocabulary.tokenizer)
    except ValueError as error:
        if not args.model_fields_set:
            raise
        raise ArgumentError(", ".join(sorted(args.model_fields_set)), str(error)[:_MAX_MESSAGE]) from error


def third_party_processor(
    target: Any,
    *,
    name: str | None = None,
    stage: Stage = Stage.SOFT,
    version: int = 1,
    stateful: bool | None = None,
    protocol: ThirdPartyProtocol | None = None,
    arguments: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> ThirdPartyProcessor:
    """A third-party processor for one chain; arguments as `wrap_third_party`.

    Args:
        tokenizer: Given to a constructor that has a parameter of this name.

    Raises:
        TypeError: the target follows none of the conventions, cannot be copied, or needs a
            tokenizer and there is none.
    """
    wrapper = _WRAPPERS[protocol or protocol_of(target)]
    arguments = dict(arguments or {})
    makes_on = isinstance(target, type) and "device" in constructor_parameters(target) and "device" not in arguments
    make = _factory(target, arguments, tokenizer)
    stateful = _is_stateful(target) if stateful is None else stateful
    name = name or name_of(target)
    return wrapper(make, name=name, stage=stage, version=version, stateful=stateful, takes_device=makes_on)


def _is_stateful(target: Any) -> bool:
    return not inspect.isroutine(target)


def _factory(target: Any, arguments: dict[str, Any], tokenizer: Any) -> Callable[[], Any]:
    if not isinstance(target, type):
        if arguments:
            raise TypeError(f"{name_of(target)} is not a class, it takes no arguments")
        return functools.partial(copied, target)
    parameter = constructor_parameters(target).get("tokenizer")
    if parameter is not None and "tokenizer" not in arguments:
        if tokenizer is not None:
            arguments["tokenizer"] = tokenizer
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(f"{target.__name__} needs a tokenizer, and this model was loaded without one")
    return functools.partial(target, **arguments)
