"""Ops: what a pipe runs. An op declares the type that it takes and the type that it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from adapters.pipe.types import TaggedTensor, TensorType
from adapters.signatures import signature_of


class Op(ABC):
    """One step of a pipe. Subclasses set ``IN`` and ``OUT`` and write ``__call__``.

    Class attributes:
        run_time_names: The parameters of a call that the op takes. None: those of the signature
            of ``__call__``, where ``**kwargs`` accepts any name.

    Raises:
        ValueError: the class has no ``IN`` or no ``OUT``.
    """

    IN: ClassVar[TensorType] = None  # type: ignore[assignment]
    OUT: ClassVar[TensorType] = None  # type: ignore[assignment]
    run_time_names: ClassVar[frozenset[str] | None] = None

    def __init__(self) -> None:
        if self.IN is None or self.OUT is None:
            raise ValueError(f"Operator {type(self).__name__} must define IN and OUT tensor types")

    @abstractmethod
    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """The result for ``tensor``; the parameters of the call of the pipe are in ``kwargs``."""

    def names_taken(self) -> frozenset[str] | None:
        """The run-time parameters that the op takes, None if unknown."""
        return _keywords(type(self).__call__) if self.run_time_names is None else self.run_time_names

    def accepted(self, given: dict[str, Any]) -> dict[str, Any]:
        """The parameters of a call that `__call__` has room for: all of them with ``**kwargs``."""
        names = _keywords(type(self).__call__)
        return given if names is None else {name: value for name, value in given.items() if name in names}

    def _validate_input_type(self, tensor: TaggedTensor) -> TensorType:
        if tensor.type != self.IN:
            name = type(self).__name__
            raise ValueError(f"Operator {name} cannot accept input type {tensor.type}. Expected: {self.IN}")
        return self.OUT

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.IN} -> {self.OUT})"


class ParameterizedOp(Op):
    """An op with parameters: those of the call override the defaults given here."""

    def __init__(self, **default_params: Any) -> None:
        super().__init__()
        self.default_params = default_params

    def _get_param(self, name: str, kwargs: dict[str, Any], required: bool = True) -> Any:
        """The parameter ``name``, removed from ``kwargs``; None if it is absent and not required.

        Raises:
            ValueError: it is required and neither ``kwargs`` nor the defaults have it.
        """
        if name in kwargs:
            return kwargs.pop(name)
        if required and name not in self.default_params:
            raise ValueError(f"Required parameter '{name}' not provided for {type(self).__name__}")
        return self.default_params.get(name)


@lru_cache
def _keywords(call: Callable[..., Any]) -> frozenset[str] | None:
    """Parameters of an op's ``__call__`` after the tensor, None if it takes any name."""
    parameters = list(signature_of(call).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters[2:])
