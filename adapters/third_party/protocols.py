"""Calling conventions of third-party logits processors, recognised by their signatures.

Never by import::

    dynamo       (input_ids, logits[V])                                 in place
    huggingface  (input_ids int64 [1, n], scores [1, V]) -> scores      transformers' own
    trtllm       (req_id, logits[1, 1, V], ids [[...]], stream, client) in place; NVIDIA's zoo
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

from adapters.signatures import signature_of

ThirdPartyProtocol = Literal["dynamo", "huggingface", "trtllm"]


def protocol_of(target: Any) -> ThirdPartyProtocol:
    """The calling convention of a third-party class, instance or function, by its signature.

    Raises:
        TypeError: none of the three, or ambiguous.
    """
    parameters = _call_parameters(target)
    names = [parameter.name for parameter in parameters]
    required = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
    if required <= 5 <= len(names) and names[1] == "logits" and not names[0].endswith("s"):
        return "trtllm"
    if required <= 2 <= len(names):
        ids = str(parameters[0].annotation).lower()  # types first: Dynamo's examples also name their logits scores
        if _is_transformers(target) or "tensor" in ids:
            return "huggingface"
        if names[1] == "logits" or "sequence[" in ids or "list[" in ids:
            return "dynamo"
        if names[1] == "scores":
            return "huggingface"
    shapes = "(input_ids, logits), (input_ids, scores) or (req_id, logits, token_ids, stream_ptr, client_id)"
    raise TypeError(f"{name_of(target)} must be callable as {shapes}; its parameters are ({', '.join(names)})")


def name_of(target: Any) -> str:
    """Name of a class or function, or of an instance's class."""
    named = target if isinstance(target, type) or inspect.isroutine(target) else type(target)
    return str(named.__name__)


def _call_parameters(target: Any) -> list[inspect.Parameter]:
    if inspect.isroutine(target):
        parameters = list(signature_of(target).parameters.values())
    else:
        # Looked up in the class dictionaries: a class's own __call__ attribute is its metaclass's,
        # which makes instances.
        called = next((vars(base)["__call__"] for base in _mro(target) if "__call__" in vars(base)), None)
        if called is None:
            raise TypeError(f"{name_of(target)} cannot be called")
        parameters = list(signature_of(called).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise TypeError(f"{name_of(target)} must be callable without the keyword {parameter.name}")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in positional]


def _is_transformers(target: Any) -> bool:
    return any(
        base.__name__ == "LogitsProcessor" and base.__module__.startswith("transformers.") for base in _mro(target)
    )


def _mro(target: Any) -> tuple[type, ...]:
    return target.__mro__ if isinstance(target, type) else type(target).__mro__
