"""Typed arguments for a third-party class, from the signature of its constructor."""

from __future__ import annotations

import contextlib
import inspect
import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Union

from pydantic import Field, create_model

from adapters.contract import ArgumentError, Context, ProcessorArgs
from adapters.processors.arguments import MAX_INT, MAX_LIST, MAX_TEXT
from adapters.signatures import annotations_of, signature_of

_MAX_FLOAT = 1e9

_Int = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
_Float = Annotated[float, Field(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
_Str = Annotated[str, Field(max_length=MAX_TEXT)]
_SCALARS: dict[Any, Any] = {bool: bool, int: _Int, float: _Float, str: _Str}

_ANNOTATED: Any = Annotated  # for types made at run time
_LIST: Any = list
_UNION: Any = Union

_MODELS_OWN = ("tokenizer", "device", "vocab_size")
END_TOKENS = ("eos_token_id", "eos_token_ids")
"""Parameters that default to the request's end tokens."""


def constructor_parameters(target: type) -> dict[str, inspect.Parameter]:
    """Named parameters of the constructor."""
    unnamed = (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    parameters = signature_of(target).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind not in unnamed}


def args_model(target: type, fixed: Mapping[str, Any]) -> type[ProcessorArgs]:
    """The arguments that a request may give to ``target``'s constructor.

    Parameters whose annotation, or else default, is JSON data become fields with generic bounds.
    Requests cannot set the others, those in ``fixed``, and the model's own
    (`adapters.third_party.wrapping.wrap_third_party`).

    Raises:
        TypeError: ``fixed`` names an unknown parameter, or a required parameter cannot be set.
    """
    parameters, hints = constructor_parameters(target), _hints(target)
    for parameter in signature_of(target).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise TypeError(f"{target.__name__} takes {parameter.name} by position only, and arguments have names")
    unknown = set(fixed) - set(parameters)
    if unknown:
        raise TypeError(f"{target.__name__} has no parameter {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in fixed or name in _MODELS_OWN:
            continue
        needed = parameter.default is inspect.Parameter.empty
        kind = _json_type(hints.get(name, Any if needed else type(parameter.default)))
        description = f"Parameter {name} of {target.__name__}."
        if name in END_TOKENS:
            if kind is not None:
                fields[name] = (kind | None, Field(default=None, description=f"{description} The end tokens, if null."))
        elif kind is not None and not name.startswith("_"):
            fields[name] = (kind, Field(**_default_of(parameter), description=description))
        elif needed:
            message = f"{target.__name__} needs {name}, which is not JSON data"
            raise TypeError(f"{message}; fix its value, requests cannot give it")
    return create_model(f"{target.__name__}Args", __base__=ProcessorArgs, **fields)


def from_context(target: type, context: Context, given: Collection[str]) -> dict[str, Any]:
    """Model and request arguments for ``target``'s constructor, by name, except ``given`` ones.

    Raises:
        ArgumentError: it needs an end token, and this request has none.
    """
    parameters, hints = constructor_parameters(target), _hints(target)
    parameters = {name: parameter for name, parameter in parameters.items() if name not in given}
    known: dict[str, Any] = {}
    if "vocab_size" in parameters:
        known["vocab_size"] = context.vocabulary.size
    for name in END_TOKENS:
        if name not in parameters:
            continue
        ends = sorted(context.end_token_ids)
        own = sorted(context.end_token_ids & context.vocabulary.eos_token_ids)
        if "list" in str(hints.get(name, parameters[name].annotation)).lower() or name == "eos_token_ids":
            known[name] = ends
        elif ends:
            known[name] = (own or ends)[0]
        elif parameters[name].default is inspect.Parameter.empty:
            raise ArgumentError(name, "this request has no end token")
    return known


def _default_of(parameter: inspect.Parameter) -> dict[str, Any]:
    """Arguments of pydantic's ``Field``; a default that is no JSON is kept out of the schema."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return {}
    try:
        json.dumps(default, allow_nan=False)
    except (TypeError, ValueError):  # minus infinity, as of transformers' processors that truncate
        return {"default_factory": lambda: default}
    return {"default": default}


def _hints(target: type) -> dict[str, Any]:
    """The annotations that can be evaluated: some have names that exist for type checkers only."""
    init: Any = inspect.unwrap(target.__init__)  # type: ignore[misc]
    hints: dict[str, Any] = {}
    for name, annotation in annotations_of(init).items():
        one = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(Exception):  # whatever an annotation raises
            hints |= typing.get_type_hints(one, getattr(init, "__globals__", {}))
    return hints


def _json_type(annotation: Any) -> Any:
    """The bounded type for ``annotation``, None if it is not JSON data."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _union(parts)
    if origin in (list, Sequence):
        kind = _json_type(parts[0]) if parts else None
        return None if kind is None else _ANNOTATED[_LIST[kind], Field(max_length=MAX_LIST)]
    return _SCALARS.get(annotation) if isinstance(annotation, type) else None


def _union(parts: tuple[Any, ...]) -> Any:
    kinds = [None if part is type(None) else _json_type(part) for part in parts]
    if any(kind is None and part is not type(None) for kind, part in zip(kinds, parts, strict=True)):
        return None
    return _UNION[tuple(kinds)]
