"""Typed arguments for a foreign class, from the signature of its constructor."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union

from pydantic import Field, create_model

from adapters.contract import ProcessorArgs
from adapters.processors.arguments import MAX_INT, MAX_LIST, MAX_TEXT

_MAX_FLOAT = 1e9

_Int = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
_Float = Annotated[float, Field(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
_Str = Annotated[str, Field(max_length=MAX_TEXT)]
_SCALARS: dict[Any, Any] = {bool: bool, int: _Int, float: _Float, str: _Str}
_LISTS: dict[Any, Any] = {
    int: Annotated[list[_Int], Field(max_length=MAX_LIST)],
    float: Annotated[list[_Float], Field(max_length=MAX_LIST)],
    str: Annotated[list[_Str], Field(max_length=MAX_LIST)],
}


def constructor_parameters(target: type) -> dict[str, inspect.Parameter]:
    """Named parameters of the constructor."""
    unnamed = (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    parameters = inspect.signature(target).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind not in unnamed}


def args_model(target: type, fixed: Mapping[str, Any]) -> type[ProcessorArgs]:
    """The arguments that a request may give to ``target``'s constructor.

    Parameters whose annotation, or else default, is JSON data become fields with general bounds; the others, those in
    ``fixed`` and ``tokenizer`` are not the request's.

    Raises:
        TypeError: ``fixed`` names a parameter that there is not, or a parameter without default can be given by nobody.
    """
    parameters, hints = constructor_parameters(target), _hints(target)
    unknown = set(fixed) - set(parameters)
    if unknown:
        raise TypeError(f"{target.__name__} has no parameter {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in fixed or name == "tokenizer":
            continue
        needed = parameter.default is inspect.Parameter.empty
        kind = _json_type(hints.get(name, Any if needed else type(parameter.default)))
        if kind is not None and not name.startswith("_"):
            description = f"Parameter {name} of {target.__name__}."
            fields[name] = (kind, Field(default=... if needed else parameter.default, description=description))
        elif needed:
            message = f"{target.__name__} needs {name}, which is not JSON data"
            raise TypeError(f"{message}; fix its value, requests cannot give it")
    return create_model(f"{target.__name__}Args", __base__=ProcessorArgs, **fields)


def _hints(target: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__)  # type: ignore[misc]
    except (NameError, TypeError):  # names that exist for type checkers only
        return {}


def _json_type(annotation: Any) -> Any:
    """The bounded type for ``annotation``, None if it is not JSON data."""
    if annotation in (list, dict, Any, None):
        return None
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _optional(parts)
    if origin in (list, Sequence):
        return _LISTS.get(parts[0])
    return _SCALARS.get(annotation)


def _optional(parts: tuple[Any, ...]) -> Any:
    kinds = [_json_type(part) for part in parts if part is not type(None)]
    if any(kind is None for kind in kinds) or len(kinds) != 1 or len(parts) != 2:
        return None
    return kinds[0] | None
